"""Options that set a field of a configuration, and those of the policy: one list for simulations and for servers.

``pollux simulate`` and ``pollux compare`` take :data:`POLICY_OPTIONS` among theirs
(:mod:`pollux.cli.simulation_options`), ``pollux up`` takes them as :class:`PolicyOptions`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Optional, Self, get_args, get_type_hints

import typer

from pollux.cli.option_groups import OptionGroup
from pollux.policy import PolicySettings

CLUSTER_PANEL, POLICY_PANEL = "Cluster", "Policy"


class Switch(StrEnum):
    ON = "on"
    OFF = "off"


class Weights(StrEnum):
    """The names in :data:`pollux.policy.WEIGHTINGS`."""

    AUTO = "auto"
    EQUAL = "equal"
    LEARNT = "learnt"
    REMAINING = "remaining"


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingOption:
    """One option, and the field that it sets. Left out, the field stays as by default."""

    flag: str
    field: str
    help: str  # {default} is the field's
    owner: type  # SimulationConfig or PolicySettings
    panel: str = CLUSTER_PANEL
    metavar: str | None = None
    kind: type | None = None  # what is typed; None: what the field is
    read: Callable[[Any], Mapping[str, Any]] | None = None  # the fields that a typed value sets; None: the one
    said: Callable[[Any, PolicySettings], object] | None = None  # see said_value; None: the field

    @property
    def name(self) -> str:
        return self.flag.removeprefix("--").replace("-", "_")

    @property
    def default(self) -> Any:
        return getattr(self.owner(), self.field)

    def parameter(self) -> inspect.Parameter:
        """As typer reads it from a command."""
        default, kind = self.default, self._kind()
        is_left_out = default is None or self.metavar is not None or "{default" in self.help
        option = typer.Option(
            None if is_left_out else _typed(kind, default),
            self.flag,
            metavar=self.metavar,
            help=self.help.format(default=default),
            rich_help_panel=self.panel,
        )
        # A type made at run time: typer takes it, a type checker has nothing to check.
        annotation: Any = Optional[kind]  # noqa: UP045
        return inspect.Parameter(self.name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=annotation)

    def _kind(self) -> type:
        if self.kind is not None:
            return self.kind
        hint: Any = get_type_hints(self.owner)[self.field]
        kinds = [kind for kind in get_args(hint) if kind is not type(None)] or [hint]
        return Switch if kinds[0] is bool else kinds[0]

    def fields(self, value: Any) -> Mapping[str, Any]:
        """The fields that a typed value sets."""
        if self.read is not None:
            return self.read(value)
        return {self.field: value is Switch.ON if isinstance(value, Switch) else value}

    def said_value(self, config: Any, settings: PolicySettings, usual: PolicySettings | None = None) -> object:
        """What would be typed for this configuration and these settings; None: nothing, it is as usual.

        ``usual``: settings that the command has without options, if not the defaults.
        """
        if self.said is not None:
            return self.said(config, settings)
        is_policys = self.owner is PolicySettings
        value = getattr(settings if is_policys else config, self.field)
        default = getattr(usual, self.field) if is_policys and usual is not None else self.default
        if value == default:
            return None
        return ("on" if value else "off") if isinstance(value, bool) else value


def _typed(kind: type, default: Any) -> Any:
    """A field's default as a user would type it: the name of a record, ``off`` for False."""
    if kind is Switch:
        return Switch.ON if default else Switch.OFF
    return kind(getattr(default, "name", default))


def fields_of(options: Sequence[SettingOption], values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that were set, of the typed values by the options' names."""
    found: dict[str, Any] = {}
    for option in options:
        if values.get(option.name) is not None:
            found |= option.fields(values[option.name])
    return found


POLICY_OPTIONS = (
    SettingOption(
        flag="--charge-s",
        field="resize_s",
        owner=PolicySettings,
        panel=POLICY_PANEL,
        metavar="S",
        help="Seconds that the policy charges for a resize; as long as it takes if left out.",
        read=lambda charge_s: {"resize_s": charge_s, "charges_measured": False},
        said=lambda _, settings: None if settings.charges_measured else settings.resize_s,
    ),
    SettingOption(
        flag="--p",
        field="p",
        owner=PolicySettings,
        panel=POLICY_PANEL,
        help="Exponent of the fitness: 1 is greedy, -10 very fair.",
    ),
    SettingOption(
        flag="--weights",
        field="weights",
        owner=PolicySettings,
        panel=POLICY_PANEL,
        help="All jobs count the same; or jobs with less work left count more, as declared (remaining) or as other "
        "jobs of the same application have shown (learnt). auto: as declared, else as learnt.",
        kind=Weights,
        read=lambda name: {"weights": name.value},
    ),
    SettingOption(
        flag="--exploration",
        field="exploration",
        owner=PolicySettings,
        panel=POLICY_PANEL,
        help="A job may ask for this many times the replicas it was measured with.",
    ),
    SettingOption(
        flag="--first-replicas",
        field="first_replicas",
        owner=PolicySettings,
        panel=POLICY_PANEL,
        help="A job may ask for this many replicas before it was measured.",
    ),
    SettingOption(
        flag="--avoid-interference",
        field="avoid_interference",
        owner=PolicySettings,
        panel=POLICY_PANEL,
        help="At most one job that spans nodes on a node.",
    ),
    SettingOption(
        flag="--adapt-batches",
        field="adapts_batch",
        owner=PolicySettings,
        panel=POLICY_PANEL,
        help="For pollux; off: jobs keep the batch size they asked for.",
    ),
    SettingOption(
        flag="--elastic",
        field="is_elastic",
        owner=PolicySettings,
        panel=POLICY_PANEL,
        help="For pollux; off: jobs keep the number of replicas they asked for.",
    ),
    SettingOption(
        flag="--efficiency",
        field="counts_efficiency",
        owner=PolicySettings,
        panel=POLICY_PANEL,
        help="For pollux; off: decide by throughput, as if all examples were equally useful.",
    ),
)


class PolicyOptions(OptionGroup):
    """What was said of :data:`POLICY_OPTIONS`, for a server."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    @classmethod
    def parameters(cls) -> list[inspect.Parameter]:
        return [option.parameter() for option in POLICY_OPTIONS]

    @classmethod
    def of_values(cls, values: Mapping[str, Any]) -> Self:
        return cls(values)

    def settings(self, usual: PolicySettings) -> PolicySettings:
        """``usual`` with what was said.

        Raises:
            InvalidValueError: a value makes no sense.
        """
        return dataclasses.replace(usual, **fields_of(POLICY_OPTIONS, self._values))


def said_settings(settings: PolicySettings, usual: PolicySettings) -> dict[str, object]:
    """The options, with their values, that make these settings of the usual ones."""
    found = {option.flag: option.said_value(None, settings, usual) for option in POLICY_OPTIONS}
    return {flag: value for flag, value in found.items() if value is not None}
