"""The suite ``tune``: simulated studies under other tools' rules and ours, as data. The catalogue lists it.

:mod:`pollux.evaluation.studies` runs the cases; it needs Optuna, this module does not.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from pollux.evaluation.suites import Chart, Column, StudyCase, Suite
from pollux.simulator.config import SimulationConfig

_IN_PLACE = SimulationConfig(resize_s=5.0, decides_on_events=True, remembers_profiles=True)
_BY_RESTART = dataclasses.replace(_IN_PLACE, resize_s=30.0)
TENANT, PAPER = "beside another tenant", "a Bayesian searcher, four trials at a time"
_SEARCH = "{trials} trials on {gpus} GPUs, seed {seed}"


def tune_suite(osdi21: Path | None, is_quick: bool) -> Suite:
    """``osdi21``: the folder of that artifact; without it built-in profiles are the trials' physics."""
    traces = None if osdi21 is None else str(osdi21 / "traces")
    nodes, trials, seeds = (4, 40, (0,)) if is_quick else (16, 200, (0, 1, 2))
    cases = [case for seed in seeds for case in _search(traces, nodes, trials, seed)]
    cases += _paper(traces, 8 if is_quick else 32)
    cases += _tenant(traces, nodes, trials)
    return Suite(
        name="tune",
        title="Studies whose trials are elastic jobs",
        about="Trials have the physics of ResNet-18 on CIFAR-10 and measured learning curves of the digits network "
        "(benchmarks/digits_curves.py). The target is the loss that the best 2 % of the parameter sets end with. All "
        "but static prune by the same successive halving; the study's own code decides in every row. Static and ASHA: "
        "each trial has so many GPUs and the batch of one GPU times as many. Ray Tune's sharing: GPUs are shared out "
        "evenly, a resize is a restart of 30 s. Ours: by promise and goodput, resizes of 5 s in place. Beside another "
        "tenant: the finish-time fairness ρ of eight jobs of theirs next to the study, and next to one job.",
        studies=tuple(cases),
        has_means=False,
        columns=(
            Column(heading="GPU-h to target", key="target_gpu_h", form=",.1f"),
            Column(heading="h to target", key="target_h", form=".2f"),
            Column(heading="h in all", key="all_h", form=".2f", rank=1),
            Column(heading="GPU-h in all", key="all_gpu_h", form=",.1f", rank=1),
            Column(heading="best loss", key="best", form=".4f", rank=2),
            Column(heading="ended", key="num_complete", form=".0f", rank=3),
            Column(heading="ρ mean", key="rho_mean", form=".3f"),
            Column(heading="ρ worst", key="rho_worst", form=".3f", rank=1),
        ),
        charts=(
            Chart(title="GPU-hours to target", key="target_gpu_h", unit="GPU-h"),
            Chart(title="Time to target", key="target_h", unit="h"),
        ),
    )


def _search(traces: str | None, num_nodes: int, trials: int, seed: int) -> list[StudyCase]:
    table = _SEARCH.format(trials=trials, gpus=4 * num_nodes, seed=seed)
    config = dataclasses.replace(_IN_PLACE, num_nodes=num_nodes)
    base = StudyCase(table=table, label="pollux tune", traces=traces, config=config, trials=trials, seed=seed)
    fixed = dataclasses.replace(base, is_promising=False)
    return [
        base,
        dataclasses.replace(fixed, label="static, 1 GPU each", replicas=1, pruner="none"),
        dataclasses.replace(fixed, label="ASHA, 1 GPU each", replicas=1),
        dataclasses.replace(fixed, label="ASHA, 4 GPUs each", replicas=4, parallel=num_nodes),
        dataclasses.replace(
            fixed,
            label="Ray Tune's sharing",
            policy="equal",
            config=dataclasses.replace(_BY_RESTART, num_nodes=num_nodes),
        ),
    ]


def _paper(traces: str | None, trials: int) -> list[StudyCase]:
    config = dataclasses.replace(_IN_PLACE, num_nodes=4)
    base = StudyCase(
        table=PAPER,
        label="elastic",
        traces=traces,
        config=config,
        trials=trials,
        parallel=4,
        sampler="tpe",
        pruner="none",
        is_promising=False,
    )
    return [
        base,
        dataclasses.replace(base, label="static, 4 GPUs each", replicas=4),
        dataclasses.replace(base, label="pollux tune", is_promising=True, pruner="asha"),
    ]


def _tenant(traces: str | None, num_nodes: int, trials: int) -> list[StudyCase]:
    config = dataclasses.replace(_IN_PLACE, num_nodes=num_nodes)
    base = StudyCase(
        table=TENANT, label="pollux tune", traces=traces, config=config, trials=trials, num_beside=8, pruner="none"
    )
    return [
        base,
        dataclasses.replace(base, label="one job instead", is_one_job=True),
        dataclasses.replace(base, label="every trial counts as a job", is_promising=False),
    ]
