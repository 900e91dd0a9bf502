"""Profiled applications: the throughput model, corrections, learning, and the built-in table."""

from __future__ import annotations

import importlib.resources
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.errors import InvalidValueError, UnknownNameError
from pollux.model.efficiency import earned_gain, gain
from pollux.model.goodput import BatchTuner
from pollux.model.throughput import iteration_s
from pollux.policy import make_policy
from pollux.scheduler.ports import StartJob
from pollux.simulator.application import Application, Habits
from pollux.simulator.builtin import ProfiledApplication, StepCorrections, load_builtin
from pollux.simulator.config import SimulationConfig
from pollux.simulator.engine import SimulatedEngine
from pollux.simulator.osdi21 import load_traces
from pollux.simulator.run import simulate
from pollux.simulator.workload import load_workload
from pollux.testing.snapshots import params
from pollux.types import Allocation, BatchLimits, JobSpec, Node, ThroughputParams

LIMITS = BatchLimits(initial=100, maximum=800, device_min=10, device_max=200)
THETA = ThroughputParams(0.1, 0.001, 0.3, 0.01, 0.05, 0.002, 1.5)


def make(**changes: Any) -> ProfiledApplication:
    values: dict[str, Any] = {
        "name": "app",
        "limits": LIMITS,
        "max_replicas": 16,
        "params": {"gpu": THETA},
        "epoch_ends": [100.0, 300.0, 350.0],
        "noise_scales": [0.0, 900.0, 1e9],
    }
    return ProfiledApplication(**values | changes)


class TestStepTime:
    @given(
        theta=params,
        placement=st.lists(st.integers(1, 8), min_size=1, max_size=6).map(tuple),
        batch=st.integers(1, 4096),
        accum_steps=st.integers(0, 5),
    )
    def test_is_the_throughput_model(
        self, theta: ThroughputParams, placement: tuple[int, ...], batch: int, accum_steps: int
    ) -> None:
        times = make(params={"gpu": theta}).step_time("gpu", placement, batch)
        expected = iteration_s(theta, len(placement), sum(placement), batch, accum_steps)
        assert times.iteration_s(accum_steps) == pytest.approx(float(expected))
        assert times.sync_s >= 0

    def test_one_replica_has_nothing_to_synchronise(self) -> None:
        assert make().step_time("gpu", (1,), 50).sync_s == 0

    def test_depends_on_the_accelerator(self) -> None:
        fast = THETA._replace(beta_g=0.0001)
        app = make(params={"slow": THETA, "fast": fast})
        assert app.accelerators == ("slow", "fast")
        assert app.step_time("fast", (2,), 100).step_s < app.step_time("slow", (2,), 100).step_s
        with pytest.raises(UnknownNameError, match=r"fasst.*Did you mean 'fast'"):
            app.step_time("fasst", (2,), 100)

    def test_is_remembered(self) -> None:
        app = make()
        assert app.step_time("gpu", (2, 1), 64) is app.step_time("gpu", (2, 1), 64)

    @pytest.mark.parametrize(("placement", "batch"), [((), 10), ((2, 0), 10), ((1,), 0)])
    def test_rejects_what_cannot_run(self, placement: tuple[int, ...], batch: int) -> None:
        with pytest.raises(InvalidValueError):
            make().step_time("gpu", placement, batch)


class TestCorrections:
    def test_factors_apply_to_compute_and_communication(self) -> None:
        corrections = StepCorrections(pass_factors={50: 2.0}, sync_factors={(1, 2): 3.0})
        theta = THETA._replace(gamma=1.0)  # no overlap: the times add up
        times = make(params={"gpu": theta}, corrections={"gpu": corrections}).step_time("gpu", (2,), 50)
        assert times.grad_s == pytest.approx(2.0 * 0.15)
        assert times.sync_s == pytest.approx(3.0 * 0.05)

    def test_between_known_batches_logarithms_are_interpolated_and_beyond_them_held(self) -> None:
        corrections = StepCorrections(pass_factors={10: 1.0, 1000: 4.0})
        assert [corrections.pass_factor(batch) for batch in (1, 10, 100, 1000, 5000)] == pytest.approx([1, 1, 2, 4, 4])

    def test_between_known_shapes(self) -> None:
        corrections = StepCorrections(sync_factors={(2, 4): 1.0, (2, 16): 4.0, (8, 16): 1.0, (1, 4): 9.0})
        assert corrections.sync_factor(2, 8) == pytest.approx(2.0)  # over replicas
        assert corrections.sync_factor(4, 16) == pytest.approx(2.0)  # over nodes
        assert corrections.sync_factor(32, 64) == pytest.approx(1.0)  # beyond
        assert corrections.sync_factor(1, 2) == pytest.approx(9.0)  # within a node is a network of its own

    def test_nothing_known_changes_nothing(self) -> None:
        corrections = StepCorrections(sync_factors={(1, 4): 9.0})
        assert corrections.pass_factor(7) == 1.0
        assert corrections.sync_factor(3, 5) == 1.0

    @pytest.mark.parametrize(
        "values",
        [
            {"pass_factors": {0: 1.0}},
            {"pass_factors": {4: 0.0}},
            {"sync_factors": {(3, 2): 1.0}},
            {"sync_factors": {(1, 2): math.nan}},
        ],
    )
    def test_validated(self, values: dict[str, Any]) -> None:
        with pytest.raises(InvalidValueError):
            StepCorrections(**values)


class TestLearning:
    def test_noise_scale_sets_the_gain(self) -> None:
        app = make()
        # φ = 900, M0 = 100: a batch of 400 is worth 4·(900 + 100)/(900 + 400) steps.
        assert app.gradient(1, 400).gain(4.0) == pytest.approx(4 * 1000 / 1300)
        assert app.gradient(0, 400).gain(4.0) == pytest.approx(1.0)
        assert app.gradient(2, 400).gain(4.0) == pytest.approx(4.0, rel=1e-5)

    @given(
        lengths=st.lists(st.floats(1.0, 1e4), min_size=1, max_size=8),
        phi=st.floats(0, 1e6),
        batch=st.integers(100, 800),
        data=st.data(),
    )
    def test_iterations_are_progress_over_gain(
        self, lengths: list[float], phi: float, batch: int, data: st.DataObject
    ) -> None:
        phis = [phi * (index + 1) for index in range(len(lengths))]
        app = make(epoch_ends=[sum(lengths[: i + 1]) for i in range(len(lengths))], noise_scales=phis)
        first = data.draw(st.integers(0, len(lengths) - 1))
        last = data.draw(st.integers(first, len(lengths) - 1))
        slow = sum(
            (app.epoch_end(epoch) - app.epoch_end(epoch - 1)) / app.gradient(epoch, batch).gain(batch / 100)
            for epoch in range(first + 1, last + 1)
        )
        assert app.iterations_between(first, last, batch) == pytest.approx(slow, rel=1e-9, abs=1e-6)

    def test_infinite_noise_is_a_perfect_speedup(self) -> None:
        app = make(noise_scales=[math.inf] * 3)
        assert app.iterations_between(0, 2, 200) == pytest.approx(125)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": ""}, "name"),
        ({"max_replicas": 0}, "max_replicas"),
        ({"params": {}}, "throughput parameters"),
        ({"params": {"gpu": THETA._replace(gamma=0.5)}}, "γ"),
        ({"params": {"gpu": THETA._replace(alpha_g=math.nan)}}, "gpu"),
        ({"params": {"gpu": THETA._replace(alpha_g=0.0, beta_g=0.0)}}, "T_grad"),
        ({"corrections": {"tpu": StepCorrections()}}, "tpu"),
        ({"epoch_ends": [], "noise_scales": []}, "epochs"),
        ({"epoch_ends": [1.0, 1.0, 2.0]}, "increasing"),
        ({"epoch_ends": [0.0, 1.0, 2.0]}, "above 0"),
        ({"epoch_ends": [1.0, 2.0, math.inf]}, "numbers"),
        ({"noise_scales": [1.0]}, "1 noise scales for 3 epochs"),
        ({"noise_scales": [1.0, -1.0, 1.0]}, "noise scales"),
        ({"noise_scales": [1.0, math.nan, 1.0]}, "noise scales"),
    ],
)
def test_rejects_values_that_cannot_be(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidValueError, match=words):
        make(**changes)


class TestBuiltin:
    def test_the_six_applications(self) -> None:
        assert sorted(load_builtin()) == ["bert", "cifar10", "deepspeech2", "imagenet", "ncf", "yolov3"]

    def test_read_once_but_each_caller_has_its_own_mapping(self) -> None:
        first, second = load_builtin(), load_builtin()
        assert first["ncf"] is second["ncf"]
        del first["ncf"]
        assert "ncf" in load_builtin()

    def test_the_table_is_small_and_names_its_source(self) -> None:
        text = importlib.resources.files("pollux.simulator").joinpath("profiles/osdi21.json").read_text("utf-8")
        assert len(text) < 40_000
        table = json.loads(text)
        assert "petuum/adaptdl" in table["source"]
        assert "Apache-2.0" in table["source"]

    def test_physical(self) -> None:
        for app in load_builtin().values():
            for placement in [(1,), (2,), (4,), (4, 4), (1, 1, 1), (4,) * 5, (4,) * 16]:
                for batch in (app.limits.device_min, app.limits.device_max):
                    times = app.step_time("gpu", placement, batch)
                    assert 0 < times.grad_s <= times.step_s < 60, (app.name, placement, batch)

    def test_matches_the_traces(self, osdi21: Path) -> None:
        """The figures it claims: limits and epochs exactly, step times to 10 %, steps to train to 3 %."""
        traces, builtin = load_traces(osdi21 / "traces"), load_builtin()
        assert sorted(traces) == sorted(builtin)
        for name, app in builtin.items():
            traced = traces[name]
            assert (app.limits, app.max_replicas, app.num_epochs) == (
                traced.limits,
                traced.max_replicas,
                traced.num_epochs,
            )
            last = app.num_epochs - 1
            assert app.epoch_end(last) == pytest.approx(traced.epoch_end(last), rel=1e-3)
            errors = []
            limits = app.limits
            middle = round(math.sqrt(limits.device_min * limits.device_max))
            for placement in [(1,), (2,), (3,), (4,), (2, 4), (4, 4), (4, 4, 4), (4, 4, 4, 4)]:
                for batch in (limits.device_min, middle):
                    got = app.step_time("gpu", placement, batch).step_s
                    errors.append(math.log(got / traced.step_time("gpu", placement, batch).step_s))
            assert math.sqrt(sum(e * e for e in errors) / len(errors)) < 0.10, name  # 0.09 is the worst, of ncf
            batch = limits.maximum // 2
            assert _steps(app, batch) == pytest.approx(_steps(traced, batch), rel=0.03), name

    @pytest.mark.golden
    def test_reproduces_the_average_completion_time(self, osdi21: Path) -> None:
        """Tiresias with traces: 3469.7 s, a published figure."""
        applications = load_builtin()
        workload = load_workload(osdi21 / "workloads" / "workload-6.csv", applications)
        run = simulate(workload, applications, make_policy("tiresias"), SimulationConfig())
        times = [job.finished_at - job.spec.submitted_at for job in run.store.jobs.values() if job.finished_at]
        assert len(times) == 160
        assert sum(times) / len(times) == pytest.approx(3469.69375, rel=0.02)


def _steps(app: Application, batch: int) -> float:
    """To train from the start to the end with one batch size."""
    ends = [0.0] + [app.epoch_end(epoch) for epoch in range(app.num_epochs)]
    return sum(
        (ends[epoch + 1] - ends[epoch]) / app.gradient(epoch, batch).gain(batch / app.limits.initial)
        for epoch in range(app.num_epochs)
    )


class TestHabits:
    """Jobs that were recorded live count less of a larger batch's gain, and grow no faster than they did."""

    def test_a_share_of_the_gain_counts_in_progress_and_steps(self) -> None:
        whole, half = make(), make(habits=Habits(earned=0.5))
        for epoch in range(3):
            full = whole.gradient(epoch, 400).gain(4.0)
            counted = half.gradient(epoch, 400).gain(4.0)
            assert counted == pytest.approx(earned_gain(full, 0.5))
            assert counted <= full
        assert half.iterations_between(0, 2, 400) > whole.iterations_between(0, 2, 400)
        assert make(habits=Habits(earned=1 - 1e-12)).iterations_between(0, 2, 400) == pytest.approx(
            whole.iterations_between(0, 2, 400)
        )

    def test_the_batch_is_chosen_by_what_counts(self) -> None:
        tuner = BatchTuner(THETA, LIMITS, 1, 4)
        full, half = (tuner.best(900.0, earned=earned)[0].total(4) for earned in (1.0, 0.5))
        assert half < full
        (device, accum), value = tuner.best(900.0, earned=0.5)
        total = 4 * device * (accum + 1)
        assert value == pytest.approx(
            earned_gain(float(gain(900.0, 100, total)), 0.5) * 100 / float(iteration_s(THETA, 1, 4, device, accum))
        )

    def test_batches_are_no_larger_than_the_job_had_dared_by_then(self) -> None:
        habits = Habits(largest_batches=((100, 10), (100, 50), (200, 200)))
        engine = SimulatedEngine([Node(name="n", num_slots=4)], {"app": make(habits=habits)}, adapts_batch=True)
        spec = JobSpec(name="job", application="app", batch=LIMITS, max_replicas=4)
        allocation = Allocation.of(("n", 4))
        engine.apply([StartJob(job="job", spec=spec, allocation=allocation, generation=1, params={"gpu": THETA})])
        job, seen = engine.jobs["job"], set()
        while "job" in engine.jobs and engine.now < 1e5:
            seen.add((job.epoch, job.total_batch))
            engine.advance(engine.now + 1.0)
        assert max(total for epoch, total in seen if epoch == 0) == 100
        assert max(total for epoch, total in seen if epoch == 1) == 200
        assert max(total for epoch, total in seen if epoch == 2) > 200
