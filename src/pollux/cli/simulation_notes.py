"""Notes on stderr about the arguments of ``simulate`` and ``compare``: options and GPUs without effect, equal seeds.

None of them stops a run.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Mapping, Sequence

import typer

from pollux.cli.policy_options import POLICY_OPTIONS
from pollux.errors import PolluxError
from pollux.policy import PolicySettings, make_policy, policy_names
from pollux.simulator.application import Application, application_key
from pollux.simulator.config import SimulationConfig
from pollux.simulator.result import SimulationResult, group_results
from pollux.simulator.workload import Workload


def say(notes: Iterable[str]) -> None:
    """Each once."""
    for note in dict.fromkeys(notes):
        typer.echo(f"note: {note}", err=True)


def idle_types(workload: Workload, applications: Mapping[str, Application], config: SimulationConfig) -> list[str]:
    """About types of the cluster on which no application of the workload was measured: their GPUs stay idle."""
    measured: set[str] = set()
    for job in workload.jobs:
        application = applications.get(application_key(applications, job))
        if application is None or not application.accelerators:
            return []  # it runs anywhere
        measured.update(application.accelerators)
    found = []
    for group in config.full.groups:
        if group.accelerator not in measured:
            near = difflib.get_close_matches(group.accelerator, sorted(measured), n=1)
            found.append(
                f"no application of {workload.name} was measured on {group.accelerator!r}: its {group.num_slots} GPUs "
                f"stay idle, but count as part of the cluster.{f' Did you mean {near[0]!r}?' if near else ''} "
                f"Measured on: {', '.join(sorted(measured))}."
            )
    return found


def unread_settings(policies: Sequence[str], settings: PolicySettings) -> list[str]:
    """About options that none of the policies reads. A policy that does not say what it reads may read all."""
    usual = PolicySettings()
    given = [one for one in POLICY_OPTIONS if getattr(settings, one.field) != getattr(usual, one.field)]
    read = [make_policy(name).settings_read for name in policies]
    if any(fields is None for fields in read):
        return []
    used = frozenset[str]().union(*(fields or () for fields in read))
    unread: dict[tuple[str, ...], list[str]] = {}
    for option in given:
        if option.field not in used:
            unread.setdefault(_readers_of(option.field), []).append(option.flag)
    who = f"{', '.join(policies)} {'does' if len(policies) == 1 else 'do'} not use"
    return [
        f"{' and '.join(options)} {'are' if len(options) > 1 else 'is'} for {', '.join(readers)}; "
        f"{who} {'them' if len(options) > 1 else 'it'}"
        for readers, options in unread.items()
    ]


def _readers_of(field: str) -> tuple[str, ...]:
    """Names of the policies whose decisions a setting changes."""
    found = []
    for name in policy_names():
        with contextlib.suppress(PolluxError):  # an installed one that is broken
            if field in (make_policy(name).settings_read or ()):
                found.append(name)
    return tuple(found)


def equal_seeds(results: Sequence[SimulationResult]) -> list[str]:
    """About policies that came to the same with every seed, which says nothing about chance."""
    found = []
    for workload, by_policy in group_results(results).items():
        alike = [policy for policy, seeds in by_policy.items() if len(seeds) > 1 and are_alike(seeds)]
        if alike:
            found.append(
                f"every seed gave the same for {', '.join(alike)} on {workload}: the jobs of a file are the same "
                "whatever the seed, so this says nothing about chance"
            )
    return found


def are_alike(seeds: Sequence[SimulationResult]) -> bool:
    """Whether every job took as long in all of them."""
    return len({tuple(job.jct_s for job in result.jobs) for result in seeds}) == 1
