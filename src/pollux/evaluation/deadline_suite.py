"""Deadlines of ElasticFlow's trace as a suite. :mod:`pollux.evaluation.registry` names it."""

from __future__ import annotations

import dataclasses

from pollux.errors import InputFileError
from pollux.evaluation.catalogue import DECISION, JCT, JCT_BARS, MAKESPAN, P99, RESIZES, Artifacts, Source
from pollux.evaluation.deadlines import deadline_workloads
from pollux.evaluation.suites import Chart, Column, Suite
from pollux.simulator.config import SimulationConfig


def deadlines_suite(artifacts: Artifacts, is_quick: bool) -> Suite:
    folder = None if artifacts.folder is None else artifacts.folder / "thirdparty" / "elasticflow"
    if folder is None or not (folder / "traces" / "195job.csv").is_file():
        raise InputFileError(
            folder or "thirdparty/elasticflow",
            "the suite deadlines needs ElasticFlow's trace (traces/195job.csv, throughputs_A100/); say where "
            "thirdparty/ is with --artifacts DIR",
        )
    cases = []
    for table, path in deadline_workloads(folder, num_jobs=60 if is_quick else None).items():
        source = Source(table=table, workload=str(path), traces=str(path.parent))
        world = SimulationConfig(num_nodes=16, gpus_per_node=8)
        alone = dataclasses.replace(world, keeps_deadlines=False)
        cases += [
            source.case("pollux", "pollux, deadlines kept", config=world),
            source.case("pollux", "pollux, without deadlines", config=alone),
            source.case("elasticflow", config=alone),
            source.case("edf", config=alone),
        ]
        if not is_quick:
            cases.append(source.case("tiresias", "tiresias, deadlines kept", config=world))
    return Suite(
        name="deadlines",
        title="Deadlines of ElasticFlow's trace",
        about="195 jobs of two days on 128 A100s (Microsoft ITP, ElasticFlow), with the deadlines and throughputs of "
        "its authors; in the second table every second job has none. Jobs keep their batch, their length is known. "
        "elasticflow and edf decide by deadlines themselves; for the others a layer around the policy gives promised "
        "jobs their minimum share, or does not. No job is dropped: one whose deadline cannot be met still runs.",
        cases=tuple(cases),
        columns=(
            Column(heading="deadlines met", key="deadlines_met", form=".1%"),
            JCT,
            Column(heading="JCT of the rest s", key="best_effort_jct_s", form=",.0f"),
            P99,
            MAKESPAN,
            RESIZES,
            DECISION,
        ),
        charts=(Chart(title="Deadlines met", key="deadlines_met", factor=100, unit="%"), JCT_BARS),
        has_means=False,
    )
