"""One simulation as plain data: how it is loaded, checked, run and repeated.

All commands that simulate use it: ``simulate``, ``compare``, suites, ``replay`` and ``demo --simulate``.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pollux.cli.simulation_options import SimulationOptions, said_options
from pollux.errors import InvalidPlanError, PolicyError, SimulationError
from pollux.policy import PolicySettings, make_policy
from pollux.simulator.application import Application
from pollux.simulator.colocation import check_applications
from pollux.simulator.config import SimulationConfig
from pollux.simulator.result import SimulationResult, mean_of, summarise
from pollux.simulator.run import restricted, simulate
from pollux.simulator.source import load_source
from pollux.simulator.workload import Workload
from pollux.types import JobView, Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One simulation, as plain data that can be handed to another process."""

    workload: str
    traces: str | None
    policy: str
    config: SimulationConfig
    settings: PolicySettings
    shared_speeds: Path | None = None  # where the configuration's were read from
    label: str = ""  # its name beside others; the policy's if empty
    table: str = ""  # setups of one table are compared with each other; by workload if empty

    @property
    def name(self) -> str:
        return self.label or self.policy


def make_setup(workload: str, traces: str | None, policy: str, options: SimulationOptions, seed: int) -> Setup:
    """A simulation as the options of a command describe it.

    Raises:
        InvalidValueError: an option makes no sense.
        InputFileError: a file that an option names cannot be read.
    """
    config = options.config()
    return Setup(
        workload=workload,
        traces=traces,
        policy=policy,
        config=config,
        settings=options.settings(config, seed),
        shared_speeds=options.shared_speeds,
    )


def load_setup(setup: Setup) -> tuple[Workload, Mapping[str, Application]]:
    """The workload of a simulation, and all applications there are.

    Raises:
        PolluxError: the workload or the traces cannot be used.
    """
    workload, applications = load_source(setup.workload, setup.traces, setup.settings.seed)
    check_applications(setup.config.shared_speeds, applications.values())
    return restricted(workload, applications, setup.config), applications


def check_setup(setup: Setup, workload: Workload) -> None:
    """Fail before a long run, not in the middle of it.

    Raises:
        PolluxError: the policy cannot be used, or would never run one of the jobs.
    """
    policy = make_policy(setup.policy, setup.settings)
    # A policy that gives jobs what they asked for would wait for ever for GPUs that do not exist.
    full = setup.config.full
    for job in workload.jobs if not policy.needs_oracle else ():
        allowed = [g for g in full.groups if job.accelerators is None or g.accelerator in job.accelerators]
        num_gpus = max(group.num_slots for group in allowed)
        if (job.requested_replicas or 1) <= num_gpus:
            continue
        alone = Snapshot(now=job.submitted_at, nodes=full.nodes(), jobs=(JobView(spec=job, age_s=0.0),))
        if not policy.decide(alone).allocation_of(job.name):
            raise SimulationError(
                f"workload {setup.workload}: job {job.name!r} asks for {job.requested_replicas} GPUs, the cluster "
                f"has {num_gpus}{' of one type' * (len(full.groups) > 1)}; policy {setup.policy} would never run it"
            )


def run_setup(setup: Setup, on_jobs_done: Callable[[int], None]) -> SimulationResult:
    """Simulate and sum up. ``on_jobs_done(number)`` is called after every decision.

    Raises:
        SimulationError: it never ends, or the policy made a plan that cannot be carried out.
    """
    workload, applications = load_source(setup.workload, setup.traces, setup.settings.seed)
    policy = make_policy(setup.policy, setup.settings)
    try:
        run = simulate(workload, applications, policy, setup.config, lambda _, num_done: on_jobs_done(num_done))
    except InvalidPlanError as error:
        first, *more = error.problems
        rest = f" (and {len(more)} more)" if more else ""
        raise SimulationError(
            f"policy {setup.policy!r} made a plan that cannot be carried out: {first}{rest}"
        ) from error
    except PolicyError as error:
        raise SimulationError(f"policy {setup.policy!r}: {error}") from error
    return summarise(run, setup.settings)


def command_line(command: str, arguments: Sequence[tuple[str, object]], setup: Setup) -> str:
    """The command that repeats this: its own arguments, then every option that is not as by default."""
    traces = [("--traces", setup.traces)] if setup.traces is not None else []
    words = ["pollux", command]
    for name, value in [*arguments, *traces, *said_options(setup.config, setup.settings, setup.shared_speeds)]:
        words += [name, f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join(words)


def summary_row(workload: str, policy: str, seeds: Sequence[SimulationResult], best_s: float) -> dict[str, Any]:
    """The means over a policy's seeds on a workload, of which the best policy has an average JCT of ``best_s``."""
    average = mean_of(seeds, "jct_s.mean")
    return {
        "workload": workload,
        "policy": policy,
        "seeds": [result.config["policy_settings"]["seed"] for result in seeds],
        "ratio_to_best": average / best_s if best_s > 0 else 1.0,
        "avg_jct_s": average,
        **_bound_of(seeds),
        "p50_jct_s": mean_of(seeds, "jct_s.p50"),
        "p99_jct_s": mean_of(seeds, "jct_s.p99"),
        "makespan_s": mean_of(seeds, "makespan_s"),
        "rho_p99": mean_of(seeds, "rho.p99"),
        "rho_max": mean_of(seeds, "rho.max"),
        "resizes_mean": mean_of(seeds, "resizes_mean"),
        "gpu_hours": mean_of(seeds, "gpu_hours"),
        "node_hours": mean_of(seeds, "node_hours"),
        "slot_hours": mean_of(seeds, "slot_hours"),
        "cost": mean_of(seeds, "cost") if seeds[0].cost is not None else None,
        "efficiency_mean": mean_of(seeds, "efficiency_mean"),
        "decision_s": mean_of(seeds, "decision_s.mean"),
    }


def _bound_of(seeds: Sequence[SimulationResult]) -> dict[str, float | None]:
    """The proven lower bound, where it was computed, and the distance from it."""
    if any(result.bound_jct_s is None for result in seeds):
        return {"bound_jct_s": None, "above_bound": None}
    return {"bound_jct_s": mean_of(seeds, "bound_jct_s"), "above_bound": mean_of(seeds, "above_bound")}
