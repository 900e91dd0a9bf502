"""K replicas of a function, each in a process of its own, as torchrun would start them; and small things to train.

Forked from multiprocessing's fork server, which has imported torch once and never ran it: a test's own process has
threads, which do not survive a fork. What the function returns comes back, by rank; what it raises fails the test,
traceback included. Warnings are errors there too. Replicas that do not end in time are killed.
"""

from __future__ import annotations

import copy
import os
import pickle
import shutil
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.utils.data import Dataset

from pollux import train
from pollux.errors import PolluxError
from pollux.membership.replica import StaticMembership
from pollux.train.run import Run
from tests.forked import fork_context

TIMEOUT_S = 60.0  # a bound for a hang on a busy machine, not an expectation
FOLDER = "POLLUX_TEST_FOLDER"


class ReplicaFailed(AssertionError):
    """A replica raised, or did not end in time."""


def replicas(
    num_replicas: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = TIMEOUT_S,
    killed: Sequence[int] = (),
) -> list[Any]:
    """What ``function(*args)`` returned on each of ``num_replicas`` replicas. It must be importable by name.

    ``killed`` are replicas that kill themselves; their value is None.
    """
    context = fork_context()
    processes, pipes = [], []
    folder = tempfile.mkdtemp(prefix="replicas-")
    for rank in range(num_replicas):
        ours, theirs = context.Pipe(duplex=False)
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(num_replicas),
            "LOCAL_WORLD_SIZE": str(num_replicas),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "1",
            FOLDER: folder,
        }
        process = context.Process(target=_replica, args=(theirs, environment, function, args), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    try:
        return _collect(pipes, time.monotonic() + timeout_s, killed)
    finally:
        for process, pipe in zip(processes, pipes, strict=True):
            pipe.close()
            process.join(1.0)
            if process.is_alive():
                process.kill()
            process.join()
            process.close()
        shutil.rmtree(folder)


def _collect(pipes: list[Connection], deadline: float, killed: Sequence[int]) -> list[Any]:
    values: dict[int, Any] = {}
    failures: dict[int, str] = {}
    open_pipes = {pipe: rank for rank, pipe in enumerate(pipes)}
    while open_pipes:
        ready = wait(list(open_pipes), timeout=max(deadline - time.monotonic(), 0.0))
        if not ready:
            failures |= {rank: "did not end in time" for rank in open_pipes.values()}
            break
        for pipe in ready:
            rank = open_pipes.pop(pipe)
            try:
                value, failure = pickle.loads(pipe.recv_bytes())
            except EOFError:
                value, failure = None, None if rank in killed else "ended without a word"
            if failure is None:
                values[rank] = value
            else:
                failures[rank] = failure
                deadline = min(deadline, time.monotonic() + 5.0)  # the others may be waiting for this one
    if failures:
        raise ReplicaFailed("\n".join(f"rank {rank}: {failures[rank]}" for rank in sorted(failures)))
    return [values[rank] for rank in range(len(pipes))]


def _replica(pipe: Connection, environment: dict[str, str], function: Callable[..., Any], args: Any) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    try:
        answer = function(*args), None
    except BaseException:
        answer = None, traceback.format_exc()
    pipe.send_bytes(pickle.dumps(answer))  # plain: torch would send tensors through shared memory
    pipe.close()


# --- inside a replica ----------------------------------------------------------------------------------------------


class FileMembership(StaticMembership):
    """torchrun's, but meeting in a file: a TCPStore may wait for a name server, which tests have no time for."""

    def _open(self, deadline: object) -> FileStore:
        return FileStore(f"{os.environ[FOLDER]}/run{self._generation}", self.world_size)


@contextmanager
def a_run(**options: Any) -> Iterator[Run]:
    """One of several runs of a process. Each has a number of its own, as after torchrun's restart."""
    number = os.environ.get("TORCHELASTIC_RESTART_COUNT", "-1")
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(int(number) + 1)
    options = {"membership": FileMembership(os.environ), "device": "cpu", "timeout_s": 20.0, **options}
    with train.init(**options) as run:
        yield run


def refusal(call: Callable[..., Any], *args: Any, **options: Any) -> str:
    """The message of the error that ``call`` raises."""
    try:
        call(*args, **options)
    except PolluxError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was refused")


class Rows(Dataset[Any]):
    """(index, input, target): the index says which examples were consumed."""

    def __init__(self, num_rows: int, width: int = 6, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(num_rows, width, generator=generator, dtype=torch.float64).to(dtype)
        weights = torch.randn(width, 1, generator=generator, dtype=torch.float64).to(dtype)
        self.targets = (self.inputs @ weights).tanh()

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        return index, self.inputs[index], self.targets[index]


def small_model(width: int = 6, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)


def twin(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    loss_of(model, x, y).backward()
    optimizer.step()
