"""The process group of a generation: how a broken one is left. Others that form and break: test_unusual_groups."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch

from pollux.membership.store import Group
from pollux.train import gloo, nccl
from pollux.train import team as team_module
from pollux.train.team import BrokenGroup, Team


@pytest.fixture
def team(monkeypatch: pytest.MonkeyPatch) -> Team:
    """On a GPU that is not there: torch's and NCCL's calls do nothing."""
    pretended = SimpleNamespace(
        group=SimpleNamespace(WORLD=None), init_process_group=lambda *_, **__: None, HashStore=lambda: None
    )
    monkeypatch.setattr(team_module, "dist", pretended)
    monkeypatch.setattr("torch.distributed.distributed_c10d._set_pg_timeout", lambda *_: None)
    monkeypatch.setattr(Team, "process_group", object())
    monkeypatch.setattr(Team, "share", lambda *_: None)
    for name, function in (("connect", lambda *_: None), ("used", lambda _: nullcontext())):
        monkeypatch.setattr(gloo, name, function)
    monkeypatch.setattr(nccl, "prepare_environment", lambda: None)
    monkeypatch.setattr(nccl, "watch", lambda *_: threading.Event())
    return Team(torch.device("cuda"), timeout_s=1.0)


@pytest.mark.parametrize("connects", [False, True])
def test_only_a_group_that_had_connected_has_something_to_cut_off(team, monkeypatch, connects):
    """Aborting a group that was lost while NCCL connected took 5 s on a GPU, with the others waiting."""
    aborted = []

    def connect(*_):
        if not connects:
            raise RuntimeError("a member was lost while NCCL connected")

    def abort(groups, device):
        aborted.append(device)
        return []

    monkeypatch.setattr(nccl, "connect", connect)
    monkeypatch.setattr(nccl, "abort", abort)
    group = Group(generation=1, attempt=0, rank=0, world_size=2, local_rank=0, num_nodes=1, store=None)
    with nullcontext() if connects else pytest.raises(BrokenGroup):
        team.form(group)
    team_module.dist.group.WORLD = object()
    team.cut_off()
    assert bool(aborted) == connects
