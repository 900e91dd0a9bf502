"""Production traces of others become workloads with step times."""

from __future__ import annotations

from pathlib import Path

import pytest

from pollux.errors import InputFileError, SimulationError, UnknownNameError
from pollux.policy import make_policy
from pollux.simulator.config import SimulationConfig
from pollux.simulator.importers import FORMATS, import_trace
from pollux.simulator.result import summarise
from pollux.simulator.run import simulate
from pollux.simulator.source import load_source
from tests.conftest import SHARED

ELASTICFLOW = "job_id,submission_time,num_iteration,model_name,deadline,batch_size,num_gpu,duration\n"
GAVEL = "job,model,batch_size,total_steps,scale_factor,arrival_s\n"


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """One model: 1, 1.6 and 2.4 steps a second on 1, 2 and 4 GPUs with 64 examples in all."""
    folder = tmp_path / "throughputs"
    folder.mkdir()
    (folder / "vgg16.csv").write_text("global_batch_size,1,2,4,8\n64,1.0,1.6,2.4,\n128,0.5,0.9,1.5,2.0\n")
    return folder


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return path


def source_of(tmp_path: Path, kind: str, trace: Path, throughputs: Path, **options: str):
    imported, category = import_trace(kind, trace, throughputs, **options)
    out = tmp_path / "out"
    out.mkdir()
    (out / "workload.csv").write_text(imported.workload_csv(category))
    (out / "step_times.csv").write_text(imported.step_times_csv())
    return load_source(str(out / "workload.csv"), str(out))


def test_elasticflow_jobs_take_as_long_as_their_throughput_says(tmp_path: Path, measured: Path) -> None:
    rows = "a,1000,960,vgg16,9000,64,4,400\nb,1060,600,vgg16,9000,128,1,1200\n"
    workload, applications = source_of(tmp_path, "elasticflow", written(tmp_path, ELASTICFLOW + rows), measured)
    assert [job.submitted_at for job in workload.jobs] == [0.0, 60.0]
    assert {job.max_replicas for job in workload.jobs} == {8} and workload.jobs[0].min_replicas == 1
    application = applications["vgg16/a"]
    assert application.step_time("gpu", (4,), 16).step_s == pytest.approx(1 / 2.4)
    assert application.step_time("gpu", (4,), 16).sync_s > 0 == application.step_time("gpu", (1,), 64).sync_s
    assert application.epoch_end(application.num_epochs - 1) == 960
    run = simulate(workload, applications, make_policy("fifo"), SimulationConfig(num_nodes=1, gpus_per_node=8))
    result = {job.name: job.jct_s for job in summarise(run).jobs}
    assert result == {"a": pytest.approx(960 / 2.4 + 30, abs=61), "b": pytest.approx(600 / 0.5 + 30, abs=61)}


def test_gavels_steps_are_those_of_all_gpus_together(tmp_path: Path) -> None:
    throughputs = tmp_path / "throughputs.csv"
    throughputs.write_text(
        "gpu,model,batch_size,scale_factor,steps_per_s\nv100,LM,10,1,2.0\nv100,LM,10,2,3.0\n"
        "v100_unconsolidated,LM,10,2,1.0\nk80,LM,10,1,0.5\nk80,LM,10,2,0\n"
    )
    trace = written(tmp_path, GAVEL + "0,LM,10,6000,2,5.0\n1,LM,10,100,1,3605\n")
    workload, applications = source_of(tmp_path, "gavel", trace, throughputs, accelerator="v100")
    first = workload.jobs[0]
    assert (first.min_replicas, first.max_replicas, first.requested_batch_size) == (2, 2, 20)
    application = applications["LM/job-0"]
    assert application.epoch_end(application.num_epochs - 1) == 3000  # in 2000 s: 3 steps of one GPU a second
    assert application.step_time("v100", (2,), 10).step_s == pytest.approx(2 / 3)
    assert application.step_time("v100", (1, 1), 10).step_s == pytest.approx(2.0)
    everything, _ = import_trace("gavel", trace, throughputs)
    assert everything.tables["LM"].accelerators == ("v100", "k80")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("a,0,10,bert,9,64,1,1\n", r"row 2: no throughput of model 'bert' was measured; measured: vgg16"),
        ("a,50,10,vgg16,99,64,1,1\nb,20,10,vgg16,99,64,1,1\n", r"row 3: submitted at 20 s, the row before at 50 s"),
        ("a,0,0,vgg16,9,64,1,1\n", r"row 2: num_iteration = 0; at least 1"),
        ("a,0,5,vgg16,9,64,0,1\n", r"row 2: num_gpu = 0; at least 1"),
        ("a,x,5,vgg16,9,64,1,1\n", r"row 2: submission_time = 'x' is not a number"),
        ("a,50,5,vgg16,50,64,1,1\n", r"row 2: deadline = 50; later than submission_time = 50"),
    ],
)
def test_a_row_that_cannot_be_is_named(tmp_path: Path, measured: Path, rows: str, message: str) -> None:
    with pytest.raises(InputFileError, match=message):
        import_trace("elasticflow", written(tmp_path, ELASTICFLOW + rows), measured)


def test_what_is_missing_or_unknown_is_named(tmp_path: Path, measured: Path) -> None:
    with pytest.raises(InputFileError, match="row 1: missing column num_gpu"):
        import_trace("elasticflow", written(tmp_path, ELASTICFLOW.replace(",num_gpu", "") + "a\n"), measured)
    with pytest.raises(InputFileError, match="no folder with a CSV file"):
        import_trace("philly", written(tmp_path, ""), tmp_path / "nothing")
    with pytest.raises(UnknownNameError, match="elasticflow"):
        import_trace("elastcflow", tmp_path, measured)
    with pytest.raises(UnknownNameError, match="rigid"):
        import_trace("elasticflow", tmp_path, measured, category="elastic")


def test_a_job_that_is_larger_than_the_cluster_is_told(tmp_path: Path, measured: Path) -> None:
    trace = written(tmp_path, ELASTICFLOW + "a,0,10,vgg16,9,64,8,1\n")
    workload, applications = source_of(tmp_path, "elasticflow", trace, measured, category="rigid")
    with pytest.raises(SimulationError, match="more GPUs than the cluster has"):
        simulate(workload, applications, make_policy("fifo"), SimulationConfig(num_nodes=1, gpus_per_node=4))


@pytest.mark.parametrize(
    ("kind", "trace", "throughputs", "num_jobs"),
    [
        ("elasticflow", "elasticflow/traces/195job.csv", "elasticflow/throughputs_A100", 195),
        ("philly", "elasticflow/philly_103959.csv", "elasticflow/throughputs_A100", 876),
        ("gavel", "gavel/msr_seed0_103959.csv", "gavel/simulation_throughputs.csv", 986),
        ("shockwave", "shockwave/trace_120.csv", "shockwave/tacc_throughputs.csv", 120),
    ],
)
def test_the_published_traces_are_read(kind: str, trace: str, throughputs: str, num_jobs: int) -> None:
    folder = SHARED / "thirdparty"
    if not (folder / trace).is_file():
        pytest.skip(f"{trace} not found in ../shared/thirdparty")
    imported, category = import_trace(kind, folder / trace, folder / throughputs)
    assert len(imported.jobs) == num_jobs and category == FORMATS[kind].category
    assert all(job.steps >= 1 and job.time_s >= 0 for job in imported.jobs)


def test_shockwaves_jobs_take_as_long_as_they_took(tmp_path: Path) -> None:
    """At the trace's duration, or that of the authors' runs; spanning nodes was measured elsewhere and is left out."""
    throughputs = tmp_path / "throughputs.csv"
    throughputs.write_text(
        "gpu,model,batch_size,scale_factor,steps_per_s\nv100,LM,10,2,4.0\nv100_unconsolidated,LM,10,2,1.0\n"
    )
    header = "job,model,batch_size,total_steps,scale_factor,duration_s,arrival_s\n"
    trace = written(tmp_path, header + "0,LM,10,999,2,300,5\n1,LM,10,999,2,300,6\n")
    by_trace, _ = import_trace("shockwave", trace, throughputs)
    assert [job.steps for job in by_trace.jobs] == [600.0, 600.0]  # of 0.5 s each
    assert by_trace.tables["LM"].points.keys() == {("v100", False)}
    (tmp_path / "runs_jobs.csv").write_text(
        "policy,kind,job,gpu_time_s\na,simulation,0,100\nb,simulation,0,300\nc,simulation,0,200\nc,physical,0,900\n"
    )
    by_runs, _ = import_trace("shockwave", trace, throughputs)
    assert [job.steps for job in by_runs.jobs] == [200.0, 600.0]


def test_a_trace_can_be_named_as_a_workload(tmp_path: Path) -> None:
    throughputs = tmp_path / "throughputs.csv"
    throughputs.write_text("gpu,model,batch_size,scale_factor,steps_per_s\nv100,LM,10,1,2.0\n")
    trace = written(tmp_path, GAVEL + "0,LM,10,6000,1,5.0\n")
    workload, applications = load_source(f"gavel:{trace}", str(throughputs))
    assert [job.name for job in workload.jobs] == ["job-0"] and applications.keys() == {"LM/job-0"}
