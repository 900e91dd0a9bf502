"""The Sia traces' format, quirk by quirk, on made-up files: several types, repeated keys, gaps, pipelines."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from pollux.errors import InputFileError, SimulationError, UnknownNameError
from pollux.simulator.application import StepTime
from pollux.simulator.config import SimulationConfig
from pollux.simulator.physics import NodeGroup
from pollux.simulator.run import restricted
from pollux.simulator.sia import load_sia_traces
from pollux.simulator.source import load_applications, load_source
from pollux.simulator.traces import TraceApplication
from pollux.simulator.workload import load_workload

JOBS = "name,time,application,num_replicas,batch_size"


def step_s(num_nodes: int, num_replicas: int, batch: int) -> float:
    """Linear in all three, so that every interpolation is exact."""
    return 0.1 * num_nodes + 0.01 * num_replicas + 0.001 * batch


def placed(*placements: str, batches: Iterable[int] = (10, 20)) -> str:
    lines = ["placement,local_bsz,step_time,sync_time"]
    for digits in placements:
        num_nodes, num_replicas = len(digits), sum(map(int, digits))
        lines += [f"{digits},{b},{step_s(num_nodes, num_replicas, b)},0.01" for b in batches]
    return "\n".join(lines)


def scaled(*shapes: tuple[int, int], batches: Iterable[int] = (10, 20), late_s: float = 0.0) -> str:
    """Columns in another order than usual, and whole numbers as floats."""
    lines = ["local_bsz,step_time,sync_time,num_nodes,num_replicas"]
    for num_nodes, num_replicas in shapes:
        lines += [
            f"{b}.0,{step_s(num_nodes, num_replicas, b) + late_s},0.01,{num_nodes}.0,{num_replicas}" for b in batches
        ]
    return "\n".join(lines)


def write(folder: Path, **files: str) -> Path:
    """``aws_placements`` is the text of placements-aws.csv; validation files for batches of 20 and 80 are added."""
    folder.mkdir(parents=True, exist_ok=True)
    for size in (20, 80):
        rows = "\n".join(f"{100 * epoch},{100 * epoch * 20 // size},1,1.0,4.0" for epoch in (1, 2))
        (folder / f"validation-{size}.csv").write_text(f"progress,iteration,metric,grad_sqr,grad_var\n{rows}\n")
    for name, text in files.items():
        kind, _, what = name.replace("_ext", "-ext").rpartition("_")
        (folder / f"{what}-{kind}.csv").write_text(text + "\n")
    return folder


def toy(root: Path, **files: str) -> TraceApplication:
    defaults = {"aws_placements": placed("1", "2", "11", "12", "22"), "aws_scalability": scaled((3, 6), (4, 16))}
    write(root / "toy", **(defaults | files))
    return load_sia_traces(root)["toy"]


def test_the_format_is_seen_by_its_files_and_types_by_their_names(tmp_path: Path) -> None:
    toy(tmp_path / "traces", rtx_placements=placed("1", batches=(10, 40)), rtx_scalability=scaled((1, 1)))
    (tmp_path / "jobs.csv").write_text(f"{JOBS}\na,1.5,toy,2,40\n")
    workload, applications = load_source(str(tmp_path / "jobs.csv"), str(tmp_path / "traces"))
    assert workload.jobs[0].submitted_at == 1.5
    limits = applications["toy"].limits
    assert applications["toy"].accelerators == ("aws", "rtx")
    assert (limits.initial, limits.maximum, limits.device_min) == (20, 80, 10)
    assert (limits.on("aws").device_max, limits.on("rtx").device_max) == (20, 40)
    assert limits.accumulates_alone and limits.on("rtx").accumulates_alone
    with pytest.raises(UnknownNameError, match="accelerator of application 'toy' 'azure'"):
        applications["toy"].step_time("azure", (1,), 10)


@pytest.mark.parametrize("placement", [(1,), (2,), (1, 2), (2, 1), (2, 2)])
def test_measured_placements_are_found_by_any_rotation(tmp_path: Path, placement: tuple[int, ...]) -> None:
    times = toy(tmp_path).step_time("aws", placement, 15)
    assert times.step_s == pytest.approx(step_s(len(placement), sum(placement), 15))
    assert times.sync_s == pytest.approx(0.01)


def test_gaps_are_interpolated_between_nodes_and_replicas(tmp_path: Path) -> None:
    times = toy(tmp_path).step_time("aws", (2, 2, 2), 14)  # measured on three nodes, but not in this placement
    assert times.step_s == pytest.approx(step_s(3, 6, 14))


def test_repeated_keys_are_passed_over(tmp_path: Path) -> None:
    """A shape that placements tell of is theirs; of two rows that say the same the first counts."""
    late = scaled((2, 3), (3, 6), late_s=5.0).partition("\n")[2]
    application = toy(tmp_path, aws_scalability=scaled((3, 6), (4, 16)) + "\n" + late)
    assert application.step_time("aws", (2, 2, 2), 10).step_s == pytest.approx(step_s(3, 6, 10))
    twice = placed("1", "2", "11", "12", "22") + "\n1,10,0.311,0.01"
    again = toy(tmp_path, aws_placements=twice)  # 0.111 and 0.311 at this batch
    assert again.step_time("aws", (1,), 10).step_s == pytest.approx((step_s(1, 1, 10) + 0.311) / 2)


def test_more_nodes_than_were_measured_count_as_the_most_that_were(tmp_path: Path) -> None:
    application = toy(tmp_path)
    assert application.step_time("aws", (2,) * 8, 10) == application.step_time("aws", (4,) * 4, 10)
    assert application.step_time("aws", (4,) * 4, 10).step_s == pytest.approx(step_s(4, 16, 10))


@pytest.mark.parametrize("placement", [(8, 8), (9, 9, 9, 9), (16,), (1, 1, 1, 1, 1, 1)])
@pytest.mark.parametrize("batch", [1, 10, 500])
def test_nothing_is_too_far_off(tmp_path: Path, placement: tuple[int, ...], batch: int) -> None:
    """One node of up to two replicas was measured on this type: its points lie in a plane."""
    application = toy(tmp_path, quad_placements=placed("1", "2"), quad_scalability=scaled((1, 1), (1, 2)))
    for kind in ("aws", "quad"):
        times = application.step_time(kind, placement, batch)
        assert 0 <= times.sync_s < times.step_s
    assert application.step_time("quad", (2, 2), 10).step_s == pytest.approx(step_s(1, 2, 10))


def test_the_largest_device_batch_is_that_of_the_placement(tmp_path: Path) -> None:
    rows = placed("1", "11", batches=(10, 20, 40)) + "\n" + placed("12").partition("\n")[2]
    application = toy(tmp_path, aws_placements=rows, aws_scalability=scaled((3, 6), (4, 16), batches=(10, 16)))
    assert application.limits.on("aws").device_max == 40
    assert application.device_max("aws", (1, 1)) == 40
    assert application.device_max("aws", (2, 1)) == 20
    assert application.device_max("aws", (1, 1, 1)) == 16  # of scalability rows with as many nodes and replicas or more
    assert application.device_max("aws", (9, 9, 9)) == 40  # nothing as large was measured


def test_what_the_artifact_overrides_and_what_it_does_not(tmp_path: Path) -> None:
    files = {"rtx_placements": placed("1", batches=(10, 80)), "rtx_scalability": scaled((1, 1))}
    for name in ("deepspeech2", "yolov3"):
        write(tmp_path / name, **files)
        rows = "\n".join(f"{epoch},{epoch},1,1,4" for epoch in range(1, 81))
        (tmp_path / name / "validation-20.csv").write_text(f"progress,iteration,metric,grad_sqr,grad_var\n{rows}\n")
        (tmp_path / name / "validation-80.csv").unlink()
    found = load_sia_traces(tmp_path)
    assert {name: found[name].limits.on("rtx").device_max for name in found} == {"deepspeech2": 57, "yolov3": 80}
    assert (found["deepspeech2"].num_epochs, found["yolov3"].num_epochs) == (80, 50)


# Pipelines ------------------------------------------------------------------------------------


def pipeline(tmp_path: Path) -> TraceApplication:
    rows = "local_bsz,step_time,sync_time,placement\n" + "\n".join(
        f"{b},{0.1 * b},{0.3 + 0.1 * n},{'8' * n}" for n in range(1, 17) for b in (1, 2)
    )
    shapes = "local_bsz,step_time,sync_time,num_nodes,num_replicas\n" + "\n".join(
        f"{b},{0.1 * b},{0.3 + 0.1 * n},{n},{8 * n}" for n in range(1, 17) for b in (1, 2)
    )
    few = "local_bsz,step_time,sync_time,placement\n1,0.2,0.02,2\n2,0.4,0.02,2\n1,0.2,0.04,8\n"
    write(
        tmp_path / "gpt_pmp",
        rtx_placements=rows,
        rtx_scalability=shapes,
        dgx_ext_placements=few.strip(),
        dgx_ext_scalability="local_bsz,step_time,sync_time,num_nodes,num_replicas\n1,0.2,0.02,1,2",
    )
    return load_sia_traces(tmp_path)["gpt_pmp"]


def test_a_pipeline_takes_its_fill_and_48_micro_batches(tmp_path: Path) -> None:
    application = pipeline(tmp_path)
    assert application.step_time("rtx", (8,), 6) == StepTime(pytest.approx(3 * (7 + 48) * 0.1), pytest.approx(0.4))
    assert application.step_time("rtx", (8,) * 16, 6).sync_s == pytest.approx(1.9)  # found by its sixteen digits
    assert application.step_time("dgx-ext", (2,), 24) == StepTime(pytest.approx(3 * (1 + 48) * 0.2), 0.02)
    four = application.step_time("dgx-ext", (8,), 24)  # four pipelines beside each other
    assert four == StepTime(pytest.approx(3 * (1 + 48) * 0.2), 0.04)


def test_pipelines_on_shapes_that_were_not_measured(tmp_path: Path) -> None:
    application = pipeline(tmp_path)
    whole = application.step_time("rtx", (8,), 6).step_s
    spread = application.step_time("rtx", (4, 4), 6)
    assert spread.step_s == pytest.approx(whole)
    idle = application.step_time("rtx", (8, 4), 4)  # twelve slots: one pipeline does all 48, four slots idle
    assert idle.step_s == pytest.approx(whole)
    assert application.step_time("rtx", (4,), 12).step_s == pytest.approx(2 * whole)  # two stages on each slot


def test_pipelines_train_with_whole_batches(tmp_path: Path) -> None:
    application = pipeline(tmp_path)
    limits = application.limits
    assert (application.min_replicas, limits.minimum, limits.device_min) == (8, 48, 6)
    assert (limits.on("rtx").device_max, limits.on("dgx-ext").device_max) == (6, 24)
    assert (application.device_max("rtx", (8,)), application.device_max("dgx-ext", (8,))) == (6, 24)


def test_stages_must_be_known(tmp_path: Path) -> None:
    text = "local_bsz,step_time,sync_time,placement\n1,0.2,0.02,2\n"
    write(tmp_path / "gpt_pmp", aws_placements=text.strip(), aws_scalability=scaled((1, 1)))
    with pytest.raises(InputFileError, match="cut into stages on 'aws' is not known; known: dgx-ext, rtx") as caught:
        load_sia_traces(tmp_path)
    assert caught.value.path == str(tmp_path / "gpt_pmp" / "placements-aws.csv")


# Bad files ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"aws_placements": placed("10")}, "placement '10'; digits 1-9"),
        ({"aws_placements": "placement,local_bsz,step_time,sync_time\n1,10,0.1,0.2"}, "row 2.*sync_time < step_time"),
        ({"aws_placements": placed("1", batches=(-3, 10))}, "row 2: local_bsz = -3; at least 1 is needed"),
        ({"aws_placements": "placement,local_bsz,step_time\n1,10,0.1"}, "missing column sync_time"),
        ({"aws_scalability": scaled((3, 2))}, "2 replicas on 3 nodes; 1 <= nodes <= replicas"),
        ({"rtx_placements": placed("1")}, "scalability-rtx.csv.*no such file"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, files: dict[str, str], problem: str) -> None:
    with pytest.raises(InputFileError, match=problem):
        toy(tmp_path, **files)


@pytest.mark.parametrize("size", ["²", "٣", "0", "large"])
def test_batch_sizes_in_names_are_plain_numbers(tmp_path: Path, size: str) -> None:
    write(tmp_path / "toy")
    (tmp_path / "toy" / f"validation-{size}.csv").write_text("")
    with pytest.raises(InputFileError, match=f"'{size}' in the file's name is not a batch size"):
        toy(tmp_path)


@pytest.mark.parametrize("kind", ["-aws", ""])
def test_a_training_run_that_is_missing(tmp_path: Path, kind: str) -> None:
    """Of ncf, which is trained with one batch size: in the Sia artifact's format, and in the OSDI'21 artifact's."""
    folder = tmp_path / "ncf"
    folder.mkdir()
    rows = "\n".join(f"{epoch},{epoch},1,1,4" for epoch in range(1, 11))
    (folder / "validation-256.csv").write_text(f"progress,iteration,metric,grad_sqr,grad_var\n{rows}\n")
    (folder / f"placements{kind}.csv").write_text(placed("1") + "\n")
    (folder / f"scalability{kind}.csv").write_text(scaled((1, 1)) + "\n")
    problem = "min batch size 32768 lies outside 256..256; there is a validation-<batch size>.csv for 256: add"
    with pytest.raises(InputFileError, match=problem) as caught:
        load_applications(str(tmp_path))
    assert caught.value.path == str(folder)


def test_no_traces(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="no folder <application>/ holds placements-<type>"):
        load_sia_traces(tmp_path)
    with pytest.raises(InputFileError, match="not a directory"):
        load_sia_traces(tmp_path / "nowhere")


# Workloads ------------------------------------------------------------------------------------


def test_jobs_run_on_types_that_were_measured(tmp_path: Path) -> None:
    applications = {"toy": toy(tmp_path, rtx_placements=placed("1"), rtx_scalability=scaled((1, 1)))}
    (tmp_path / "jobs.csv").write_text(f"{JOBS}\na,0,toy,2,40\n")
    workload = load_workload(tmp_path / "jobs.csv", applications)

    def types(*names: str) -> frozenset[str] | None:
        groups = tuple(NodeGroup(accelerator=name, num_nodes=1, slots_per_node=4) for name in names)
        return restricted(workload, applications, SimulationConfig(cluster=groups)).jobs[0].accelerators

    assert types("aws", "rtx") is None
    assert types("aws", "tpu") == {"aws"}
    with pytest.raises(SimulationError, match="'a' of toy can run on aws, rtx, the cluster has tpu"):
        types("tpu")


def test_categories(tmp_path: Path) -> None:
    applications = {"toy": toy(tmp_path)}
    rows = ["a,0,toy,3,40,", "b,0,toy,3,40,adaptive", "c,0,toy,3,40,scale-gpus", "d,0,toy,3,40,rigid"]
    (tmp_path / "jobs.csv").write_text("\n".join([f"{JOBS},category", *rows]) + "\n")
    plain, adaptive, scaling, rigid = load_workload(tmp_path / "jobs.csv", applications).jobs
    assert plain.batch == adaptive.batch == applications["toy"].limits
    assert (adaptive.min_replicas, adaptive.max_replicas) == (1, 8)
    for job in (scaling, rigid):
        assert job.batch is not None
        assert (job.batch.initial, job.batch.minimum, job.batch.maximum) == (20, 40, 40)
    assert (scaling.min_replicas, scaling.max_replicas) == (1, 4)
    assert (rigid.min_replicas, rigid.max_replicas) == (3, 3)
    (tmp_path / "jobs.csv").write_text(f"{JOBS},category\na,0,toy,3,40,flexible\n")
    with pytest.raises(InputFileError, match="category = 'flexible'; one of adaptive, scale-gpus, rigid"):
        load_workload(tmp_path / "jobs.csv", applications)
