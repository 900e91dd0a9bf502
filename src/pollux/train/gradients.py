"""DDP's communication hook: accumulates over passes, averages over replicas, and measures on the way.

Stands in ``train``, above :mod:`pollux.train.noise`. DDP hands every pass's gradient to :meth:`GradientHook.reduce`
bucket by bucket, as flat buffers. What happens there:

- *A pass that is not the step's last*: its gradient is added, weighed, to an accumulation buffer of the same size and
  the bucket is zeroed. So what users do to ``.grad`` in between (clipping, unscaling, zeroing) touches nothing that
  counts, and each pass's own gradient is at hand without taking differences.
- *The last pass*: the accumulated gradient joins in and the sum over replicas follows. Weights are n/N, the pass's
  examples over the whole step's, so the sum is the mean gradient over all examples of the step, however unequal
  the shares are.
- *A measured step*: squared norms of each pass's gradient and of the final mean, for Adam and its like over √v̂+ε.
  One replica with one pass has nothing to compare with: the gradient is kept, and compared with the next step's.

Nothing here waits for the device. A collective that fails (a peer is gone) does not raise inside the user's
``backward()``, where nobody could catch it: the failure is noted, the backward pass ends with worthless
gradients, and whoever owns the hook looks at :attr:`failure` before using them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from pollux.train.noise import WARM_UP_STEPS, Preconditioner, squared_norm, weighed

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

BucketKey = tuple[int, ...]  # identities of its parameters, in order
Layout = tuple[torch.Size, tuple[int, ...], int]  # size, strides and offset of a gradient in its bucket
Groups = list[tuple[Mapping[str, Any], list[Tensor]]]


@dataclass(frozen=True, slots=True)
class PassPlan:
    """What to do with the gradient of the pass that begins."""

    weight: float  # n/N: own examples of this pass over all examples of the step
    is_first: bool = True
    is_last: bool = True
    measures: bool = False


@dataclass(frozen=True, slots=True)
class Norms:
    """What a measured step leaves behind, as 0-d tensors on the device, still to be read."""

    sum_sqr: Tensor  # Σ|g_i|² over this replica's passes
    sqr_mean: Tensor  # |ḡ|² of the mean over everything
    is_pair: bool  # this step and the one before stand for two passes
    host_s: float  # what measuring took here
    marks: tuple[tuple[torch.cuda.Event, torch.cuda.Event], ...]  # and on the device, from and to


@dataclass(slots=True)
class _Measurement:
    own: list[Tensor] = field(default_factory=list)  # by pass and bucket
    mean: list[Tensor] = field(default_factory=list)  # by bucket
    is_pair: bool = False
    is_void: bool = False  # nothing to compare with, or the optimizer has no state to divide by, yet


@dataclass(frozen=True, slots=True)
class _Views:
    """A bucket's gradients one by one, ordered by the optimizer's parameter groups."""

    groups: Groups
    gradients: list[Tensor]


class GradientHook:
    """One per run. ``begin_pass`` before each forward pass; ``reduce`` is what DDP calls; ``take_norms`` after a step.

    ``on_ready`` is called when a pass's own gradient is complete (the last bucket has arrived), ``on_last`` when that
    of the step's last pass is: other collectives of the step belong there, so that all ranks have the same order.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        loss_scale: Callable[[], Tensor | float] = lambda: 1.0,
        beta_exponent: Callable[[], float] = lambda: 1.0,
        on_ready: Callable[[], None] = lambda: None,
        on_last: Callable[[], None] = lambda: None,
        keeps_views: bool = False,
    ) -> None:
        self._optimizer = optimizer
        self._preconditioner = Preconditioner.for_optimizer(optimizer)
        self.warm_up_steps = 0 if self._preconditioner is None else WARM_UP_STEPS
        self._loss_scale, self._on_ready, self._on_last = loss_scale, on_ready, on_last
        self._beta_exponent = beta_exponent
        self._keeps_views = keeps_views
        self.views: dict[int, Tensor] = {}  # by parameter's identity, the step's gradient in its bucket
        self._plan: PassPlan | None = None
        self._accumulated: dict[BucketKey, Tensor] = {}
        self._pieces: dict[int, Tensor] = {}  # the same by parameter, while buckets are being laid out anew
        self._previous: dict[BucketKey, Tensor] = {}
        self._previous_scale: Tensor | float = 1.0
        self._expects_pair = False
        self._measurement: _Measurement | None = None
        self._groups: dict[BucketKey, list[tuple[Mapping[str, Any], list[tuple[Tensor, int]]]]] = {}
        self._layouts: dict[BucketKey, list[Layout]] = {}
        self._pending: list[tuple[torch.futures.Future[Tensor], Tensor]] = []
        self._lock = threading.Lock()  # collectives end, and are given up, in other threads
        self._is_abandoned = False
        self.failure: BaseException | None = None
        self.misuse: str | None = None  # what the user's loop does that cannot give the right gradient
        self._arrived: set[int] = set()  # buckets of the pass
        self.reductions: list[torch.cuda.Event] = []  # of steps whose sums the device may not have made yet
        self._host_s = 0.0
        self._marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    # --- the step, pass by pass --------------------------------------------------------------------------------

    def begin_pass(self, plan: PassPlan) -> None:
        self._plan = plan
        self._arrived.clear()
        if plan.is_first:
            self._accumulated.clear()
            self._pieces.clear()
            self._host_s = 0.0
            self._marks.clear()
            self._measurement = _Measurement() if plan.measures else None
            if not (plan.measures and plan.is_last):
                self._previous.clear()  # pairs are of successive steps
            self._expects_pair = bool(self._previous)

    def take_norms(self) -> Norms | None:
        """The measurement of the step that has just ended; None if it was not measured, or says nothing."""
        measurement, self._measurement = self._measurement, None
        self._plan = None  # the step's weights end with it
        if self._expects_pair:
            self._previous.clear()  # compared with; or of buckets that have been laid out anew since
        if measurement is None or measurement.is_void or not measurement.mean:
            return None
        return Norms(
            torch.stack(measurement.own or [torch.zeros_like(measurement.mean[0])]).sum(),
            torch.stack(measurement.mean).sum(),
            measurement.is_pair,
            self._host_s,
            tuple(self._marks),
        )

    @property
    def holds_previous(self) -> bool:
        """The last step's gradient is kept: measuring the next one gives a pair."""
        return bool(self._previous)

    @property
    def has_arrived(self) -> bool:
        """Some gradient of the pass under way, or of the last one, has come here."""
        return bool(self._arrived)

    def forget_previous(self) -> None:
        """The next step is no second one to the last: its batch is another."""
        self._previous.clear()

    def reset(self) -> None:
        """Forget the step under way and everything tied to the present buckets; a new group follows."""
        self._plan, self._measurement, self.failure = None, None, None
        self._accumulated.clear()
        self._pieces.clear()
        self._previous.clear()
        self._groups.clear()
        self._layouts.clear()
        with self._lock:
            self._pending.clear()
            self._is_abandoned = False

    def abandon(self, reason: BaseException) -> None:
        """Let every collective that is being waited for end now, as failed. May be called from another thread."""
        with self._lock:
            self._is_abandoned = True
            self.failure = self.failure or reason
            pending, self._pending = self._pending, []
        for outcome, buffer in pending:
            outcome.set_result(buffer)

    # --- what DDP calls ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def reduce(self, group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        plan, buffer = self._plan, bucket.buffer()
        is_last_bucket = bucket.is_last()
        if plan is None:  # a backward pass outside the loader's iteration: plain averaging
            plan = PassPlan(weight=1.0 / group.size())
        if bucket.index() in self._arrived and plan.is_last and not plan.is_first:
            self.misuse = (
                "backward() was called twice for one batch of a step that accumulates several: "
                "add the losses up and call it once"
            )
        self._arrived.add(bucket.index())
        if is_last_bucket:
            self._on_ready()
        if self._measurement is not None:
            with self._costs(buffer):
                self._measure_pass(self._measurement, bucket, buffer, plan, group.size())
        if plan.is_last and self._keeps_views:
            self.views.update(
                (id(one), view) for one, view in zip(bucket.parameters(), bucket.gradients(), strict=True)
            )
        if not plan.is_last:
            if plan.weight != 0.0:
                self._accumulate(bucket, buffer, plan.weight)
            buffer.zero_()
            return _completed(buffer)
        if plan.weight == 0.0:
            buffer.zero_()  # not a product: what an empty share's filler gave may be infinite
        elif plan.weight != 1.0:
            buffer.mul_(plan.weight)
        if not plan.is_first:
            earlier = self._take_accumulated(bucket, buffer)
            if earlier is not None:
                buffer.add_(earlier)
        return self._sum(group, bucket, buffer, is_last_bucket)

    def _accumulate(self, bucket: GradBucket, buffer: Tensor, weight: float) -> None:
        accumulated = self._take_accumulated(bucket, buffer)
        key = _key(bucket)
        self._layout(key, bucket)  # known before DDP replaces the bucket
        self._accumulated[key] = buffer * weight if accumulated is None else accumulated.add_(buffer, alpha=weight)

    def _take_accumulated(self, bucket: GradBucket, buffer: Tensor) -> Tensor | None:
        """What earlier passes left for this bucket; None if nothing.

        DDP lays its buckets out anew after its very first backward pass, in the order in which gradients came. That may
        be in the middle of a step: what was accumulated in the old buckets then moves to the new ones.
        """
        key = _key(bucket)
        accumulated = self._accumulated.pop(key, None)
        if accumulated is not None or not (self._accumulated or self._pieces):
            return accumulated
        for old_key, old in self._accumulated.items():
            views = [old.as_strided(*layout) for layout in self._layouts[old_key]]
            self._pieces.update(zip(old_key, views, strict=True))
        self._accumulated.clear()
        moved = torch.zeros_like(buffer)
        for parameter, layout in zip(key, self._layout(key, bucket), strict=True):
            piece = self._pieces.pop(parameter, None)
            if piece is not None:
                moved.as_strided(*layout).copy_(piece)
        return moved

    def _layout(self, key: BucketKey, bucket: GradBucket) -> list[Layout]:
        if key not in self._layouts:
            offset = bucket.buffer().storage_offset()
            self._layouts[key] = [(g.size(), g.stride(), int(g.storage_offset() - offset)) for g in bucket.gradients()]
        return self._layouts[key]

    def _sum(
        self, group: dist.ProcessGroup, bucket: GradBucket, buffer: Tensor, is_last_bucket: bool
    ) -> torch.futures.Future[Tensor]:
        measurement = self._measurement
        if measurement is not None and (measurement.is_void or measurement.is_pair):
            measurement = None  # the mean says nothing then, or is there already
        # The bucket is DDP's and gone when this returns; its parameters and views are needed after the sum.
        views = self._views(bucket) if measurement is not None else None
        if group.size() == 1 or self.failure is not None:
            if measurement is not None:
                with self._costs(buffer):
                    measurement.mean.append(self._squared_norm(buffer, views))
            # Nothing more is sent into a group that failed: a peer that is only late would take it for something else.
            if is_last_bucket and self.failure is None:
                self._on_last()
            return _completed(buffer)
        outcome: torch.futures.Future[Tensor] = torch.futures.Future(devices=_devices(buffer))
        with self._lock:
            is_abandoned = self._is_abandoned
            if not is_abandoned:
                self._pending.append((outcome, buffer))
        if is_abandoned:
            outcome.set_result(buffer)
            return outcome

        def ended(reduced: torch.futures.Future[Any]) -> None:
            try:
                reduced.value()
                if measurement is not None:
                    measurement.mean.append(self._squared_norm(buffer, views))
                if buffer.is_cuda and is_last_bucket:
                    self._note_reduction()
                self._end(outcome, buffer)
            except BaseException as error:
                self._end(outcome, buffer, error)

        try:
            work = dist.all_reduce(buffer, group=group, async_op=True)
            assert work is not None
            work.get_future().then(ended)
            if is_last_bucket:
                self._on_last()
        except RuntimeError as error:  # a peer that is gone shows here too
            self._end(outcome, buffer, error)
        return outcome

    def _end(self, outcome: torch.futures.Future[Tensor], buffer: Tensor, error: BaseException | None = None) -> None:
        """A collective is over. One that had been given up may end much later, and is no business of this group's."""
        with self._lock:
            before = len(self._pending)
            self._pending = [entry for entry in self._pending if entry[0] is not outcome]
            was_pending = len(self._pending) < before
            if was_pending:
                self.failure = self.failure or error
        if was_pending:
            outcome.set_result(buffer)

    def _note_reduction(self) -> None:
        """On the device a sum is only queued when its future ends; the event tells when it has been made."""
        self.reductions = [event for event in self.reductions if not _has_passed(event)]
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self.reductions.append(event)

    def is_reduced(self) -> bool:
        """Whether the device has made every sum whose result an optimizer step was queued behind."""
        self.reductions = [event for event in self.reductions if not _has_passed(event)]
        return not self.reductions

    @contextmanager
    def _costs(self, buffer: Tensor) -> Iterator[None]:
        begun = time.perf_counter()
        marks = None
        if buffer.is_cuda:
            marks = _timing_event(), _timing_event()
            marks[0].record()
        yield
        if marks is not None:
            marks[1].record()
            self._marks.append(marks)
        self._host_s += time.perf_counter() - begun

    # --- measuring ---------------------------------------------------------------------------------------------

    def _measure_pass(
        self,
        measurement: _Measurement,
        bucket: GradBucket,
        buffer: Tensor,
        plan: PassPlan,
        num_replicas: int,
    ) -> None:
        views = self._views(bucket)
        if self._preconditioner is not None and views is None:
            measurement.is_void = True
        elif not (plan.is_first and plan.is_last and num_replicas == 1):
            if plan.weight > 0:  # a filler is no sample
                measurement.own.append(self._squared_norm(buffer, views))
        else:
            self._measure_pair(measurement, _key(bucket), buffer, views)

    def _measure_pair(self, measurement: _Measurement, key: BucketKey, buffer: Tensor, views: _Views | None) -> None:
        scale = self._loss_scale()
        previous = self._previous.pop(key, None)
        if previous is None:
            measurement.is_void = True  # the first of a pair: kept to be compared with
            self._previous[key] = buffer.clone()
            self._previous_scale = scale
            return
        measurement.is_pair = True
        if views is not None and not views.gradients:
            zero = torch.zeros((), device=buffer.device)
            measurement.own.append(zero)
            measurement.mean.append(zero)
            return
        if isinstance(scale, Tensor) or scale != self._previous_scale:
            previous.mul_(scale / self._previous_scale)
        if views is None:
            now, before = [buffer], [previous]
        else:
            # Both are divided by the newer √v̂: dividing each by its own would take the drift of v̂ for noise.
            inverse = self._inverse(views)
            before = list(torch._foreach_mul(inverse, _views_like(views, previous, buffer)))
            now = weighed(inverse, views.gradients)
        sqr_now, sqr_before = squared_norm(now, scale), squared_norm(before, scale)
        torch._foreach_sub_(before, now)
        measurement.own += [sqr_now, sqr_before]
        # |(a+b)/2|², by the parallelogram law
        measurement.mean.append((sqr_now + sqr_before) / 2 - squared_norm(before, scale) / 4)

    def _squared_norm(self, buffer: Tensor, views: _Views | None) -> Tensor:
        tensors = [buffer] if views is None else weighed(self._inverse(views), views.gradients)
        if not tensors:
            return torch.zeros((), device=buffer.device)
        return squared_norm(tensors, self._loss_scale())

    def _inverse(self, views: _Views) -> list[Tensor]:
        assert self._preconditioner is not None
        self._preconditioner.beta_exponent = self._beta_exponent()
        inverse = self._preconditioner.inverse(views.groups)
        assert inverse is not None  # views are made only where it is there
        return inverse

    def _views(self, bucket: GradBucket) -> _Views | None:
        """The bucket's gradients by parameter group; None where they need not be divided, or cannot be yet."""
        if self._preconditioner is None:
            return None
        key = _key(bucket)
        if key not in self._groups:
            self._groups[key] = _by_group(self._optimizer, bucket.parameters())
        if not self._optimizer.state:
            return None
        gradients = bucket.gradients()
        groups: Groups = []
        chosen: list[Tensor] = []
        for options, members in self._groups[key]:
            # A parameter that was never stepped has no scale to be measured in, and no part in the norm.
            stepped = [(one, place) for one, place in members if self._preconditioner.is_ready([(options, [one])])]
            groups.append((options, [one for one, _ in stepped]))
            chosen += [gradients[place] for _, place in stepped]
        return _Views(groups, chosen)


def _key(bucket: GradBucket) -> BucketKey:
    return tuple(map(id, bucket.parameters()))


def _by_group(
    optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]
) -> list[tuple[Mapping[str, Any], list[tuple[Tensor, int]]]]:
    """A bucket's parameters by the optimizer's group, each with its place in the bucket."""
    places = {id(parameter): index for index, parameter in enumerate(parameters)}
    return [
        (options, [(one, places[id(one)]) for one in options["params"] if id(one) in places])
        for options in optimizer.param_groups
    ]


def _views_like(views: _Views, other: Tensor, buffer: Tensor) -> list[Tensor]:
    """Views of another flat buffer, as ``views`` are of ``buffer``."""
    offset = buffer.storage_offset()
    return [other.as_strided(view.size(), view.stride(), view.storage_offset() - offset) for view in views.gradients]


def _completed(buffer: Tensor) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future


def _has_passed(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _devices(buffer: Tensor) -> list[int | str | torch.device] | None:
    return [buffer.device] if buffer.is_cuda else None
