"""Scripts in the style of public ones: resized, one replica killed, and as good as without."""

from __future__ import annotations

import json
import os
import signal

import pytest

pytest.importorskip("torch")

from tests.e2e.jobs import Bench, is_formed, of_kind, pump_for, pump_until
from tests.long import first_of

# Measured alone, with four seeds: dcgan 0.12 to 0.31, mnist 0.89 to 0.91, nano_gpt 0.91 to 0.92, reinforce 0.89.
# Without training: 0, 0, 0.38, 0.51. The short GAN differs much by seed, so its bound says only that it has learnt.
LEAST = {"dcgan": 0.05, "mnist": 0.85, "nano_gpt": 0.85, "reinforce": 0.8}


@pytest.mark.parametrize("kind", first_of(["dcgan", "mnist", "nano_gpt", "reinforce"]))
def test_a_ported_script_is_resized_and_loses_a_replica(bench: Bench, kind: str) -> None:
    job = bench.start(1, "ports.py", args=["--kind", kind])
    pump_until(bench, job, lambda: is_formed(job, 1))
    pump_for(job, 0.5)
    job.resize(2)
    pump_until(bench, job, lambda: is_formed(job, 2))
    pump_for(job, 0.5)
    os.kill(job.replicas[0].pid, signal.SIGKILL)
    pump_until(bench, job, lambda: len(of_kind(job, "formed")) >= 3)
    bench.finish(job)
    result = json.loads((bench.folder / f"out-{kind}.json").read_text())
    assert result["quality"] >= LEAST[kind], bench.story(job)
