"""Models are held to measurements of others: the numbers of docs/truth.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from pollux.evaluation.truth import TruthRow, measure
from tests.conftest import SHARED


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, str], TruthRow]:
    folder = SHARED / "thirdparty"
    if not folder.is_dir():
        pytest.skip("measurements of others not found in ../shared/thirdparty")
    found, skipped = measure(folder)
    assert not skipped
    return {(row.check, row.model): row for row in found}


def test_passes_are_predicted_within_four_percent_on_average(rows: dict[tuple[str, str], TruthRow]) -> None:
    check = "T_grad of a batch from the other batches"
    assert rows[check, "ours"].mean_error < 0.04 < 0.07 < rows[check, "published"].mean_error


def test_sixteen_gpus_are_predicted_from_four(rows: dict[tuple[str, str], TruthRow]) -> None:
    check = "T_step on 16 GPUs from 1 to 4"
    assert rows[check, "ours"].median_error < 0.15 and rows[check, "ours"].worst_error < 0.5
    assert rows[check, "published"].worst_error > 2.5


def test_shared_speeds_have_little_bias_on_a_gpu_that_was_held_out(rows: dict[tuple[str, str], TruthRow]) -> None:
    check = "speed kept beside another job on one GPU"
    assert abs(rows[check, "ours"].bias) < 0.035 < 0.2 < rows[check, "published"].bias


def test_what_is_missing_is_left_out_with_a_reason(tmp_path: Path) -> None:
    found, skipped = measure(tmp_path)
    assert found == [] and len(skipped) == 4 and "summary_train.csv" in skipped[0]
