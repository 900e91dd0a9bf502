"""The hand-over of a state where the device runs behind the host, so that a loss shows late."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from pollux.train import handover as handover_module  # noqa: E402
from pollux.train.handover import COMPARED, Handover  # noqa: E402
from pollux.train.replica_sums import ReplicaSums  # noqa: E402
from pollux.train.team import BrokenGroup  # noqa: E402


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_state_cut_short_that_the_script_refuses_is_a_lost_peer_and_no_crash(
    monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    """The numbers of an aborted broadcast may be anything, and a tracked object may check its own."""

    def note(steps: float) -> dict[str, Any]:
        more = {"steps": steps, "device_max": 8, "accelerator": "gpu", "is_damaged": False, "cut": None, "sums": []}
        return {**dict.fromkeys(COMPARED, "same"), **more}

    def settle() -> None:
        if is_lost:
            raise BrokenGroup("a member was lost while the device worked")

    def restore(flat: object, *, with_random: bool) -> None:
        raise ValueError("the average of a tracked object is not a number")

    team: Any = SimpleNamespace(rank=1, size=2, device=torch.device("cpu"), settle=settle)
    team.gather = lambda _: [note(7.0), note(-1.0)]
    state: Any = SimpleNamespace(
        trainees=SimpleNamespace(shards=None), tuner=SimpleNamespace(share_limits=lambda _: None), restore=restore
    )
    monkeypatch.setattr(handover_module, "broadcast", lambda *_: None)
    monkeypatch.setattr(Handover, "_note", lambda *_: None)
    handover = Handover(team, ReplicaSums(team), None)
    with pytest.raises(BrokenGroup if is_lost else ValueError):
        handover.agree(state)
    assert handover.is_damaged and not handover.has_state


@pytest.mark.parametrize(
    ("generation", "has_checkpoint", "told"),
    [
        (1, False, []),
        (1, True, ["step 12: goes on from a checkpoint"]),
        (4, True, ["step 12: goes on from a checkpoint"]),
        (4, False, ["step 0: begins anew, as no checkpoint had been written"]),
    ],
)
def test_a_job_that_was_started_again_says_where_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, generation: int, has_checkpoint: bool, told: list[str]
) -> None:
    """What came after the checkpoint is lost, and its history must not read as if nothing had happened."""
    row = {**dict.fromkeys(COMPARED, "same"), "steps": -1.0, "device_max": 8, "accelerator": "cpu", "is_damaged": False,
           "cut": None, "sums": []}  # fmt: skip
    notes: list[str] = []
    team: Any = SimpleNamespace(rank=0, size=1, group=SimpleNamespace(generation=generation), gather=lambda _: [row])
    tuner = SimpleNamespace(share_limits=lambda _: None, note=notes.append)
    progress = SimpleNamespace(num_steps=12 if has_checkpoint else 0)
    state: Any = SimpleNamespace(trainees=SimpleNamespace(shards=None), tuner=tuner, progress=progress)
    monkeypatch.setattr(Handover, "_note", lambda *_: row)
    monkeypatch.setattr(Handover, "_begin_or_resume", lambda *_: (has_checkpoint, None))
    Handover(team, ReplicaSums(team), None).agree(state)
    assert notes == told
