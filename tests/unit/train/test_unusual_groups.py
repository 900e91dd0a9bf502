"""Process groups unlike the usual one: the script's own, unknown to the environment, told of late, or lost."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch import Tensor

from pollux import train
from pollux.errors import PeerLostError
from pollux.membership.replica import TORCHRUN
from pollux.membership.store import Group
from pollux.train.leaving import Leave
from pollux.train.team import Team
from tests.unit.train.processes import (
    FOLDER,
    Rows,
    a_run,
    flat,
    make_step,
    refusal,
    replicas,
    small_model,
)

# --- groups --------------------------------------------------------------------------------------------------------


def train_in_a_group_that_the_environment_does_not_know() -> str:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for name in TORCHRUN:
        del os.environ[name]
    dist.init_process_group("gloo", init_method=f"file://{os.environ[FOLDER]}/own", rank=rank, world_size=size)
    dist.barrier()  # nobody may leave while another is still connecting
    try:
        return refusal(train.init, device="cpu")
    finally:
        dist.destroy_process_group()


def test_a_process_group_that_the_environment_does_not_know_is_refused():
    for rank, message in enumerate(replicas(2, train_in_a_group_that_the_environment_does_not_know)):
        assert message.startswith("InvalidValueError")
        assert f"torch.distributed says rank {rank} of 2, the environment rank 0 of 1" in message
        assert "set RANK and WORLD_SIZE" in message


def lose_memory_in_a_group_of_ones_own() -> tuple[str, float]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{os.environ[FOLDER]}/own", rank=rank, world_size=size)
    module = small_model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with a_run(timeout_s=50.0) as run:
        loader = run.dataloader(Rows(80), 8, device_batch_size=8)
        model, _ = run.prepare(module, optimizer)
        begun = 0.0
        try:
            for _ in run.epochs(1):
                for _, x, y in loader:
                    with run.attempt():
                        if run.num_steps == 3:
                            begun = time.monotonic()
                            if rank == 1:
                                raise torch.OutOfMemoryError("pretended")
                        make_step(model, optimizer, x, y)
        except PeerLostError as error:
            if rank == 1:  # as it is when the script ends
                dist.destroy_process_group()
            return str(error), time.monotonic() - begun
    raise AssertionError("trained on")


def test_trouble_in_a_process_group_of_ones_own_is_told_at_once():
    for message, waited_s in replicas(2, lose_memory_in_a_group_of_ones_own):
        assert "the script made the process group" in message
        assert "let train.init() call torch.distributed.init_process_group" in message
        assert waited_s < 20.0  # and not the 50 s that a peer is waited for


def be_told_late() -> tuple[int, int, Tensor]:
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "4"
    module = small_model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with a_run() as run:
        loader = run.dataloader(Rows(80), 8)
        model, _ = run.prepare(module, optimizer)
        for _ in run.epochs(1):
            for _, x, y in loader:
                assert run.generation == 5
                run._session._on_lost(3 + run.num_steps % 3)  # up to the roster that this group comes from
                make_step(model, optimizer, x, y)
                assert not run._session.has_failed() and not run._team.is_lost()
        group = run._team.group
        assert group is not None
        return run.num_steps, group.attempt, flat(module)


def test_a_loss_told_late_is_none_of_the_newer_groups_business():
    results = replicas(2, be_told_late)
    for num_steps, attempt, parameters in results:
        assert (num_steps, attempt) == (10, 0)  # nobody has formed the group anew
        assert torch.equal(parameters, results[0][2])


def test_a_group_has_lost_a_member_if_it_is_older_than_the_roster_that_says_so():
    team = Team(torch.device("cpu"), 5.0)
    store = dist.HashStore()  # type: ignore[attr-defined]
    for generation, told, is_lost in ((3, 2, False), (3, 3, False), (3, 4, True), (4, 3, False), (4, 5, True)):
        team.group = Group(
            generation=generation, attempt=0, rank=0, world_size=2, local_rank=0, num_nodes=1, store=store
        )
        team.give_up(told)
        assert team.is_lost() == is_lost


def wait_alone() -> float:
    """Rank 0 waits in a collective of its own, which rank 1 never comes to, until its group has lost a member."""
    with a_run(timeout_s=40.0) as run:
        run._team.share(None)
        begun = time.monotonic()
        if run.rank == 0:
            threading.Timer(0.3, run._team.give_up, (sys.maxsize,)).start()
            with pytest.raises(RuntimeError, match="gloo"):
                dist.all_reduce(torch.ones(1))
        else:
            time.sleep(1.0)
        return time.monotonic() - begun


def test_a_collective_of_the_users_own_ends_when_a_member_is_lost():
    assert max(replicas(2, wait_alone)) < 15.0


def lose_the_other(folder: str) -> int | None:
    """Rank 1 goes; rank 0 waits for it in vain, and is told to end."""
    module = small_model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with a_run(checkpoint_dir=folder, timeout_s=30.0) as run:
        loader = run.dataloader(Rows(64), 4)
        model, _ = run.prepare(module, optimizer)
        try:
            for _ in run.epochs(2):
                for _, x, y in loader:
                    if run.num_steps == 3 and run.rank == 1:
                        return None
                    if run.num_steps == 3:
                        signal.setitimer(signal.ITIMER_REAL, 1.0)
                        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
                    make_step(model, optimizer, x, y)
        except Leave as leave:
            return int(leave.code)
    raise AssertionError("it trained on alone")


def test_a_survivor_that_nobody_comes_to_saves_and_leaves_when_told(tmp_path):
    begun = time.monotonic()
    assert replicas(2, lose_the_other, str(tmp_path)) == [143, None]
    assert time.monotonic() - begun < 20.0  # not the time-out
    latest = train.CheckpointDirectory(tmp_path).latest()
    assert latest is not None and latest.step == 3
