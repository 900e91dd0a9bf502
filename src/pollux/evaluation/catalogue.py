"""The main suites: their policies, workloads, configurations and published figures.

:mod:`pollux.evaluation.registry` names them; :mod:`pollux.evaluation.suites` defines what a suite is.
The data of the OSDI'21 and Sia artifacts is not part of the project: it is read from a folder with ``osdi21/`` and
``sia/`` below. Without it suites use generated workloads and built-in profiles where that makes sense.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pollux.errors import InputFileError
from pollux.evaluation.scale import SIZES
from pollux.evaluation.study_suite import tune_suite
from pollux.evaluation.suites import Case, Chart, Column, Published, Suite
from pollux.policy import WEIGHTINGS, PolicySettings, policy_names
from pollux.simulator.config import SimulationConfig, sia_config

JCT = Column(heading="avg JCT s", key="avg_jct_s", form=",.0f")
_RATIO = Column(heading="× artifact", key="ratio_to_published", form=".2f")
P99 = Column(heading="p99 JCT s", key="p99_jct_s", form=",.0f", rank=1)
MAKESPAN = Column(heading="makespan h", key="makespan_s", form=".2f", factor=1 / 3600, rank=2)
_RHO = (
    Column(heading="ρ p99", key="rho_p99", form=".2f", rank=4),
    Column(heading="ρ worst", key="rho_max", form=".2f", rank=2),
)
RESIZES = Column(heading="resizes", key="resizes_mean", form=".2f", rank=3)
DECISION = Column(heading="decision ms", key="decision_s", form=".2f", factor=1000, rank=6)
COLUMNS = (
    JCT,
    _RATIO,
    Column(heading="p50 JCT s", key="p50_jct_s", form=",.0f", rank=7),
    P99,
    MAKESPAN,
    *_RHO,
    RESIZES,
    Column(heading="GPU-h", key="gpu_hours", form=",.0f", rank=5),
    DECISION,
)
JCT_BARS = Chart(title="Average job completion time", key="avg_jct_s", factor=1 / 60, unit="min")


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifacts:
    """The folder of the published data; None: there is none."""

    folder: Path | None

    def part(self, name: str) -> Path | None:
        """``osdi21`` or ``sia``, if it is there and has traces."""
        found = None if self.folder is None else self.folder / name
        return found if found is not None and (found / "traces").is_dir() else None


# Cases ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A workload, and the average JCT of the artifact's Pollux on it."""

    table: str
    workload: str
    traces: str | None
    seed: int = 0
    published_s: float | None = None

    def case(
        self,
        policy: str,
        label: str = "",
        settings: PolicySettings | None = None,
        config: SimulationConfig | None = None,
        x: float | None = None,
        line: str = "",
        is_aside: bool = False,
    ) -> Case:
        return Case(
            table=self.table,
            label=label or policy,
            workload=self.workload,
            traces=self.traces,
            policy=policy,
            settings=dataclasses.replace(settings or PolicySettings(), seed=self.seed),
            config=config or SimulationConfig(),
            x=x,
            line=line,
            is_aside=is_aside,
        )


ARTIFACT = "pollux, the artifact"  # the label of its row
# Average JCT in seconds of the OSDI'21 artifact's Pollux, by folder and workload.
ARTIFACT_JCT_S = {
    "workloads/workload-6": 2446.13,
    "workloads/workload-1": 2088.77,
    "workloads/workload-3": 2188.49,
}
ARTIFACT_LOAD_JCT_S = {0.5: 1288.0, 1.0: 2446.13, 1.5: 3474.0, 2.0: 5105.0}  # of workload 6


def workload_at(load: float) -> str:
    """Folder and name of workload 6 with so many times as many jobs."""
    return "workloads/workload-6" if load == 1.0 else f"workloads-{load}/workload-6"


NO_OSDI21 = (
    "The OSDI'21 artifact's data was not found: generated workloads and built-in profiles instead, without the "
    "artifact's figures. Name the folder that has osdi21/ with --artifacts DIR."
)


def _published(sources: Iterable[Source], x: float | None = None, line: str = "") -> tuple[Published, ...]:
    return tuple(
        Published(table=source.table, label=ARTIFACT, values={"avg_jct_s": source.published_s}, x=x, line=line)
        for source in sources
        if source.published_s is not None
    )


def sources_of(artifacts: Artifacts, is_quick: bool) -> tuple[list[Source], tuple[str, ...]]:
    """Workloads 6, 1 and 3 (quick: 6 alone), or generated ones; and notes about that."""
    osdi21 = artifacts.part("osdi21")
    if osdi21 is None:
        seeds = range(1 if is_quick else 3)
        return [Source(table=f"day, seed {s}", workload="builtin:day", traces=None, seed=s) for s in seeds], (
            NO_OSDI21,
        )
    found = [
        Source(
            table=Path(name).name, workload=f"{osdi21 / name}.csv", traces=str(osdi21 / "traces"), published_s=published
        )
        for name, published in ARTIFACT_JCT_S.items()
    ]
    return found[:1] if is_quick else found, ()


def _loads(artifacts: Artifacts, is_quick: bool) -> tuple[dict[float, Source], tuple[str, ...]]:
    osdi21 = artifacts.part("osdi21")
    if osdi21 is None:
        names = {1.0: "day", 2.0: "heavy"}
        return {
            load: Source(table=f"load {load}", workload=f"builtin:{name}", traces=None) for load, name in names.items()
        }, (NO_OSDI21,)
    found = {}
    for load, published in ARTIFACT_LOAD_JCT_S.items():
        found[load] = Source(
            table=f"load {load}",
            workload=f"{osdi21 / workload_at(load)}.csv",
            traces=str(osdi21 / "traces"),
            published_s=published,
        )
    return {load: found[load] for load in (0.5, 2.0)} if is_quick else found, ()


def _ours() -> dict[str, PolicySettings]:
    """Settings of our policy's variants, by label: one for every weighting."""
    return {"pollux" if name == "equal" else f"pollux, {name}": PolicySettings(weights=name) for name in WEIGHTINGS}


# As on a live cluster: the measured cost of a resize in place, decisions on events, profiles remembered.
OUR_PHYSICS = SimulationConfig(resize_s=5.0, decides_on_events=True, remembers_profiles=True)


def variants() -> dict[str, tuple[PolicySettings, SimulationConfig]]:
    """Settings and configuration by label: each weighting in the artifact's configuration, then in ours."""
    ours = {
        f"{label}, our physics": (dataclasses.replace(settings, resize_s=OUR_PHYSICS.resize_s), OUR_PHYSICS)
        for label, settings in _ours().items()
    }
    return {label: (settings, SimulationConfig()) for label, settings in _ours().items()} | ours


GAVEL_INTERVAL_S = 360.0  # between two rounds, as its authors have it


def plain(source: Source, name: str, config: SimulationConfig | None = None, **more: Any) -> Case:
    """A policy as its authors run it."""
    config = config or SimulationConfig()
    if name == "gavel":
        config = dataclasses.replace(config, interval_s=GAVEL_INTERVAL_S)
    return source.case(name, config=config, **more)


_QUICK_POLICIES = ("equal", "optimus", "sia", "tiresias")


def osdi21(artifacts: Artifacts, is_quick: bool) -> Suite:
    sources, notes = sources_of(artifacts, is_quick)
    others = _QUICK_POLICIES if is_quick else [name for name in policy_names() if name != "pollux"]
    cases = []
    for source in sources:
        cases += [
            source.case("pollux", label, settings, config, is_aside=config is OUR_PHYSICS)
            for label, (settings, config) in variants().items()
        ]
        cases += [plain(source, name) for name in others]
        settings = PolicySettings(resize_s=OUR_PHYSICS.resize_s)
        cases += [
            plain(source, name, OUR_PHYSICS, label=f"{name}, our physics", settings=settings, is_aside=True)
            for name in others
        ]
    return Suite(
        name="osdi21",
        title="Every policy on the OSDI'21 workloads",
        about="16 nodes of 4 GPUs, 160 jobs in 8 hours, a decision every 60 s, 30 s for every start and resize, "
        "nothing remembered: the configuration of the OSDI'21 artifact's simulator, whose own Pollux is one of the "
        "rows. Our physics, for every policy alike: resizes of 5 s, decisions also when jobs come and end, profiles "
        "remembered. gavel has rounds of 360 s, as its authors have. pollux and sia explore alike.",
        cases=tuple(cases),
        published=_published(sources),
        reference=ARTIFACT,
        columns=COLUMNS,
        charts=(
            JCT_BARS,
            Chart(title="Worst finish-time fairness ρ", key="rho_max", is_log=True),
            Chart(title="Makespan", key="makespan_s", factor=1 / 3600, unit="h"),
            Chart(title="Resizes of a job", key="resizes_mean"),
        ),
        notes=notes,
    )


def fairness(artifacts: Artifacts, is_quick: bool) -> Suite:
    sources, notes = sources_of(artifacts, is_quick)
    cases = []
    for source in sources:
        cases += [source.case("pollux", f"pollux, p = {p:g}", PolicySettings(p=p)) for p in (1.0, 0.0, -1.0, -10.0)]
        cases += [plain(source, name) for name in ("themis", "equal", "gavel")]
    shares = tuple(Column(heading=f"ρ > {most}", key=f"rho_above_{most}", form=".1%", rank=most) for most in (1, 2))
    return Suite(
        name="fairness",
        title="Finish-time fairness by the exponent p",
        about="ρ is a job's completion time over that alone on its fair share of the cluster. The fitness is a power "
        "mean of speedups: with p = 1 the sum counts, towards -10 the worst job. Beside it policies that aim "
        "at fairness.",
        cases=tuple(cases),
        columns=(JCT, P99, Column(heading="ρ p50", key="rho_p50", form=".2f", rank=3), *_RHO, *shares, RESIZES),
        charts=(
            JCT_BARS,
            Chart(title="Worst finish-time fairness ρ", key="rho_max"),
            Chart(title="Jobs with ρ above 1", key="rho_above_1", factor=100, unit="%"),
            Chart(title="Jobs with ρ above 2", key="rho_above_2", factor=100, unit="%"),
        ),
        notes=notes,
    )


def load(artifacts: Artifacts, is_quick: bool) -> Suite:
    sources, notes = _loads(artifacts, is_quick)
    cases: list[Case] = []
    published: list[Published] = []
    for load, source in sources.items():
        cases += [source.case("pollux", label, settings, x=load, line=label) for label, settings in _ours().items()]
        cases += [source.case(name, x=load, line=name) for name in ("tiresias", "optimus")]
        published += _published([source], x=load, line=ARTIFACT)
    return Suite(
        name="load",
        title="More jobs in the same time",
        about="Workload 6 with 0.5 to 2 times as many jobs in 8 hours, in the configuration of the suite osdi21.",
        cases=tuple(cases),
        published=tuple(published),
        reference=ARTIFACT,
        has_means=False,
        columns=COLUMNS,
        charts=(
            dataclasses.replace(JCT_BARS, x="load"),
            Chart(title="Worst finish-time fairness ρ", key="rho_max", x="load", is_log=True),
        ),
        notes=notes,
    )


def interference(artifacts: Artifacts, is_quick: bool) -> Suite:
    sources, notes = sources_of(artifacts, is_quick)
    cases = []
    for source in sources:
        for slowdown in (0.0, 0.5) if is_quick else (0.0, 0.25, 0.5):
            for line, avoids in (("avoided", True), ("not avoided", False)):
                cases.append(
                    source.case(
                        "pollux",
                        f"{slowdown:.0%} slower, {line}",
                        PolicySettings(avoid_interference=avoids),
                        SimulationConfig(interference=slowdown),
                        x=100 * slowdown,
                        line=line,
                    )
                )
    return Suite(
        name="interference",
        title="Jobs that slow each other down",
        about="Jobs that span nodes and share one are slower by so much. pollux puts at most one of them on a "
        "node, or does not avoid it.",
        cases=tuple(cases),
        columns=(JCT, P99, MAKESPAN, *_RHO, RESIZES),
        charts=(
            dataclasses.replace(JCT_BARS, x="slowdown, %"),
            Chart(title="Makespan", key="makespan_s", factor=1 / 3600, unit="h", x="slowdown, %"),
        ),
        notes=notes,
    )


def interval(artifacts: Artifacts, is_quick: bool) -> Suite:
    sources, notes = sources_of(artifacts, is_quick)
    intervals_s = (60, 480) if is_quick else (30, 60, 120, 240, 480)
    cases = []
    for source in sources:
        for interval_s in intervals_s:
            for line, on_events in (("rounds", False), ("rounds and events", True)):
                config = SimulationConfig(interval_s=interval_s, decides_on_events=on_events)
                label = f"{interval_s} s" + ", and on events" * on_events
                cases.append(source.case("pollux", label, config=config, x=interval_s / 60, line=line))
    return Suite(
        name="interval",
        title="How often to decide",
        about=f"pollux with a round every {intervals_s[0]} to {intervals_s[-1]} s; and the same with decisions "
        "also when a job comes or ends.",
        cases=tuple(cases),
        columns=(JCT, P99, MAKESPAN, *_RHO, RESIZES, DECISION),
        charts=(
            dataclasses.replace(JCT_BARS, x="minutes between rounds"),
            Chart(title="Resizes of a job", key="resizes_mean", x="minutes between rounds"),
        ),
        notes=notes,
    )


def hetero(artifacts: Artifacts, is_quick: bool) -> Suite:
    sia = artifacts.part("sia")
    if sia is None:
        raise InputFileError(
            artifacts.folder or "sia",
            "the suite hetero needs the data of the Sia artifact (siasosp23/artifacts, sia-simulator/): a folder sia/ "
            "with traces/ and workloads/; say where it is with --artifacts DIR",
        )
    workload = sia / "workloads" / "philly" / "workload-1.csv"
    source = Source(table="philly/workload-1", workload=str(workload), traces=str(sia / "traces"))
    world = sia_config()
    cases = [source.case("pollux", label, settings, world) for label, settings in _ours().items()]
    cases += [source.case(name, config=world) for name in ("sia", "tiresias")]
    unprofiled = dataclasses.replace(world, profiles_types=False)
    cases.append(source.case("pollux", "pollux, nothing profiled", config=unprofiled, is_aside=True))
    ratios = dataclasses.replace(unprofiled, guesses_types=False)
    cases.append(source.case("sia", "sia, ratios only", config=ratios, is_aside=True))
    in_rounds = dataclasses.replace(world, interval_s=GAVEL_INTERVAL_S)
    cases.append(source.case("gavel", "gavel, max-min fairness", config=in_rounds))
    by_sum = PolicySettings(objective="max_sum_throughput")
    cases.append(source.case("gavel", "gavel, max-sum throughput", by_sum, in_rounds))
    if not is_quick:
        cases += [source.case(name, config=world) for name in ("equal", "srtf", "themis", "shockwave")]
    values = {
        "sia": {
            "avg_jct_s": 1949.8,
            "p50_jct_s": 828.0,
            "p99_jct_s": 28390.0,
            "makespan_s": 55913.0,
            "resizes_mean": 4.26,
        },
        "gavel, max-sum throughput": {"avg_jct_s": 6016.5},
    }
    return Suite(
        name="hetero",
        title="Three types of GPU",
        about="Sia's cluster (24 T4, 16 A100, 24 RTX 2080 Ti), restart delays and slowdowns, and its Philly workload "
        "1. gavel decides every 360 s, as there, by each of two objectives of its authors. "
        "Every policy knows the same: jobs are measured on one GPU of each "
        "type with five batch sizes when they come, which takes no time here. But for two rows: with nothing "
        "profiled, types that a job has not run on are judged by what others have shown; with ratios only, sia knows "
        "of such types how fast one GPU is relative to those that it has run on, from the traces: the nearest to "
        "what the artifact's jobs know. The artifact's rows were measured with its own code.",
        cases=tuple(cases),
        published=tuple(
            Published(table=source.table, label=f"{name}, the artifact", values=found) for name, found in values.items()
        ),
        reference="sia, the artifact",
        columns=COLUMNS,
        charts=(JCT_BARS, Chart(title="Worst finish-time fairness ρ", key="rho_max", is_log=True)),
    )


SCALE_TABLE = "clusters of three and four GPU types"
_MOST_GPUS, _QUICK_GPUS = 10_000, 1024  # larger sizes are for benchmarks/scale.py: they take minutes and gigabytes


def scale(artifacts: Artifacts, is_quick: bool) -> Suite:
    sizes = tuple(size for size in SIZES if size.num_gpus <= (_QUICK_GPUS if is_quick else _MOST_GPUS))
    return Suite(
        name="scale",
        title=f"Decisions from {sizes[0].num_gpus:,} to {sizes[-1].num_gpus:,} GPUs",
        about="CPU time of a decision of pollux on one core, with 5 to 6 jobs for every 10 GPUs: the first of a fresh "
        "policy (cold; in the first row it also loads libraries), and the median of rounds in which 2 % of the jobs "
        "come and go (steady); the worst gap to the proven bound. Sia's integer program was measured with its artifact "
        "on one thread.",
        sizes=sizes,
        columns=(
            Column(heading="jobs", key="jobs", form=",.0f"),
            Column(heading="cold ms", key="cold_s", form=",.0f", factor=1000),
            Column(heading="steady ms", key="steady_s", form=",.0f", factor=1000),
            Column(heading="worst ms", key="worst_steady_s", form=",.0f", factor=1000, rank=2),
            Column(heading="gap", key="gap", form=".2%"),
            Column(heading="memory MB", key="memory_mb", form=",.0f", rank=1),
            Column(heading="Sia's program ms", key="sia_s", form=",.0f", factor=1000),
            Column(heading="times longer", key="times_faster", form=".0f", rank=1),
        ),
        charts=(
            Chart(
                title="CPU time of a decision",
                key="steady_s",
                factor=1000,
                unit="ms",
                x="GPUs",
                lines=(("steady", "steady_s"), ("cold", "cold_s"), ("Sia's program", "sia_s")),
                is_log=True,
            ),
            Chart(title="Worst gap to the bound", key="gap", factor=100, unit="%", x="GPUs", lines=(("gap", "gap"),)),
        ),
    )


def truth(artifacts: Artifacts, is_quick: bool) -> Suite:
    folder = None if artifacts.folder is None else artifacts.folder / "thirdparty"
    if folder is None or not folder.is_dir():
        raise InputFileError(
            folder or "thirdparty",
            "the suite truth needs measurements of others (zeus/, elasticflow/, gavel/); say where thirdparty/ is with "
            "--artifacts DIR",
        )
    return Suite(
        name="truth",
        title="Models against measurements of others",
        about="Errors of the published models and of ours: efficiency by Zeus' epochs to a target, T_grad by its epoch "
        "times on four GPUs (each batch predicted from the others), step times by ElasticFlow's throughputs (fitted on "
        "1 to 4 GPUs), shared GPUs by Gavel's pairs on V100 (ours fitted on K80 and P100). Errors are relative; of "
        "efficiencies and shared speeds they are differences.",
        measurements=folder,
        has_means=False,
        columns=(
            Column(heading="points", key="num_points", form=",.0f"),
            Column(heading="bias", key="bias", form="+.1%"),
            Column(heading="mean error", key="mean_error", form=".1%"),
            Column(heading="median", key="median_error", form=".1%"),
            Column(heading="worst", key="worst_error", form=".1%"),
        ),
        charts=(Chart(title="Mean error", key="mean_error", factor=100, unit="%"),),
    )


def tune(artifacts: Artifacts, is_quick: bool) -> Suite:
    return tune_suite(artifacts.part("osdi21"), is_quick)
