"""Further experiments as suites: parts of Pollux left out, jobs as users configure them, and Shockwave's cluster.

:mod:`pollux.evaluation.registry` names them beside those of :mod:`pollux.evaluation.catalogue`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from pollux.errors import InputFileError
from pollux.evaluation.catalogue import COLUMNS, Artifacts, Source, plain, sources_of
from pollux.evaluation.suites import Case, Chart, Column, Published, Suite
from pollux.policy import PolicySettings
from pollux.simulator.config import SimulationConfig
from pollux.simulator.csvfile import read_rows, to_float
from pollux.simulator.physics import NodeGroup

_BARS = Chart(title="Average job completion time", key="avg_jct_s", factor=1 / 60, unit="min")
_RHO_BARS = Chart(title="Worst finish-time fairness ρ", key="rho_max", is_log=True)

# Ablations ------------------------------------------------------------------------------------

_INTERFERENCE = 0.5  # slowdown of jobs that span nodes and share one, for the two rows about avoiding it


def ablation(artifacts: Artifacts, is_quick: bool) -> Suite:
    sources, notes = sources_of(artifacts, is_quick)
    whole, slowed = SimulationConfig(), SimulationConfig(interference=_INTERFERENCE)
    rows: dict[str, tuple[PolicySettings, SimulationConfig]] = {
        "pollux": (PolicySettings(), whole),
        "batch sizes as asked": (PolicySettings(adapts_batch=False), whole),
        "replicas as asked": (PolicySettings(is_elastic=False), whole),
        "both as asked": (PolicySettings(adapts_batch=False, is_elastic=False), whole),
        "throughput instead of goodput": (PolicySettings(counts_efficiency=False), whole),
        "the same, jobs too": (PolicySettings(), SimulationConfig(counts_efficiency=False)),
        "moves cost nothing": (PolicySettings(resize_s=0.0, charges_measured=False), whole),
        "jobs slow each other": (PolicySettings(), slowed),
        "the same, not avoided": (PolicySettings(avoid_interference=False), slowed),
    }
    cases: list[Case] = []
    for source in sources:
        cases += [
            source.case("pollux", label, settings, config, is_aside=config is slowed)
            for label, (settings, config) in rows.items()
        ]
    return Suite(
        name="ablation",
        title="Pollux without its parts",
        about="Each row is pollux with one part left out, in the configuration of the suite osdi21: jobs train with "
        "the batch sizes that users asked for, or on as many GPUs; the fitness counts throughput alone (jobs choose "
        "the batches that fit their GPUs); decisions do not know that moves cost time. In the last two rows jobs "
        f"that span nodes and share one are {_INTERFERENCE:.0%} slower, which is avoided or not.",
        cases=tuple(cases),
        base="pollux",
        columns=(
            COLUMNS[0],
            Column(heading="× pollux", key="jct_ratio", form=".2f"),
            *(column for column in COLUMNS[1:] if column.key != "ratio_to_published"),
        ),
        charts=(_BARS, _RHO_BARS),
        notes=notes,
    )


# Realistic configurations ---------------------------------------------------------------------

_REALISTIC = "workloads-realistic/workload-6"


def realistic(artifacts: Artifacts, is_quick: bool) -> Suite:
    osdi21 = artifacts.part("osdi21")
    if osdi21 is None:
        raise InputFileError(
            artifacts.folder or "osdi21",
            f"the suite realistic needs {_REALISTIC}.csv of the OSDI'21 artifact; say where osdi21/ is with "
            "--artifacts DIR",
        )
    tuned = Source(table="tuned", workload=f"{osdi21 / 'workloads/workload-6'}.csv", traces=str(osdi21 / "traces"))
    untuned = dataclasses.replace(tuned, table="as users would", workload=f"{osdi21 / _REALISTIC}.csv")
    names = ("optimus", "tiresias") if is_quick else ("sia", "optimus", "tiresias", "gavel", "themis", "srtf")
    cases: list[Case] = []
    for source in (untuned, tuned):
        cases.append(source.case("pollux"))
        cases += [plain(source, name) for name in names]
    return Suite(
        name="realistic",
        title="Jobs as users configure them",
        about="Workload 6 of the OSDI'21 artifact with the GPUs and batch sizes that users chose, and the same with "
        "those that were tuned for each job in advance, as in the suite osdi21. Policies that adapt both "
        "read neither.",
        cases=tuple(cases),
        base="pollux",
        has_means=False,
        columns=(
            COLUMNS[0],
            Column(heading="× pollux", key="jct_ratio", form=".2f"),
            *(column for column in COLUMNS[1:] if column.key != "ratio_to_published"),
        ),
        charts=(_BARS, _RHO_BARS),
    )


# Shockwave ------------------------------------------------------------------------------------

# By name in the authors' runs: the policy here, its objective and its label.
_SHOCKWAVE_POLICIES = {
    "shockwave": ("shockwave", "max_min_fairness", "shockwave"),
    "finish_time_fairness": ("gavel", "finish_time_fairness", "gavel, finish-time fairness"),
    "max_min_fairness": ("gavel", "max_min_fairness", "gavel, max-min fairness"),
    "max_sum_throughput_perf": ("gavel", "max_sum_steps", "gavel, most steps"),
}
_BASE = "max_min_fairness"
# What a restart took there: time on GPUs beyond that of the authors' simulation, over the leases that were not
# extended, of these four policies together.
_RESTART_S = 15.5
_SHOCKWAVE = SimulationConfig(
    cluster=(NodeGroup(accelerator="v100", num_nodes=8, slots_per_node=4),),
    interval_s=120.0,
    resize_s=_RESTART_S,
    profiles_types=True,
)


def shockwave(artifacts: Artifacts, is_quick: bool) -> Suite:
    folder = None if artifacts.folder is None else artifacts.folder / "thirdparty" / "shockwave"
    if folder is None or not (folder / "runs_summary.csv").is_file():
        raise InputFileError(
            folder or "thirdparty/shockwave",
            "the suite shockwave needs trace_120.csv, tacc_throughputs.csv, runs_jobs.csv and runs_summary.csv of its "
            "authors' runs; say where thirdparty/ is with --artifacts DIR",
        )
    source = Source(
        table="120 jobs on 32 V100s",
        workload=f"shockwave:{folder / 'trace_120.csv'}",
        traces=str(folder / "tacc_throughputs.csv"),
    )
    cases, labels = [], {}
    for name, (policy, objective, label) in _SHOCKWAVE_POLICIES.items():
        settings = PolicySettings(objective=objective, resize_s=_RESTART_S)
        cases.append(source.case(policy, label, settings, _SHOCKWAVE))
        labels[name] = label
    if not is_quick:
        cases += [source.case(name, config=_SHOCKWAVE, is_aside=True) for name in ("themis", "pollux", "srtf")]
    return Suite(
        name="shockwave",
        title="Policies on Shockwave's cluster",
        about="The trace of Shockwave's authors: jobs keep the GPUs they ask for, and take as long as they took there. "
        f"A round every 120 s; a restart costs {_RESTART_S:g} s, as measured there. The rows in italics are physical "
        "runs on 32 V100s. Ratios are to max-min fairness of the same kind. Policies here know how long jobs take; "
        "there, all but shockwave went by each job's first batch size.",
        cases=tuple(cases),
        published=_physical_runs(folder / "runs_summary.csv", source.table, labels),
        reference=f"{labels[_BASE]}, physical",
        base=labels[_BASE],
        columns=(
            Column(heading="makespan s", key="makespan_s", form=",.0f"),
            Column(heading="× max-min", key="makespan_ratio", form=".3f"),
            Column(heading="avg JCT s", key="avg_jct_s", form=",.0f"),
            Column(heading="× max-min", key="jct_ratio", form=".3f"),
            Column(heading="resizes", key="resizes_mean", form=".1f", rank=1),
        ),
        charts=(Chart(title="Makespan", key="makespan_s", factor=1 / 3600, unit="h"), _BARS),
    )


def _physical_runs(path: Path, table: str, labels: dict[str, str]) -> tuple[Published, ...]:
    found: dict[str, dict[str, float]] = {}
    for number, row in read_rows(path, ("policy", "kind", "makespan_s", "avg_jct_s")):
        if row["kind"] == "physical" and row["policy"] in labels:
            found[row["policy"]] = {key: to_float(path, number, row, key) for key in ("makespan_s", "avg_jct_s")}
    if _BASE not in found:
        raise InputFileError(path, f"has no physical run of {_BASE}")
    base = found[_BASE]
    for values in found.values():
        values["makespan_ratio"] = values["makespan_s"] / base["makespan_s"]
        values["jct_ratio"] = values["avg_jct_s"] / base["avg_jct_s"]
    return tuple(
        Published(table=table, label=f"{labels[name]}, physical", values=values) for name, values in found.items()
    )
