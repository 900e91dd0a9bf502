"""Policies by name. Others join through the entry-point group ``pollux.policies``."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points

from pollux.errors import InvalidValueError, UnknownNameError
from pollux.policy.antman import AntManPolicy
from pollux.policy.base import WEIGHTINGS, Policy, PolicySettings
from pollux.policy.elasticflow import ElasticFlowPolicy
from pollux.policy.gandiva import GandivaPolicy
from pollux.policy.gavel import GavelPolicy
from pollux.policy.gittins import GittinsPolicy
from pollux.policy.las import LasPolicy
from pollux.policy.lucid import LucidPolicy
from pollux.policy.optimus import OptimusPolicy
from pollux.policy.pollux import PolluxPolicy
from pollux.policy.queueing import EdfPolicy, EqualPolicy, FifoPolicy, SrtfPolicy
from pollux.policy.shockwave import ShockwavePolicy
from pollux.policy.sia import SiaPolicy
from pollux.policy.slaq import SlaqPolicy
from pollux.policy.themis import ThemisPolicy
from pollux.policy.tiresias import TiresiasPolicy

PolicyFactory = Callable[[PolicySettings], Policy]

ENTRY_POINT_GROUP = "pollux.policies"

_BUILT_IN: dict[str, PolicyFactory] = {
    "antman": AntManPolicy,
    "edf": EdfPolicy,
    "elasticflow": ElasticFlowPolicy,
    "equal": EqualPolicy,
    "fifo": FifoPolicy,
    "gandiva": GandivaPolicy,
    "gavel": GavelPolicy,
    "gittins": GittinsPolicy,
    "las": LasPolicy,
    "lucid": LucidPolicy,
    "optimus": OptimusPolicy,
    "pollux": PolluxPolicy,
    "shockwave": ShockwavePolicy,
    "sia": SiaPolicy,
    "slaq": SlaqPolicy,
    "srtf": SrtfPolicy,
    "themis": ThemisPolicy,
    "tiresias": TiresiasPolicy,
}


def policy_names() -> list[str]:
    """Every policy that :func:`make_policy` knows, ours and installed ones."""
    return sorted({*_BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def unknown_policy(name: str) -> UnknownNameError:
    """The error for a name that no policy has. A file's name is answered with how a policy is made known."""
    hint = ""
    if name.endswith(".py") or "/" in name:
        hint = (
            "A policy of your own is not named by its file: install a package with an entry point in the group "
            f"{ENTRY_POINT_GROUP!r}, as docs/tutorials/own-policy.md shows."
        )
    return UnknownNameError("policy", name, policy_names(), hint)


def make_policy(name: str, settings: PolicySettings | None = None) -> Policy:
    """A fresh policy.

    Raises:
        UnknownNameError: there is no policy of this name.
        InvalidValueError: an installed package claims a name that is already taken.
    """
    settings = settings or PolicySettings()
    outside = [point for point in entry_points(group=ENTRY_POINT_GROUP) if point.name == name]
    if outside and (name in _BUILT_IN or len(outside) > 1):
        raise InvalidValueError(f"policy {name!r} is defined twice: {', '.join(str(p.value) for p in outside)}")
    if outside:
        try:
            factory: PolicyFactory = outside[0].load()
            return factory(settings)
        except Exception as error:  # a module of another package may raise anything when it is loaded
            raise InvalidValueError(
                f"policy {name!r} ({outside[0].value}) cannot be made: {type(error).__name__}: {error}; "
                "mend the package that has it, or uninstall it"
            ) from error
    if name not in _BUILT_IN:
        raise unknown_policy(name)
    return _BUILT_IN[name](settings)


__all__ = [
    "ENTRY_POINT_GROUP",
    "WEIGHTINGS",
    "Policy",
    "PolicyFactory",
    "PolicySettings",
    "make_policy",
    "policy_names",
    "unknown_policy",
]
