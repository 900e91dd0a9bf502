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
    monkeypatch.setattr(nccl, "make_room", lambda *_, **__: None)
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


def group_of(generation: int, attempt: int = 0) -> Group:
    return Group(generation=generation, attempt=attempt, rank=0, world_size=2, local_rank=0, num_nodes=1, store=None)


def test_the_sums_are_sealed_right_before_an_abort_though_the_look_at_them_still_runs(team, monkeypatch):
    """The driver may hang for longer than the abort can wait; what it answers then is too late."""
    happened, may_end, has_aborted = list[str](), threading.Event(), threading.Event()

    class Sums:
        def stop(self, reason):
            happened.append("look")
            may_end.wait(20.0)
            happened.append("answer")

        def seal(self):
            happened.append("seal")

    def abort(groups, device):
        happened.append("abort")
        has_aborted.set()
        return []

    monkeypatch.setattr(nccl, "CUT_TIMEOUT_S", 0.1)
    monkeypatch.setattr(nccl, "abort", abort)
    team.group = group_of(3)
    team.give_up(4, 0, Sums())
    assert has_aborted.wait(20.0)
    may_end.set()
    assert happened[:3] == ["look", "seal", "abort"]


class SlowNumber(int):
    """A generation whose comparison takes until the test lets it end."""

    is_compared, may_end = threading.Event(), threading.Event()

    def __eq__(self, other):
        self.is_compared.set()
        assert self.may_end.wait(20.0)
        return int(self) == int(other)

    __hash__ = int.__hash__


def test_two_threads_that_tell_of_losses_do_not_forget_the_later_one():
    """The owner tells that generation 4 has lost a member while torch's watchdog tells it of generation 3."""
    team = Team(torch.device("cpu"), timeout_s=1.0)
    team.group = group_of(4)
    first = threading.Thread(target=team.give_up, args=(SlowNumber(3), 1))
    first.start()
    assert SlowNumber.is_compared.wait(20.0)
    second = threading.Thread(target=team.give_up, args=(5,))
    second.start()
    second.join(0.2)
    SlowNumber.may_end.set()
    first.join(20.0)
    second.join(20.0)
    assert team.is_lost()


class Ended(BaseException):
    """Instead of the end of this process."""


@pytest.fixture
def broken_team(team, monkeypatch):
    """Its group had connected. What ends the process raises here."""

    def end(code):
        raise Ended(code)

    monkeypatch.setattr(nccl, "connect", lambda *_: None)
    monkeypatch.setattr(team_module.os, "_exit", end)
    monkeypatch.setattr(team_module, "ABORT_TIMEOUT_S", 0.1)
    team.form(group_of(1))
    team_module.dist.group.WORLD = object()
    return team


def test_an_abort_that_never_ends_ends_this_process_and_not_the_job(broken_team, monkeypatch):
    """What comes next frees DDP's reducer, which would wait for the device with Python's lock held, for good."""
    may_end = threading.Event()
    stuck = threading.Thread(target=may_end.wait, args=(20.0,), daemon=True)
    stuck.start()
    monkeypatch.setattr(nccl, "abort", lambda *_: [stuck])
    with pytest.raises(Ended, match="143"):
        broken_team.cut_off()
    may_end.set()
    stuck.join()
    broken_team.cut_off()  # one that ends is waited for


@pytest.mark.parametrize("is_stuck", [False, True])
def test_a_script_that_raises_cuts_off_what_waits_for_a_lost_peer(broken_team, monkeypatch, is_stuck):
    """The interpreter frees DDP's reducer when it ends; the process would never end."""
    happened = []

    def wait(is_lost, timeout_s):
        if is_stuck:
            raise RuntimeError(f"the device did not end its work within {timeout_s:g} s")

    def abort(*_):
        happened.append("abort")
        return []

    monkeypatch.setattr(nccl, "wait_for_device", wait)
    monkeypatch.setattr(nccl, "abort", abort)
    monkeypatch.setattr(Team, "dissolve", lambda _, *, is_broken=False: happened.append(f"dissolve, {is_broken}"))
    broken_team.close()
    assert happened == (["abort", "dissolve, True"] if is_stuck else ["dissolve, False"])


def test_nccl_without_room_has_torchs_cache_given_back_and_tries_once_more(team, monkeypatch):
    """Then the replica ends, and with it the change. It would try fifty times otherwise, and the others with it."""
    gave_back = []

    def connect(*_):
        raise torch.OutOfMemoryError("NCCL did not connect: Cuda failure 'out of memory'")

    monkeypatch.setattr(nccl, "connect", connect)
    monkeypatch.setattr(nccl, "make_room", lambda device, always: gave_back.append(always))
    with pytest.raises(BrokenGroup, match="out of memory"):
        team.form(group_of(1))
    with pytest.raises(torch.OutOfMemoryError):
        team.form(group_of(1, 1))
    assert gave_back == [False, True]
    monkeypatch.setattr(nccl, "connect", lambda *_: None)
    team.form(group_of(2))
    team.form(group_of(3))
    assert gave_back == [False, True, True, False]


@pytest.mark.parametrize("message", ["Cuda failure 2 'out of memory'", "CUDA out of memory. Tried to allocate"])
def test_nccls_want_of_memory_is_told_from_a_lost_peer(monkeypatch, message):
    def refuse(world, device, deadline, outcome):
        outcome.put(RuntimeError(message))

    monkeypatch.setattr(nccl, "_connect", refuse)
    with pytest.raises(torch.OutOfMemoryError, match="did not connect"):
        nccl.connect(None, torch.device("cuda"), lambda: False)


@pytest.mark.parametrize(
    ("free", "always", "rests", "frees"),
    [
        (1 << 34, False, True, False),
        (1 << 28, False, True, True),
        (1 << 34, True, True, True),
        (1 << 28, True, False, False),
    ],
)
def test_the_cache_is_given_back_where_little_is_free_and_the_device_rests(monkeypatch, free, always, rests, frees):
    freed = []

    def wait(is_lost, timeout_s):
        if not rests:
            raise RuntimeError("the device did not end its work")

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 1 << 37))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(True))
    monkeypatch.setattr(nccl, "wait_for_device", wait)
    nccl.make_room(torch.device("cuda"), always)
    assert bool(freed) == frees


@pytest.mark.parametrize("is_stuck", [False, True])
def test_out_of_memory_beside_a_lost_peer_does_not_wait_for_the_device(broken_team, monkeypatch, is_stuck):
    freed = []

    def wait(is_lost, timeout_s):
        if is_stuck:
            raise RuntimeError("a member was lost while the device worked")

    monkeypatch.setattr(nccl, "wait_for_device", wait)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(True))
    broken_team.release_memory()
    assert bool(freed) != is_stuck
