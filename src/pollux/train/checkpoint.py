"""Writes and reads checkpoints that stay whole if the process is killed at any moment.

The run's checkpointer calls it; users may call it alone. Folders are in :mod:`pollux.train.checkpoint_files`, URLs in
:mod:`pollux.train.checkpoint_remote`. A state is flat: tensors by name, and one blob of bytes for everything small::

    directory = CheckpointDirectory("checkpoints/job-7")
    found = directory.load(signature)                       # the newest usable one, or None
    saver = AsyncSaver(directory)
    for step in steps:
        ...
        if is_due:
            saver.begin(tensors, blob, CheckpointInfo(step=step, epoch=epoch, signature=signature))
    saver.close()

A checkpoint is a folder ``step-<number>-<lineage>-<generation>`` with ``tensors.safetensors`` and a ``manifest.json``
that gives its size and digest. It is written under a hidden name and renamed when it is on the disk, so a folder of
that name is complete. Older ones are removed after that, so the disk must hold ``keep`` + 1 of them. In an object store
a checkpoint is complete when its manifest is there.

Checkpoints are ordered by lineage, then generation, then step. A writer asks right before it publishes whether it still
may (``may_publish``). If it freezes between the answer and the publishing, and goes on later, its checkpoint has an
older generation than those of its successors and is never preferred to theirs. If its successors have none yet, its
checkpoint is used. That is correct: every checkpoint is one consistent state of model, data position and random
numbers.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from pollux.errors import (
    CheckpointError,
    FencedError,
    ForeignCheckpointError,
    InvalidValueError,
    UnreadableCheckpointError,
)
from pollux.train import checkpoint_files as files
from pollux.train.checkpoint_remote import RemoteStorage, is_url
from pollux.train.checkpoint_shards import ENTRIES as SHARD_INDEX
from pollux.train.checkpoint_shards import ShardFiles, is_shard, open_shards
from pollux.train.shards import Cut

logger = logging.getLogger(__name__)

BLOB = "pollux/blob"  # the name the blob has among the tensors
# Once the main thread has ended, the device has this long to finish the copy. Longer delays the exit of a process whose
# device hangs; shorter may lose the last checkpoint of a large model.
_EXIT_GRACE_S = 10.0
_FIRST_POLL_S, _LONGEST_POLL_S = 0.0005, 0.01  # between two looks at a device event: short copies end in under 1 ms


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """Which state a checkpoint holds. ``extra`` is for people to read: any JSON value."""

    step: int  # committed optimizer steps
    epoch: int
    signature: str  # hash of the structure of model and optimizer
    generation: int = 0
    lineage: int = 0  # a number that rises each time training begins or resumes
    created_s: float = field(default_factory=time.time)  # since 1970
    extra: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("step", "epoch", "generation", "lineage"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise InvalidValueError(f"checkpoint {name} is {value!r}; it must be a whole number >= 0")
        try:
            extra = json.loads(json.dumps(dict(self.extra)))
        except (TypeError, ValueError) as error:
            raise InvalidValueError(f"the extra information of a checkpoint must be JSON values: {error}") from error
        object.__setattr__(self, "extra", extra)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """``name`` is its folder's. Shards of a sharded model are not read: see :mod:`pollux.train.checkpoint_shards`."""

    tensors: dict[str, Tensor]
    blob: bytes
    info: CheckpointInfo
    name: str = field(default="", compare=False)


class CheckpointDirectory:
    """The newest ``keep`` checkpoints of one job, in one folder or under one URL.

    Saving the same step again gives ``step-<number>-....1``, which counts as newer, and removes the one before: a
    folder cannot be replaced atomically, and there must be a checkpoint at every moment.
    Checkpoints of another model are neither counted nor removed. Damaged ones are not counted, and are removed when
    ``keep`` newer usable ones exist.

    ``may_publish`` is called right before a checkpoint is published; it may take a while.
    """

    def __init__(
        self, path: str | os.PathLike[str], keep: int = 2, may_publish: Callable[[], bool] = lambda: True
    ) -> None:
        if keep < 1:
            raise InvalidValueError(f"keep is {keep}; at least 1 checkpoint must be kept")
        self._storage: files.Storage
        self._storage = RemoteStorage(os.fspath(path)) if is_url(path) else files.LocalStorage(Path(path))
        self.path = self._storage.root
        self.keep = keep
        self._may_publish = may_publish

    def save(
        self,
        tensors: Mapping[str, Tensor],
        blob: bytes,
        info: CheckpointInfo,
        draft: Path | None = None,
        shards: Mapping[str, files.FileRecord] | None = None,
    ) -> None:
        """Write a checkpoint and wait until it is on the disk. ``shards`` are files in ``draft`` already.

        Raises :class:`CheckpointError` if the write fails, :class:`FencedError` if ``may_publish`` says no. The earlier
        checkpoints are then unchanged.
        """
        _require_plain(tensors)
        state = {name: tensor.detach().resolve_conj().resolve_neg() for name, tensor in tensors.items()}
        # A copy: torch needs writable memory, and bytes are read-only.
        state[BLOB] = (
            torch.frombuffer(bytearray(blob), dtype=torch.uint8) if blob else torch.empty(0, dtype=torch.uint8)
        )
        try:
            final = self._write(state, info, draft, shards)
        except FencedError:
            raise
        except (OSError, RuntimeError) as error:
            raise CheckpointError(
                f"{self.path}: the checkpoint of step {info.step} could not be written: {error}. Make room, check the "
                "permissions or choose another directory; the checkpoints already there are unchanged"
            ) from error
        self._remove_older(final, info)
        logger.info("%s/%s: saved step %d", self.path, final, info.step)

    def load(
        self, signature: str, device: str | torch.device = "cpu", *, but: Collection[str] = ()
    ) -> Checkpoint | None:
        """The newest checkpoint that is complete and of this model, or None if there are no checkpoints.

        ``but`` names checkpoints to pass over. Raises :class:`ForeignCheckpointError` or
        :class:`UnreadableCheckpointError` if there are some but none is usable.
        """
        refused = {name: CheckpointError("a replica cannot read its shard") for name in but}
        # Listed anew each time: a writer elsewhere may have removed what was listed, and added a newer one.
        while untried := [name for name in self._names() if name not in refused]:
            try:
                return self._read(untried[0], signature, torch.device(device))
            except CheckpointError as error:
                refused[untried[0]] = error
                if untried[0] in self._names():
                    logger.error(
                        "%s/%s: cannot use this checkpoint: %s. Trying the one before.", self.path, untried[0], error
                    )
        present = self._names()
        reasons = {name: error for name, error in refused.items() if name in present}
        if not reasons:
            return None
        is_foreign = any(isinstance(error, ForeignCheckpointError) for error in reasons.values())
        kind = ForeignCheckpointError if is_foreign else UnreadableCheckpointError
        listed = "; ".join(f"{name}: {error}" for name, error in reasons.items())
        raise kind(
            f"{self.path}: none of the {len(reasons)} checkpoints there can be used ({listed}). "
            "Choose another directory, or remove them to start from the beginning"
        )

    def latest(self) -> CheckpointInfo | None:
        """The information of the newest checkpoint of any model, without reading its tensors."""
        return next(iter(self.list_all()), None)

    def list_all(self) -> tuple[CheckpointInfo, ...]:
        """All checkpoints, newest first, for people to read. Tensors are not read, so damage in them is not noticed."""
        found = []
        for name in self._names():
            try:
                found.append(self._read_info(name)[0])
            except CheckpointError as error:
                logger.warning("%s/%s: cannot use this checkpoint: %s", self.path, name, error)
        return tuple(found)

    def next_lineage(self) -> int:
        """The lineage for training that begins or resumes now: higher than any here.

        At least the seconds since 1970: a frozen predecessor with no checkpoint yet may still publish one later.
        """
        newest = max((_order(name)[0] for name in self._names()), default=0)
        return max(newest + 1, int(time.time()))

    def _names(self) -> list[str]:
        """The checkpoints, newest first."""
        try:
            names = self._storage.names()
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot look for checkpoints: {error}") from error
        return sorted((name for name in names if _order(name)), key=_order, reverse=True)

    def _read_info(self, name: str) -> tuple[CheckpointInfo, files.Manifest]:
        manifest = self._storage.read_manifest(name)
        try:
            return CheckpointInfo(**manifest.info), manifest
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"its {files.MANIFEST} does not describe a checkpoint: {error}") from error

    def _read(self, name: str, signature: str, device: torch.device) -> Checkpoint:
        info, manifest = self._read_info(name)
        if info.signature != signature:
            raise ForeignCheckpointError(
                f"it belongs to another model or optimizer (signature {info.signature!r} instead of {signature!r})"
            )
        with self._storage.fetch(name, manifest) as folder:
            # Shards are checked by the replicas that read them.
            files.check_digests(folder, manifest, [one for one in manifest.records if not is_shard(one)])
            state = files.read_tensors(folder, device)
        if BLOB not in state:
            raise CheckpointError(f"it holds no {BLOB}")
        return Checkpoint(blob=state.pop(BLOB).cpu().numpy().tobytes(), tensors=state, info=info, name=name)

    # --- sharded models: all replicas write and read ------------------------------------------------------------

    @property
    def is_folder(self) -> bool:
        return isinstance(self._storage, files.LocalStorage)

    def begin_shared(self) -> Path:
        """A draft that all replicas write their shards to, before :meth:`save` is given it. Raises CheckpointError."""
        try:
            return self._storage.make_draft()
        except OSError as error:
            raise CheckpointError(f"{self.path}: no draft of a checkpoint could be made: {error}") from error

    def folder(self, name: str) -> Path:
        return Path(self.path) / name

    def open_shards(self, name: str, cut: Cut) -> ShardFiles:
        """The shards of a checkpoint, checked as far as ``cut`` needs them. Raises CheckpointError."""
        manifest = self._read_info(name)[1]
        index = files.read_tensors(self.folder(name), torch.device("cpu")).get(SHARD_INDEX)
        if index is None:
            raise CheckpointError(f"it holds no {SHARD_INDEX}")
        return open_shards(self.folder(name), index, manifest.records, cut)

    def _write(
        self,
        state: Mapping[str, Tensor],
        info: CheckpointInfo,
        draft: Path | None,
        shards: Mapping[str, files.FileRecord] | None,
    ) -> str:
        storage, brought = self._storage, None
        draft = draft or storage.make_draft()
        try:
            files.write_tensors(state, draft)
            files.seal(draft, asdict(info), shards)
            like = (info.lineage, info.generation, info.step)
            repetition = 1 + max((_order(name)[3] for name in self._names() if _order(name)[:3] == like), default=-1)
            while True:
                name = _name(info, repetition)
                if storage.bring(draft, name):
                    brought = name
                    if not self._may_publish():
                        raise FencedError(
                            f"{self.path}: the checkpoint of step {info.step} is not published: this replica was "
                            "replaced, and the job trains on without it"
                        )
                    if storage.publish(draft, name):
                        break
                    brought = None  # another writer has taken the name
                repetition += 1
        except BaseException:
            storage.discard(draft, brought)
            raise
        storage.discard(draft, None)  # only a rename has moved it; an upload leaves it
        return name

    def _remove_older(self, saved: str, info: CheckpointInfo) -> None:
        num_kept = 1
        try:
            names = self._names()
        except CheckpointError as error:  # the new checkpoint itself is saved
            logger.warning("%s: older checkpoints stay for now: %s", self.path, error)
            return
        for name in names:
            if _order(name) >= _order(saved):
                continue  # left by an earlier run that had gone further; removed when training has passed it
            try:
                other = self._read_info(name)[0]
            except ForeignCheckpointError:
                continue
            except CheckpointError:
                if num_kept < self.keep:
                    continue
            else:
                if other.signature != info.signature:
                    continue
                if other.step != info.step and num_kept < self.keep:
                    num_kept += 1
                    continue
            self._storage.remove(name)


class AsyncSaver:
    """Writes checkpoints in the background. One thread calls it.

    Each write has its own thread, which is not a daemon: a program that ends waits for the write under way, without
    atexit. A daemon would be stopped in the middle, losing the last checkpoint, and torch may abort a process whose
    threads are stopped inside it. If the device never finishes (a collective that hangs), the write is given up 10 s
    after the main thread's end.

    The host copies stay allocated between saves. The first :meth:`begin` takes longer than the next: it allocates them,
    and CUDA waits for the device whenever it pins memory.
    """

    def __init__(self, directory: CheckpointDirectory) -> None:
        self.last_stall_s: float | None = None  # how long the last begin() kept its caller
        self.last_write_s: float | None = None  # how long the last write took, in its thread
        self._directory = directory
        self._buffers: dict[tuple[str, bool], Tensor] = {}  # by name, and whether pinned
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._is_closed = False

    @property
    def is_busy(self) -> bool:
        """A write is under way."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, tensors: Mapping[str, Tensor], blob: bytes, info: CheckpointInfo) -> bool:
        """Copy the state and write it in the background. False, with nothing done, while a write is under way.

        The caller may change the tensors at once: device tensors are copied in the order of the current stream, without
        waiting for it. Raises the error of the previous write, if it was not raised yet.
        """
        if self._is_closed:
            raise CheckpointError("this saver is closed; make another one to save more checkpoints")
        if self.is_busy:
            return False
        self._raise_error()
        started = time.perf_counter()
        _require_plain(tensors)
        staged, copied = self._stage(tensors)
        self._thread = threading.Thread(
            target=self._write,
            args=(staged, copied, bytes(blob), info),
            name=f"checkpoint-step-{info.step}",
            daemon=False,
        )
        self._thread.start()
        self.last_stall_s = time.perf_counter() - started
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the write under way, and raise its error.

        Raises :class:`CheckpointError` if it takes longer than ``timeout_s``; the write goes on.
        """
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise CheckpointError(
                    f"{self._directory.path}: a checkpoint is still being written after {timeout_s} s; wait longer, or "
                    "check whether the disk or the device hangs"
                )
        self._raise_error()

    def close(self, timeout_s: float | None = None) -> None:
        """:meth:`wait`, and refuse further saves. May be called again."""
        self._is_closed = True
        self._buffers = {}
        self.wait(timeout_s)

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    @torch.no_grad()
    def _stage(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[torch.cuda.Event]]:
        """Host copies of the tensors, and the events after which the copies are complete."""
        staged: dict[str, Tensor] = {}
        buffers: dict[tuple[str, bool], Tensor] = {}
        copies: dict[tuple[object, ...], Tensor] = {}  # one copy of tensors that share memory
        for name, tensor in tensors.items():
            view = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            identity = (*view, tensor.is_conj(), tensor.is_neg())
            if identity not in copies:
                key = (name, tensor.is_cuda)
                buffer = self._buffers.get(key)
                if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
                    buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                buffer.copy_(tensor, non_blocking=tensor.is_cuda)
                buffers[key] = copies[identity] = buffer
            staged[name] = copies[identity]
        self._buffers = buffers
        events = []
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            events.append(event)
        return staged, events

    def _write(
        self, staged: Mapping[str, Tensor], copied: list[torch.cuda.Event], blob: bytes, info: CheckpointInfo
    ) -> None:
        started = time.perf_counter()
        try:
            for event in copied:
                _wait_for(event)
            self._directory.save(staged, blob, info)
        except BaseException as error:
            # Logged too: the loop may end without another call that would raise it.
            logger.error("%s: saving step %d failed: %s", self._directory.path, info.step, error)
            self._error = error
        finally:
            self.last_write_s = time.perf_counter() - started


def checkpoint_interval_s(
    cost_s: float, mean_time_between_failures_s: float, *, shortest_s: float = 30.0, longest_s: float = 3600.0
) -> float:
    """Seconds between two checkpoints for which writing and repeated work cost the least time together.

    Young's √(2δM) with the higher-order terms of J. T. Daly (2006), "A higher order estimate of the optimum checkpoint
    interval for restart dumps", equation 37. δ is the training time that a checkpoint costs, M the mean time between
    failures (may be infinity), both in seconds. The result is kept within ``shortest_s`` and ``longest_s``.
    """
    delta, mtbf = cost_s, mean_time_between_failures_s
    if not (delta >= 0 and math.isfinite(delta)):
        raise InvalidValueError(f"the cost of a checkpoint is {delta} s; it must be a number >= 0")
    if not mtbf > 0:
        raise InvalidValueError(f"the mean time between failures is {mtbf} s; it must be > 0")
    if not 0 < shortest_s <= longest_s:
        raise InvalidValueError(f"the interval's bounds are {shortest_s} and {longest_s} s; 0 < shortest <= longest")
    if delta == 0:
        interval = 0.0
    elif delta < 2 * mtbf:
        ratio = delta / (2 * mtbf)
        interval = math.sqrt(2 * delta * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - delta
    else:
        interval = mtbf
    return min(max(interval, shortest_s), longest_s)


def _name(info: CheckpointInfo, repetition: int) -> str:
    origin = f"-{info.lineage}-{info.generation}" if info.lineage or info.generation else ""
    return f"step-{info.step:012d}{origin}" + (f".{repetition}" if repetition else "")


def _order(name: str) -> tuple[int, ...]:
    """Lineage, generation, step and repetition of a checkpoint's folder; empty for any other name."""
    match = files.CHECKPOINT.fullmatch(name)
    if match is None:
        return ()
    step, lineage, generation, repetition = (int(part or 0) for part in match.groups())
    return (lineage, generation, step, repetition)


def _require_plain(tensors: Mapping[str, Tensor]) -> None:
    """Refuse sharded, sparse and meta tensors, which could not be written or restored in full."""
    for name, tensor in tensors.items():
        if name == BLOB:
            raise InvalidValueError(f"a tensor is called {BLOB!r}, which is the blob's own name; choose another")
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            raise InvalidValueError(f"{name!r} is a {type(tensor).__name__}; a checkpoint holds plain tensors only")
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
            raise InvalidValueError(
                f"{name!r} is a tensor of layout {tensor.layout}, type {tensor.dtype}, on {tensor.device}; "
                "a checkpoint holds dense, unquantized tensors with data only"
            )


def _wait_for(event: torch.cuda.Event) -> None:
    """Wait until the device has passed an event. Polls, so that it notices the end of the program."""
    pause_s, give_up_s = _FIRST_POLL_S, math.inf
    # A thread starts on device 0, where a query would create a context that takes memory.
    with torch.cuda.device(event.device):
        while not event.query():  # type: ignore[no-untyped-call]
            now = time.monotonic()
            if give_up_s == math.inf and not threading.main_thread().is_alive():
                give_up_s = now + _EXIT_GRACE_S
            if now > give_up_s:
                raise CheckpointError("the program ended, and the device did not finish copying the state in time")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)
