"""Whatever a job tells, the server can read what it has kept of it: now, and when it is started again."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pollux.api.report import read_report, write_report
from pollux.errors import InvalidValueError
from pollux.model.profile import Configuration, Timing
from pollux.server.http.errors import to_json
from pollux.types import BatchLimits
from tests.unit.server.live.world import World, report

MOST, LEAST, WHOLE = 1e308, 5e-324, (1 << 53) - 1
NUM_REPORTS = 3  # sums and means of extremes are further out than these


def timing(batch: int, grad_s: float, step_s: float, num_steps: int = 5, replicas: int = 1) -> Any:
    return Configuration(1, replicas, batch), Timing(grad_s, step_s, num_steps)


TOLD: dict[str, dict[str, Any]] = {
    "many steps": {"timings": (timing(32, 0.1, 0.2, WHOLE),)},
    "long steps": {"timings": (timing(32, MOST, MOST), timing(64, MOST, MOST), timing(64, MOST, MOST, replicas=2))},
    "short and long steps": {
        "timings": (timing(32, 1e-308, 1e-308), timing(64, 1e-308, MOST), timing(64, LEAST, LEAST, replicas=2))
    },
    "large batches": {"timings": (timing(WHOLE, 0.1, 0.2), timing(WHOLE, 0.1, 0.2, replicas=WHOLE))},
    "large numbers": dict.fromkeys(
        ("noise_scale", "noise_scale_error", "throughput", "goodput", "gain", "stalled_s", "remaining_examples"), MOST
    ),
    "small numbers": dict.fromkeys(
        ("noise_scale", "noise_scale_error", "throughput", "goodput", "gain", "remaining_examples"), LEAST
    ),
    "large counts": dict.fromkeys(
        ("total_batch", "device_batch", "accum_steps", "num_steps", "epoch", "num_replicas", "generation"), WHOLE
    ),
    "wide bounds": {"batch": BatchLimits(initial=1, maximum=WHOLE, device_max=WHOLE), "noise_scale": MOST},
    "large metrics": {"metrics": {"loss": MOST, "least": LEAST, "whole": 1 << 63}},
}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    made.cluster.start()
    yield made
    made.cluster.stop(keeps_jobs=True)
    made.store.close()


@pytest.mark.parametrize("told", TOLD)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_a_job_tells_stops_no_server(world: World, told: str) -> None:
    for name in ("liar", "victim"):
        world.submit(name=name, kind="elastic", max_replicas=4)
        world.until_state(name, "running")
    with contextlib.suppress(InvalidValueError):  # refused: so it should be
        wrong = read_report(write_report(report("liar", **TOLD[told])))
        for _ in range(NUM_REPORTS):
            world.cluster.report(wrong)
            world.cluster.report(report("victim"))
            seen = world.cluster._inbox
            world.until(lambda seen=seen: not seen._unseen and not seen._unsaved, "reports are taken in")
        world.cluster.operations.requeue("liar")  # which keeps what was learnt of it
        world.until(lambda: world.cluster.queries.summary_of("liar").num_resizes, "it starts again")
    assert world.cluster.problem == ""
    world.cluster.stop(keeps_jobs=True)
    cluster = world.make()
    cluster.start()
    world.until(lambda: cluster.is_ready, "the server is ready")
    time.sleep(0.3)  # for a decision
    assert cluster.problem == ""
    for name in ("liar", "victim"):
        for answer in (cluster.queries.job, cluster.queries.model):
            to_json(answer(name))
    to_json(cluster.queries.rounds(None, 10))
