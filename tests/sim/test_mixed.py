"""The Sia artifact's traces and its cluster of three types: everything can be read, placed and run to its end."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest

from pollux.policy import PolicySettings, make_policy
from pollux.simulator.application import Application, dense_placement
from pollux.simulator.config import SimulationConfig, sia_config
from pollux.simulator.result import SimulationResult, summarise
from pollux.simulator.run import SimulationRun, simulate
from pollux.simulator.source import load_source
from pollux.simulator.workload import Workload
from tests.conftest import SHARED
from tests.long import long

TYPES = {"aws": 4, "azure": 8, "dgx-ext": 8, "quad": 4, "rtx": 8}  # slots of a node
ARTIFACT_JCT_S = 1949.8
Source = tuple[Workload, Mapping[str, Application]]


@pytest.fixture(scope="class")
def source() -> Source:
    path = SHARED / "sia"
    if not path.is_dir():
        pytest.skip("published Sia data not found in ../shared/sia")
    return load_source(str(path / "workloads" / "philly" / "workload-1.csv"), str(path / "traces"))


class TestSia:
    """One class: reading the traces takes longer than most of what is done with them."""

    def test_applications_and_their_types(self, source: Source) -> None:
        workload, applications = source
        assert len(workload.jobs) == 160
        assert {name: application.accelerators for name, application in applications.items()} == {
            "bert": tuple(TYPES),
            "cifar10": tuple(TYPES),
            "deepspeech2": tuple(TYPES),
            "gpt_pmp": ("dgx-ext", "rtx"),
            "imagenet": tuple(TYPES),
            "ncf": tuple(TYPES),
            "yolov3": tuple(TYPES),
        }
        most = {name: dict(applications[name].limits.device_max_on) for name in ("cifar10", "deepspeech2", "yolov3")}
        assert most["cifar10"] == {"aws": 1024, "azure": 3072, "dgx-ext": 4096, "quad": 2048, "rtx": 1024}
        assert most["deepspeech2"] == {"aws": 80, "azure": 240, "dgx-ext": 320, "quad": 160, "rtx": 57}
        assert most["yolov3"] == {"aws": 16, "azure": 24, "dgx-ext": 32, "quad": 16, "rtx": 8}

    def test_no_shape_of_a_larger_cluster_is_without_an_answer(self, source: Source) -> None:
        _, applications = source
        for application in applications.values():
            for kind in application.accelerators:
                for num_replicas in (1, 3, 7, 13, 24, 40, 96):
                    placement = dense_placement(num_replicas, TYPES[kind])
                    scattered = (1,) * num_replicas
                    for shape in (placement, placement[::-1], scattered):
                        most = application.device_max(kind, shape)
                        for batch in (application.limits.device_min, most):
                            times = application.step_time(kind, shape, batch)
                            assert 0 <= times.sync_s < times.step_s < 600, (application.name, kind, shape, batch)

    def test_a_device_of_the_newest_type_is_the_fastest(self, source: Source) -> None:
        """A100 before V100 and the rest, as the Sia paper finds for each of these models."""
        _, applications = source
        for name in ("bert", "cifar10", "deepspeech2", "imagenet", "yolov3"):
            rates = {}
            for kind in TYPES:
                batch = applications[name].limits.on(kind).device_max
                rates[kind] = batch / applications[name].step_time(kind, (1,), batch).step_s
            assert max(rates, key=rates.__getitem__) == "dgx-ext", (name, rates)

    def test_baselines_end_on_three_types(self, source: Source) -> None:
        averages = {
            name: checked(simulate(*source, make_policy(name), sia_config())).avg_jct_s for name in ("fifo", "srtf")
        }
        assert averages["srtf"] < 0.6 * averages["fifo"]

    @long
    def test_pollux_is_below_the_artifacts_sia(self, source: Source) -> None:
        """The artifact's own code takes 1949.8 s on average."""
        assert _simulated(source, "pollux", sia_config()).avg_jct_s < 0.9 * ARTIFACT_JCT_S

    @long
    def test_sia_comes_near_the_artifacts(self, source: Source) -> None:
        """With what the artifact's jobs know: nothing measured in advance, nothing carried over from others.

        And with its exploration: one replica at first, twice as many at most as were measured. It is 6 % faster than
        the artifact: batches are chosen on a finer grid, and a job whose next size does not pay may take a larger one.
        """
        config = dataclasses.replace(sia_config(), profiles_types=False, guesses_types=False)
        settings = PolicySettings(exploration=2.0, first_replicas=1)
        assert _simulated(source, "sia", config, settings).avg_jct_s == pytest.approx(ARTIFACT_JCT_S, rel=0.08)


def checked(run: SimulationRun) -> SimulationResult:
    assert not [round_.error for round_ in run.store.rounds if round_.error]
    result = summarise(run)
    assert (result.num_jobs, result.cluster) == (160, "aws:6x4,dgx-ext:2x8,rtx:3x8")
    assert set(result.gpu_hours_by_type) == {"aws", "dgx-ext", "rtx"}
    assert min(result.gpu_hours_by_type.values()) > 10
    # As each asks for, and one start each: no job may end sooner than its delay allows.
    assert min(job.jct_s for job in result.jobs if job.application == "cifar10") > 50
    assert all(sample.num_slots == 64 for sample in run.samples)
    return result


def test_a_folder_of_both_formats_is_read_by_types(tmp_path: Path) -> None:
    """The artifact's own folders also hold files without a type, which are copies of one type's."""
    path = SHARED / "sia" / "traces" / "bert"
    if not path.is_dir():
        pytest.skip("published Sia data not found in ../shared/sia")
    folder = tmp_path / "bert"
    folder.mkdir()
    for file in path.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
        if file.stem.endswith("-aws"):
            (folder / file.name.replace("-aws", "")).write_bytes(file.read_bytes())
    (tmp_path / "jobs.csv").write_text("name,time,application,num_replicas,batch_size\na,0.5,bert,2,24\n")
    _, applications = load_source(str(tmp_path / "jobs.csv"), str(tmp_path))
    assert applications["bert"].accelerators == tuple(TYPES)


def _simulated(
    source: Source, policy: str, config: SimulationConfig, settings: PolicySettings | None = None
) -> SimulationResult:
    settings = settings or PolicySettings()
    return summarise(simulate(*source, make_policy(policy, settings), config), settings)
