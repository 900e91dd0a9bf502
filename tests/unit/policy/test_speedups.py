"""Speedups over the fair share."""

from __future__ import annotations

import pytest

from pollux.model.goodput import best_batch
from pollux.policy.speedups import speedup_tables
from pollux.testing.snapshots import LIMITS, PARAMS, make_job, make_nodes
from pollux.types import Snapshot


def test_a_fair_share_larger_than_a_node_spans_nodes():
    """Two jobs on four nodes of four: the fair share of eight is on two nodes, and its speedup is one."""
    jobs = tuple(make_job(name, noise_scale=1000.0, max_profiled_replicas=8) for name in ("a", "b"))
    table = speedup_tables(Snapshot(now=0, nodes=make_nodes(4, 4), jobs=jobs))[0]
    assert table.speedups[0, 1, 8] == pytest.approx(1.0)
    assert table.fair_goodput == pytest.approx(best_batch(PARAMS, 1000.0, LIMITS, 2, 8)[1], rel=0.01)


def test_a_fair_share_that_fits_a_node_is_on_one():
    jobs = tuple(make_job(name, noise_scale=1000.0, max_profiled_replicas=8) for name in "abcd")
    table = speedup_tables(Snapshot(now=0, nodes=make_nodes(4, 4), jobs=jobs))[0]
    assert table.speedups[0, 0, 4] == pytest.approx(1.0)
