"""The torch process group of one generation: formed, used for small messages between hosts, and left.

The session holds one; :mod:`pollux.membership.replica` says who is in it and where they meet. On a GPU there are both
backends: NCCL for gradients and state, gloo for messages between hosts, which so never wait for the device. What NCCL
needs beside that is in :mod:`pollux.train.nccl`.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from pollux.errors import MembershipError, PeerLostError
from pollux.membership.store import Group
from pollux.train import gloo, nccl
from pollux.train.encoding import decode, encode
from pollux.train.leaving import EXIT_CODE

FORM_TIMEOUT_S = 4.0  # members are known to be there when they connect; one that dies in between costs this
END_TIMEOUT_S = 5.0
ABORT_TIMEOUT_S = 20.0  # more than the communicators that are being made take to give up
POLL_S = 0.2
MAX_MESSAGE_BYTES = 1 << 30  # of what replicas tell each other beside tensors: more than any order of a dataset takes

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class DeviceSumsOwner(Protocol):
    """The models of a run, as a group that is about to be aborted needs them."""

    def stop(self, reason: BaseException) -> None:
        """No optimizer uses a sum from now on. Asks the device which ones have ended, so it may wait for the driver."""

    def seal(self) -> None:
        """The abort begins: what has not answered by now counts as cut. Never waits."""


class BrokenGroup(PeerLostError):
    """A collective failed: a peer is gone, or has given this group up. Recoverable; never leaves the library."""


class Team:
    """At most one process group at a time: torch's default one, so that users' own collectives work in it."""

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        self.device = device
        self.timeout_s = timeout_s
        self.group: Group | None = None
        self._lost_before = (-1, 0)  # groups before this generation and attempt have lost a member
        self._telling = threading.Lock()  # guards it: the owner and torch's watchdog may tell at the same time
        self.is_adopted = False
        self.on_error: Callable[[int, int], None] = (
            self.give_up
        )  # from a thread, when a collective failed on the device
        self._ending: list[threading.Thread] = []
        self._sockets: gloo.Sockets = {}
        self._is_connected = False  # the device's communicator of this group was made
        self._lacks_room = False  # the last one could not be made for want of memory
        self._watching: threading.Event | None = None
        self._warming: threading.Thread | None = None

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank

    @property
    def size(self) -> int:
        return 1 if self.group is None else self.group.world_size

    @property
    def process_group(self) -> dist.ProcessGroup:
        group = dist.group.WORLD
        if group is None:
            raise MembershipError("there is no process group: it was destroyed by other code")
        return group

    def form(self, group: Group) -> None:
        """Connect to the others, leaving any group before.

        Raises BrokenGroup when they do not come, and torch.OutOfMemoryError where the device has no room for NCCL, also
        with torch's cache given back.
        """
        if self.is_cuda and group.world_size > 1 and not any(thread.is_alive() for thread in self._ending):
            nccl.make_room(self.device, always=self._lacks_room)
        self.dissolve()
        self.is_adopted = self._is_connected = False
        if self.is_cuda:
            nccl.prepare_environment()
        backend = "cpu:gloo,cuda:nccl" if self.is_cuda else "gloo"
        # Part of the store's keys, and not taken back when forming a group fails: after that, a survivor and a newcomer
        # would look for each other under different names.
        distributed_c10d._world.group_count = 0
        hook, others = sys.excepthook, gloo.open_sockets()
        self.group = group
        with _broken("forming the group"), ExitStack() as stack:
            if group.world_size == 1:
                store: Any = dist.HashStore()  # type: ignore[attr-defined]
            else:
                store = group.store
                size, timeout_s = group.world_size, FORM_TIMEOUT_S
                stack.enter_context(gloo.used(gloo.connect(store, group.rank, size, timeout_s, self.is_lost)))
                self._sockets = gloo.opened_since(others)
            dist.init_process_group(
                backend,
                store=store,
                rank=group.rank,
                world_size=group.world_size,
                timeout=timedelta(seconds=FORM_TIMEOUT_S),
            )
            sys.excepthook = hook  # torch puts another one around it for each group
            if self.is_lost():
                raise BrokenGroup("a member was lost before the group formed")
            if group.world_size > 1:
                self.share(None)
                if self.is_cuda:
                    self._connect_device()
                    self._watch_device(group)
            distributed_c10d._set_pg_timeout(timedelta(seconds=self.timeout_s))

    def _connect_device(self) -> None:
        try:
            nccl.connect(self.process_group, self.device, self.is_lost)
        except torch.OutOfMemoryError as error:
            if self._lacks_room:
                raise
            self._lacks_room = True
            raise BrokenGroup(str(error)) from error
        self._is_connected, self._lacks_room = True, False

    def release_memory(self) -> None:
        """Give torch's cache back to the device, unless the device waits for a lost peer: this would wait with it."""
        if self.is_cuda and self._comes_to_rest():
            torch.cuda.empty_cache()

    def adopt(self, group: Group) -> None:
        """Use the default group that the script has made itself, and leave it to the script."""
        self.group, self.is_adopted, self._is_connected = group, True, self.is_cuda

    def warm_up(self) -> None:
        """Begin to wake the device, for a group that is formed later."""
        if self.is_cuda:
            nccl.prepare_environment()
            self._warming = nccl.warm_up(self.device)

    def wait_warm(self) -> None:
        if self._warming is not None:
            self._warming.join(nccl.WARM_UP_TIMEOUT_S)
            self._warming = None

    def _watch_device(self, group: Group) -> None:
        place = group.generation, group.attempt + 1
        self._watching = nccl.watch(self.process_group, self.device, lambda: self.on_error(*place))

    def dissolve(self, *, is_broken: bool = False) -> None:
        """Leave the group and all that were made within it: peers that wait for this rank notice.

        The groups themselves end in the background. NCCL takes half a second for it, and where a peer is frozen a
        thread of gloo's waits for it until its time-out; neither is worth waiting for. A broken group is aborted, which
        ends what is under way on the device with wrong results.
        """
        is_broken = is_broken or self.is_lost()
        self.group = None
        if self._watching is not None:
            self._watching.set()
            self._watching = None
        if dist.group.WORLD is None:
            return
        sockets, self._sockets = self._sockets, {}
        if is_broken:
            gloo.shut_down(sockets)
        boxes = [[group] for group in distributed_c10d._world.pg_names]
        distributed_c10d._world.pg_names.clear()  # destroy_process_group would wait for their shutdown
        with suppress(RuntimeError, AssertionError):
            dist.destroy_process_group()
        self._ending = [thread for thread in self._ending if thread.is_alive()]
        while boxes:
            arguments = (boxes.pop(), self.device, is_broken)
            thread = threading.Thread(target=_end, args=arguments, name="pollux-end-of-group", daemon=True)
            thread.start()
            self._ending.append(thread)

    def cut_off(self) -> None:
        """End what a broken group has under way on the device, before anything of the group is freed.

        Survivors on an H200 hung while DDP's reducer was freed, with an abort under way. Freeing it waits for the
        device with Python's lock held; a sum that waits for a lost peer there ends by the abort only, and the abort for
        its part waits for torch's watchdog, which runs Python code. Waiting here lets go of the lock.

        A group that was lost while NCCL connected has no sums yet. Its abort may wait for the connection, for seconds.

        Where the abort does not end, this process does: it would hang for good, and the others can go on without it.
        """
        if not self._is_connected or self.size == 1 or dist.group.WORLD is None:
            return
        deadline = time.monotonic() + ABORT_TIMEOUT_S
        threads = nccl.abort(list(distributed_c10d._world.pg_names), self.device)
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        if any(thread.is_alive() for thread in threads):
            logger.error(
                "the broken group could not be ended within %g s: this process ends, with code %d",
                ABORT_TIMEOUT_S, EXIT_CODE,
            )  # fmt: skip
            os._exit(EXIT_CODE)

    def close(self) -> None:
        """Leave for good. The interpreter may end after this, so the groups are given a moment to end before.

        A script that raises may leave sums behind that wait for a lost peer. They are cut off, as the interpreter frees
        DDP's reducer, too.
        """
        if not self.is_adopted:
            is_stuck = not self._comes_to_rest()
            if is_stuck:
                self.cut_off()
            self.dissolve(is_broken=is_stuck)
        deadline = time.monotonic() + END_TIMEOUT_S
        for thread in self._ending:
            thread.join(max(deadline - time.monotonic(), 0.0))

    def give_up(self, generation: int, attempt: int = 0, sums: DeviceSumsOwner | None = None) -> None:
        """Groups before this one have lost a member: let all that waits for it go on with an error.

        May be called from several threads, and never waits. If this group is among them, ``sums`` are stopped before
        the device's collectives are aborted. The abort begins after a second although that may still run.
        """
        with self._telling:
            self._lost_before = max(self._lost_before, (generation, attempt))
        if self.is_lost():
            gloo.shut_down(self._sockets)
            if self.is_cuda:
                arguments = (self.group, list(distributed_c10d._world.pg_names), sums)
                threading.Thread(target=self._abort, args=arguments, name="pollux-give-up", daemon=True).start()
            else:
                self._stop(sums)

    def _stop(self, sums: DeviceSumsOwner | None) -> None:
        if sums is not None and self.is_lost():
            sums.stop(PeerLostError("a replica was lost"))

    def _abort(self, group: Group, groups: list[dist.ProcessGroup], sums: DeviceSumsOwner | None) -> None:
        nccl.call_briefly(lambda: self._stop(sums))
        if self.group is group:  # otherwise it is ended already
            if sums is not None:
                sums.seal()
            nccl.abort(groups, self.device)

    def _comes_to_rest(self) -> bool:
        """Whether the device ends its work in a moment."""
        if not self.is_cuda or self.size == 1 or not self._is_connected:
            return True
        try:
            nccl.wait_for_device(self.is_lost, END_TIMEOUT_S)
        except RuntimeError:
            return False
        return True

    def settle(self) -> None:
        """Wait until the device has ended its work. Raises BrokenGroup if a sum among it cannot be trusted."""
        if self.is_cuda and self.size > 1:
            with _broken("waiting for the device"):
                nccl.wait_for_device(self.is_lost, self.timeout_s)

    # --- messages between hosts ---------------------------------------------------------------------------------

    def gather(self, value: _T) -> list[_T]:
        """The values of all ranks, by rank. Raises BrokenGroup."""
        return [self.share(value, source) for source in range(self.size)]

    def share(self, value: _T, source: int = 0) -> _T:
        """``source``'s value, on every rank. Raises BrokenGroup."""
        if self.size == 1:
            return value
        data = bytearray(encode(value, "a message to the other replicas")) if self.rank == source else bytearray()
        size = torch.tensor([len(data)])
        self.broadcast(size, source)
        if self.rank != source:
            if not 0 < int(size) <= MAX_MESSAGE_BYTES:
                raise BrokenGroup(f"rank {source} announces a message of {int(size)} bytes")
            data = bytearray(int(size))
        self.broadcast(torch.frombuffer(data, dtype=torch.uint8), source)
        return value if self.rank == source else cast(_T, decode(data))

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """``source``'s values into the tensor of every rank. Raises BrokenGroup."""
        with _broken("a message to the others"):
            self.finish(dist.broadcast(tensor, src=source, async_op=True), tensor)

    def all_to_all(self, output: Tensor, data: Tensor, output_sizes: list[int], sizes: list[int]) -> None:
        """Send ``sizes[r]`` elements of ``data`` to each rank r, in order, and receive as many. Raises BrokenGroup."""
        if self.size == 1:
            output.copy_(data)
            return
        with _broken("moving shards"):
            self.finish(dist.all_to_all_single(output, data, output_sizes, sizes, async_op=True), output)

    def make_groups(self, members: list[list[int]]) -> dist.ProcessGroup:
        """Process groups of some ranks each; the one that this rank is in. Raises BrokenGroup."""
        with _broken("forming a group of some replicas"):
            others = gloo.open_sockets()
            groups = [dist.new_group(ranks, timeout=timedelta(seconds=FORM_TIMEOUT_S)) for ranks in members]
            self._sockets |= gloo.opened_since(others)
            for group in groups:
                if group != dist.GroupMember.NON_GROUP_MEMBER:
                    distributed_c10d._set_pg_timeout(timedelta(seconds=self.timeout_s), group)
        own: dist.ProcessGroup = next(one for one, ranks in zip(groups, members, strict=True) if self.rank in ranks)
        return own

    def finish(self, work: dist.Work | None, tensor: Tensor) -> None:
        """Wait for a collective on ``tensor``. Raises RuntimeError, or BrokenGroup when the owner names a lost peer."""
        assert work is not None
        if tensor.is_cuda:
            work.wait()  # for the stream alone; what never ends there is aborted
        else:
            self.wait(work)

    def wait(self, work: dist.Work) -> None:
        """Wait for a collective among hosts. Raises BrokenGroup, also when the owner names a lost peer: it may be
        frozen."""
        try:
            while not _has_ended(work):
                if self.is_lost():
                    raise BrokenGroup("a replica was lost while the others waited for it")
        except RuntimeError as error:
            if isinstance(error, BrokenGroup):
                raise
            raise BrokenGroup(f"the group broke: {error}") from error

    def start_sum(self, values: list[float]) -> Sum:
        """Begin to add ``values`` up over all ranks."""
        return Sum(self, values)

    def is_lost(self) -> bool:
        """Whether this group has lost a member."""
        group = self.group
        return group is not None and group.world_size > 1 and (group.generation, group.attempt) < self._lost_before


class Sum:
    """A small all-reduce among hosts, waited for later. With one replica it is done already."""

    def __init__(self, team: Team, values: list[float]) -> None:
        self._values, self._team = values, team
        self._work: dist.Work | RuntimeError | None = None
        if team.size > 1:
            self._sums = torch.tensor(values, dtype=torch.float64)
            try:
                self._work = dist.all_reduce(self._sums, async_op=True)
            except RuntimeError as error:
                self._work = error

    def wait(self) -> list[float]:
        """The sums. Raises BrokenGroup when a peer is lost, in the collective or by what the owner says."""
        work = self._work
        if work is None:
            return self._values
        if isinstance(work, RuntimeError):
            raise BrokenGroup(f"the group broke: {work}") from work
        self._team.wait(work)
        result: list[float] = self._sums.tolist()
        return result


def _has_ended(work: dist.Work) -> bool:
    """Waits in C++, which costs less than to be called back. Raises the collective's own error."""
    try:
        work.wait(timedelta(seconds=POLL_S))
    except RuntimeError:
        if not work.is_completed():
            return False  # not in this time
        work.wait()  # again: it may have ended just after the time was over
    return True


def is_broken_by(error: RuntimeError) -> bool:
    """Whether this error of a collective of the user's own means that the group is broken. gloo has no type for it."""
    return isinstance(error, dist.DistBackendError | dist.DistNetworkError) or "gloo" in str(error)


def lone_group() -> Group:
    """Of a replica that trains alone."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    return Group(generation=-1, attempt=0, rank=0, world_size=1, local_rank=0, num_nodes=1, store=store)


def let_go(error: BaseException | None) -> None:
    """Clear the frames that an error has gone through: some hold the group, which peers would still see open."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _end(box: list[dist.ProcessGroup], device: torch.device, is_broken: bool) -> None:
    """In a thread of its own: end the group in the box, which holds the last reference to it."""
    with suppress(RuntimeError, AttributeError):
        if device.type == "cuda":
            backend = box[0]._get_backend(device)
            # A kernel that waits for a lost peer never ends by itself, and everything on the device waits for it.
            backend.abort() if is_broken else backend.shutdown()
        else:
            box[0].shutdown()
    box.clear()


@contextmanager
def _broken(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch's DistBackendError, DistNetworkError and gloo's own are all RuntimeErrors
        if isinstance(error, PeerLostError | torch.OutOfMemoryError):
            raise
        raise BrokenGroup(f"{what} failed: {error}") from error
