"""Checkpoints: training state on disk that a kill at any moment leaves whole, and how often to write one.

Stands in ``train``; imports torch, the errors and :mod:`pollux.train.checkpoint_files`, which holds the file
operations. State is flat: tensors by name, and one opaque blob of bytes for everything small::

    directory = CheckpointDirectory("checkpoints/job-7")
    found = directory.load(signature)                       # the newest good one, or None
    saver = AsyncSaver(directory)
    for step in steps:
        ...
        if is_due:
            saver.begin(tensors, blob, CheckpointInfo(step=step, epoch=epoch, signature=signature))
    saver.close()

A checkpoint is a folder ``step-<number>`` with what torch.distributed.checkpoint writes and a ``manifest.json`` that
gives every file's size and digest. It is written under a hidden name and renamed when it is on the disk, so a folder of
that name is complete; only then are older ones removed. The disk must hold ``keep`` + 1 of them.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pollux.errors import CheckpointError, ForeignCheckpointError, InvalidValueError
from pollux.train import checkpoint_files as files

logger = logging.getLogger(__name__)

BLOB = "pollux/blob"  # the name the blob has among the tensors
_EXIT_GRACE_S = 10.0  # for the device to finish the copy once the program is over


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """What a checkpoint is of. ``extra`` is for people to read: anything JSON can hold, kept as JSON returns it."""

    step: int  # committed optimizer steps
    epoch: int
    signature: str  # hash of the structure of model and optimizer
    generation: int = 0
    created_s: float = field(default_factory=time.time)  # since 1970
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("step", "epoch", "generation"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise InvalidValueError(f"checkpoint {name} is {value!r}; it must be a whole number >= 0")
        try:
            extra = json.loads(json.dumps(dict(self.extra)))
        except (TypeError, ValueError) as error:
            raise InvalidValueError(f"the extra information of a checkpoint must be JSON: {error}") from error
        object.__setattr__(self, "extra", extra)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    tensors: dict[str, Tensor]
    blob: bytes
    info: CheckpointInfo


class CheckpointDirectory:
    """The checkpoints of one job in one folder, newest ``keep`` of them.

    Saving the same step again gives ``step-<number>.1``, which counts as newer, and removes its predecessor: a folder
    cannot be replaced by another in one indivisible step, and nothing must be missing in between.
    Checkpoints of another model are neither counted nor removed. Damaged ones are not counted, and are removed when
    ``keep`` newer good ones exist.
    """

    def __init__(self, path: str | os.PathLike[str], keep: int = 2) -> None:
        if keep < 1:
            raise InvalidValueError(f"keep is {keep}; at least 1 checkpoint must be kept")
        self.path = Path(path)
        self.keep = keep

    def save(self, tensors: Mapping[str, Tensor], blob: bytes, info: CheckpointInfo) -> None:
        """Write a checkpoint and wait until it is on the disk.

        Raises :class:`CheckpointError` if the disk refuses; the earlier checkpoints are untouched then.
        """
        _require_plain(tensors)
        state = {name: tensor.detach().resolve_conj().resolve_neg() for name, tensor in tensors.items()}
        # A copy: torch wants memory it may write to, which bytes are not.
        state[BLOB] = (
            torch.frombuffer(bytearray(blob), dtype=torch.uint8) if blob else torch.empty(0, dtype=torch.uint8)
        )
        try:
            final = self._write(state, info)
        except (OSError, RuntimeError) as error:
            raise CheckpointError(
                f"{self.path}: the checkpoint of step {info.step} could not be written: {error}. Make room, check the "
                "permissions or choose another directory; the checkpoints already there are unchanged"
            ) from error
        self._remove_older(final, info)
        logger.info("%s: saved step %d", final, info.step)

    def load(self, signature: str, device: str | torch.device = "cpu") -> Checkpoint | None:
        """The newest checkpoint that is whole and of this model, or None where there are none at all.

        Raises :class:`ForeignCheckpointError` or :class:`CheckpointError` if there are some and none can be used.
        """
        refused: dict[Path, CheckpointError] = {}
        # Listed anew each time: a writer elsewhere may have removed what was listed, and added a newer one.
        while untried := [folder for folder in self._folders() if folder not in refused]:
            try:
                return _read(untried[0], signature, torch.device(device))
            except CheckpointError as error:
                refused[untried[0]] = error
                if untried[0] in self._folders():
                    logger.error("%s: cannot use this checkpoint: %s. Trying the one before.", untried[0], error)
        present = self._folders()
        reasons = {folder: error for folder, error in refused.items() if folder in present}
        if not reasons:
            return None
        kind = CheckpointError
        if any(isinstance(error, ForeignCheckpointError) for error in reasons.values()):
            kind = ForeignCheckpointError
        listed = "; ".join(f"{folder.name}: {error}" for folder, error in reasons.items())
        raise kind(
            f"{self.path}: none of the {len(reasons)} checkpoints there can be used ({listed}). "
            "Choose another directory, or remove them to start from the beginning"
        )

    def latest(self) -> CheckpointInfo | None:
        """What the newest checkpoint is of, whichever model's, without reading its tensors."""
        return next(iter(self.list_all()), None)

    def list_all(self) -> tuple[CheckpointInfo, ...]:
        """What there is, newest first, for people to see. Damage that only reading can show goes unseen."""
        found = []
        for folder in self._folders():
            try:
                found.append(_read_info(folder)[0])
            except CheckpointError as error:
                logger.warning("%s: cannot use this checkpoint: %s", folder, error)
        return tuple(found)

    def _folders(self) -> list[Path]:
        """The checkpoints by name, newest first."""
        try:
            names = files.list_names(self.path)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot look for checkpoints: {error}") from error
        return sorted((self.path / name for name in names if _order(name)), key=lambda path: _order(path.name))[::-1]

    def _write(self, state: Mapping[str, Tensor], info: CheckpointInfo) -> Path:
        files.make_root(self.path)
        files.remove_stale(self.path)  # first, for their room may be needed
        temporary = files.make_temporary(self.path)
        try:
            files.write_tensors(state, temporary)
            files.seal(temporary, asdict(info))
            same_step = [_order(path.name) for path in self._folders() if _order(path.name)[0] == info.step]
            repetition = max(same_step)[1] + 1 if same_step else 0
            while not files.publish(temporary, final := self.path / _name(info.step, repetition)):
                repetition += 1
        except BaseException:
            files.remove_temporary(temporary)
            raise
        return final

    def _remove_older(self, saved: Path, info: CheckpointInfo) -> None:
        num_kept = 1
        for folder in self._folders():
            if _order(folder.name) >= _order(saved.name):
                continue  # a newer one is what an interrupted past left; it goes when training has overtaken it
            try:
                other = _read_info(folder)[0]
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
            files.remove(folder)


class AsyncSaver:
    """Writes checkpoints behind the training loop's back. One thread calls it.

    Each write has a thread of its own that ends with it and is no daemon: a program that ends waits for the write under
    way and for nothing else, without atexit. A daemon would be stopped in the middle, losing the last checkpoint,
    and torch may abort a process whose threads are stopped inside it. If the device never finishes (a collective that
    hangs), the write is given up 10 s after the main thread's end.

    The copies stay allocated from save to save. The first :meth:`begin` therefore takes longer than the next, and waits
    for the device, as CUDA does whenever it pins memory.
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
        """Copy the state and have it written. False, and nothing done, while the previous one is being written.

        The caller may change the tensors at once: device tensors are copied in the order of the current stream, and
        nobody waits for that here. Raises the error of the previous write, if nobody has seen it.
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
        """Until the write under way is over; its error is raised here.

        Raises :class:`CheckpointError` as well if it is not over after ``timeout_s``; the write goes on.
        """
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise CheckpointError(
                    f"{self._directory.path}: a checkpoint is still being written after {timeout_s} s; wait longer, or "
                    "look whether the disk or the device hangs"
                )
        self._raise_error()

    def close(self, timeout_s: float | None = None) -> None:
        """Like :meth:`wait`, and nothing can be saved afterwards. May be called again."""
        self._is_closed = True
        self._buffers = {}
        self.wait(timeout_s)

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    @torch.no_grad()
    def _stage(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[torch.cuda.Event]]:
        """Copies on the host, and the events after which they hold what they should."""
        staged: dict[str, Tensor] = {}
        buffers: dict[tuple[str, bool], Tensor] = {}
        copies: dict[tuple[Any, ...], Tensor] = {}
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
            # Logged too: if the loop ends without another call, this is the only trace.
            logger.error("%s: saving step %d failed: %s", self._directory.path, info.step, error)
            self._error = error
        finally:
            self.last_write_s = time.perf_counter() - started


def checkpoint_interval_s(
    cost_s: float, mean_time_between_failures_s: float, *, shortest_s: float = 30.0, longest_s: float = 3600.0
) -> float:
    """Seconds of training between two checkpoints that lose the least time to writing and to repeated work.

    Young's √(2δM) with the higher-order terms of J. T. Daly (2006), "A higher order estimate of the optimum checkpoint
    interval for restart dumps", equation 37. δ is what a checkpoint costs the training, M the mean time between
    failures (infinity if there are none), both in seconds. The result lies within the bounds given.
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


def _name(step: int, repetition: int) -> str:
    return f"step-{step:012d}" + (f".{repetition}" if repetition else "")


def _order(name: str) -> tuple[int, ...]:
    """Step and repetition of a checkpoint's folder; empty for any other name."""
    match = re.fullmatch(r"step-([0-9]+)(?:\.([0-9]+))?", name)
    return (int(match[1]), int(match[2] or 0)) if match else ()


def _read_info(folder: Path) -> tuple[CheckpointInfo, files.Manifest]:
    manifest = files.read_manifest(folder)
    try:
        return CheckpointInfo(**manifest.info), manifest
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"its {files.MANIFEST} does not describe a checkpoint: {error}") from error


def _read(folder: Path, signature: str, device: torch.device) -> Checkpoint:
    info, manifest = _read_info(folder)
    if info.signature != signature:
        raise ForeignCheckpointError(
            f"it is of another model or optimizer (signature {info.signature!r} instead of {signature!r})"
        )
    files.check_digests(folder, manifest)
    state = files.read_tensors(folder, device)
    if BLOB not in state:
        raise CheckpointError(f"it holds no {BLOB}")
    return Checkpoint(blob=state.pop(BLOB).cpu().numpy().tobytes(), tensors=state, info=info)


def _require_plain(tensors: Mapping[str, Tensor]) -> None:
    """Sharded, sparse and abstract tensors would be written in part or not come back: better to say so now."""
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
    """Until the device has passed an event. Asks instead of blocking, so that the end of the program is noticed."""
    pause_s, give_up_s = 0.0005, math.inf
    # A thread starts on device 0, where asking would set up a context that takes memory.
    with torch.cuda.device(event.device):
        while not event.query():  # type: ignore[no-untyped-call]
            now = time.monotonic()
            if give_up_s == math.inf and not threading.main_thread().is_alive():
                give_up_s = now + _EXIT_GRACE_S
            if now > give_up_s:
                raise CheckpointError("the program ended, and the device has not finished copying the state")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.01)
