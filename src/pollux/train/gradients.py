"""Accumulates a step's gradients over passes, averages them over replicas, and measures their norms.

The session calls it at each pass; autograd or DDP calls it when gradients are complete.

- *Several replicas*: DDP gives every pass's gradient to :meth:`GradientHook.reduce`, bucket by bucket, as flat buffers.
- *One replica*: no DDP. A step of one pass is plain PyTorch. In a step of several passes, the end of each
  ``backward()`` calls :meth:`GradientHook.end_lone_pass`.

In both cases:

- *A pass that is not the step's last*: its weighted gradient is added to an accumulation buffer, and ``.grad`` is
  zeroed. So changes that users make to ``.grad`` in between (clipping, unscaling, zeroing) have no effect on the step,
  and each pass's own gradient is available without taking differences.
- *The last pass*: the accumulated gradient is added, then the sum over replicas is taken. The weights are n/N, the
  pass's examples over the whole step's, so the sum is the mean gradient over all examples of the step, for any shares.
- *A measured step*: squared norms of each pass's gradient and of the final mean; with Adam, RMSprop and the like,
  of the gradient in the optimizer's metric (see :class:`~pollux.train.noise.Preconditioner`).

Nothing here waits for the device. A collective that fails (a peer is gone) does not raise inside the user's
``backward()``: the backward pass ends with useless gradients, and the session checks :attr:`GradientHook.failure`
before it uses them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pollux.train.device_sums import DeviceSums
from pollux.train.noise import WARM_UP_STEPS, GroupOptions, Preconditioner, weighed
from pollux.train.parameter_parts import NUM_PARTS, ParameterParts

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

BucketKey = tuple[int, ...]  # identities of its parameters, in order
Layout = tuple[torch.Size, tuple[int, ...], int]  # size, strides and offset of a gradient in its bucket
Groups = list[tuple[GroupOptions, list[Tensor]]]


_FORWARD, _BACKWARD = -1, -2  # used as bucket numbers by a replica without DDP
TWO_BACKWARDS = (
    "backward() was called twice for the last batch of a step that accumulates several batches, but once for the "
    "others: add the losses and call it once"
)


@dataclass(frozen=True, slots=True)
class PassPlan:
    """How to treat the gradient of the next pass."""

    weight: float  # n/N: own examples of this pass over all examples of the step
    is_first: bool = True
    is_last: bool = True
    measures: bool = False
    is_split: bool = False  # one batch in two halves; calling backward() twice is allowed then


WHOLE_STEP = PassPlan(weight=1.0)  # one replica, one pass


@dataclass(frozen=True, slots=True)
class Norms:
    """The result of a measured step, as (NUM_PARTS,) tensors on the device: by part of the model."""

    sum_sqr: Tensor  # Σ|g_i|² over this replica's passes
    sqr_mean: Tensor  # |ḡ|² of the mean over everything
    host_s: float  # host time that measuring took
    marks: tuple[tuple[torch.cuda.Event, torch.cuda.Event], ...]  # device events before and after measuring


@dataclass(slots=True)
class _Measurement:
    own: list[Tensor] = field(default_factory=list)  # by pass and bucket
    mean: list[Tensor] = field(default_factory=list)  # by bucket
    is_void: bool = False  # no valid sample, for example because the optimizer has no state to divide by yet
    inverse: list[Tensor] | None = None  # one replica only: the same for all passes of the step
    inverse_of: tuple[int, ...] = ()  # identities of the parameters


@dataclass(frozen=True, slots=True)
class _Views:
    """A bucket's gradients one by one; with a metric, ordered by the optimizer's parameter groups."""

    groups: Groups
    gradients: list[Tensor]
    identities: tuple[int, ...]  # of their parameters


class GradientHook:
    """One per run. Call ``begin_pass`` before each forward pass, ``take_norms`` after a step; DDP calls ``reduce``.

    ``on_ready`` is called when a pass's own gradient is complete (the last bucket has arrived). ``on_last`` is called
    when that of the step's last pass is: start other collectives of the step there, so that all ranks have the same
    order. ``parameters`` are the model's; they are used without DDP.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        parameters: Iterable[nn.Parameter] = (),
        loss_scale: Callable[[], Tensor | float] = lambda: 1.0,
        beta_exponent: Callable[[], float] = lambda: 1.0,
        on_ready: Callable[[], None] = lambda: None,
        on_last: Callable[[], None] = lambda: None,
        keeps_views: bool = False,
    ) -> None:
        self._optimizer = optimizer
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._preconditioner = Preconditioner.for_optimizer(optimizer)
        self._parts = ParameterParts(optimizer)
        self.warm_up_steps = 0 if self._preconditioner is None else WARM_UP_STEPS
        self._loss_scale, self._on_ready, self._on_last = loss_scale, on_ready, on_last
        self._beta_exponent = beta_exponent
        self._keeps_views = keeps_views
        self.views: dict[int, Tensor] = {}  # by parameter's identity, the step's gradient in its bucket
        self._plan: PassPlan | None = None
        self._accumulated: dict[BucketKey, Tensor] = {}
        self._pieces: dict[int, Tensor] = {}  # the same by parameter, while DDP changes its bucket layout
        self._lone_accumulated: dict[int, Tensor] = {}  # by parameter's identity, of a replica without DDP
        self._backward_hooks: list[RemovableHandle] = []  # of this pass
        self._is_ending = False  # a backward pass is under way
        self._is_closed = False  # the optimizer has had its turn in this pass
        self._backs_twice = False  # seen: several backward passes in one pass
        self._kept: dict[BucketKey, Tensor] = {}  # of the step's last pass, in case of a second backward()
        self._measurement: _Measurement | None = None
        self._groups: dict[BucketKey, list[tuple[GroupOptions, list[tuple[Tensor, int]]]]] = {}
        self._layouts: dict[BucketKey, list[Layout]] = {}
        self._pending: list[tuple[torch.futures.Future[Tensor], Tensor]] = []
        self._lock = threading.Lock()  # collectives end, and are given up, in other threads
        self._is_abandoned = False
        self.failure: BaseException | None = None
        self.misuse: str | None = None  # an error in the user's loop that makes the gradient wrong
        self._arrived: set[int] = set()  # buckets of the pass
        self.sums = DeviceSums()
        self._host_s = 0.0
        self._marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    # --- the step, pass by pass --------------------------------------------------------------------------------

    def begin_pass(self, plan: PassPlan) -> None:
        self._plan, self._is_closed = plan, False
        self._end_backward_hooks()
        self._arrived.clear()
        self._kept.clear()
        if plan.is_first:
            self._accumulated.clear()
            self._pieces.clear()
            self._lone_accumulated.clear()
            self._host_s = 0.0
            self._marks.clear()
            self._measurement = _Measurement() if plan.measures else None

    def take_norms(self) -> Norms | None:
        """The norms of the step that has just ended; None without a valid measurement."""
        measurement, self._measurement = self._measurement, None
        self._plan = None  # the step's weights end with it
        self._end_backward_hooks()
        self._lone_accumulated.clear()
        if measurement is None or measurement.is_void or not measurement.mean:
            return None
        return Norms(
            torch.stack(measurement.own or [torch.zeros_like(measurement.mean[0])]).sum(0),
            torch.stack(measurement.mean).sum(0),
            self._host_s,
            tuple(self._marks),
        )

    def close(self) -> None:
        """Later gradients of this pass are not for this optimizer: a GAN's generator loss goes through the critic."""
        self._is_closed = True

    @property
    def has_arrived(self) -> bool:
        """Whether a gradient of the pass under way, or of the last one, came through this hook."""
        return bool(self._arrived)

    def reset(self) -> None:
        """Forget the step under way and the bucket layout. Called before a new group."""
        self._plan, self._measurement, self.failure = None, None, None
        self._end_backward_hooks()
        self._accumulated.clear()
        self._kept.clear()
        self._pieces.clear()
        self._lone_accumulated.clear()
        self._groups.clear()
        self._parts.clear()
        self._layouts.clear()
        self.sums.reset()
        with self._lock:
            self._pending.clear()
            self._is_abandoned = False

    def abandon(self, reason: BaseException) -> None:
        """End all pending collectives now, as failed. May be called from another thread."""
        with self._lock:
            self._is_abandoned = True
            self.failure = self.failure or reason
            pending, self._pending = self._pending, []
        for outcome, buffer in pending:
            outcome.set_result(buffer)

    # --- one replica, without DDP ------------------------------------------------------------------------------

    def begin_lone_forward(self) -> None:
        """The only replica begins a forward pass. In a step of one pass, ``.grad`` is already the gradient."""
        self._arrived.add(_FORWARD)
        plan = self._plan
        if plan is None or (plan.is_first and plan.is_last) or self._backward_hooks:
            return
        self._backward_hooks = [
            parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
            for parameter in self._parameters
            if parameter.requires_grad
        ]

    def _end_backward_hooks(self) -> None:
        """Remove the hooks of the pass. One forward pass may have several backward passes (``retain_graph``)."""
        for handle in self._backward_hooks:
            handle.remove()
        self._backward_hooks, self._is_ending = [], False

    def _on_gradient(self, _: Tensor) -> None:
        """A backward pass has set a ``.grad``. ``torch.autograd.grad`` does not, so it is not seen here.

        The queued callback runs once, at the end of the backward pass.
        """
        if not self._is_ending:
            self._is_ending = True
            torch.autograd.Variable._execution_engine.queue_callback(self.end_lone_pass)

    @torch.no_grad()
    def end_lone_pass(self) -> None:
        """A backward pass of a step with several passes has ended."""
        self._is_ending = False
        plan, measurement = self._plan, self._measurement
        if plan is None:
            return
        if self._is_closed:
            torch._foreach_zero_([one.grad for one in self._parameters if one.grad is not None])
            return
        is_again = _BACKWARD in self._arrived
        self._arrived.add(_BACKWARD)
        if is_again and measurement is not None:
            measurement.is_void = True  # the norm of a sum does not follow from the norms of its parts
        held = [(one, one.grad) for one in self._parameters if one.grad is not None]
        if measurement is not None and plan.weight > 0:
            self._measure_lone(measurement, measurement.own, held)
        if not plan.is_last:
            self._accumulate_lone(held, plan.weight)
            return
        self._combine_lone(held, plan.weight, is_again)
        if measurement is not None:
            held = [(one, one.grad) for one in self._parameters if one.grad is not None]
            self._measure_lone(measurement, measurement.mean, held)

    def _accumulate_lone(self, held: list[tuple[nn.Parameter, Tensor]], weight: float) -> None:
        for parameter, grad in held:
            if grad.is_sparse:
                earlier = self._lone_accumulated.get(id(parameter))
                self._lone_accumulated[id(parameter)] = grad * weight if earlier is None else earlier + grad * weight
                parameter.grad = None
        dense = [(id(parameter), grad) for parameter, grad in held if not grad.is_sparse]
        if not dense:
            return
        grads = [grad for _, grad in dense]
        if weight != 0.0:
            new = [entry for entry in dense if entry[0] not in self._lone_accumulated]
            old = [entry for entry in dense if entry[0] in self._lone_accumulated]
            if old:
                torch._foreach_add_([self._lone_accumulated[key] for key, _ in old], [g for _, g in old], alpha=weight)
            if new:
                weighed_grads = torch._foreach_mul([grad for _, grad in new], weight)
                self._lone_accumulated.update(zip((key for key, _ in new), weighed_grads, strict=True))
        torch._foreach_zero_(grads)

    def _combine_lone(self, held: list[tuple[nn.Parameter, Tensor]], weight: float, is_again: bool) -> None:
        """The last pass: add the gradients of earlier passes. Keep the result, in case of a second backward()."""
        kept = self._lone_accumulated
        for parameter, grad in held:
            if grad.is_sparse:
                earlier = kept.get(id(parameter))
                own = grad - earlier if is_again and earlier is not None else grad
                parameter.grad = own * weight if earlier is None else own * weight + earlier
                kept[id(parameter)] = parameter.grad
        joined = [(id(one), grad) for one, grad in held if not grad.is_sparse and id(one) in kept]
        lone = [(id(one), grad) for one, grad in held if not grad.is_sparse and id(one) not in kept]
        if joined:
            grads, earlier_grads = [grad for _, grad in joined], [kept[key] for key, _ in joined]
            if is_again:
                torch._foreach_sub_(grads, earlier_grads)
            torch._foreach_mul_(grads, weight)
            torch._foreach_add_(grads, earlier_grads)
            torch._foreach_copy_(earlier_grads, grads)
        for key, grad in lone:
            kept[key] = grad.mul_(weight).clone()
        present = {id(parameter) for parameter, _ in held}
        for parameter in self._parameters:  # used in earlier passes only
            if id(parameter) in kept and id(parameter) not in present:
                parameter.grad = kept[id(parameter)].clone()

    def _measure_lone(
        self, measurement: _Measurement, norms: list[Tensor], held: list[tuple[nn.Parameter, Tensor]]
    ) -> None:
        if not held or any(grad.is_sparse for _, grad in held):
            measurement.is_void = True
            return
        with self._costs(held[0][1]):
            tensors = [grad for _, grad in held]
            identities = tuple(id(one) for one, _ in held)
            if self._preconditioner is not None:
                self._prepare_inverse(measurement, held)
                by_parameter = {id(one): grad for one, grad in held}
                if not measurement.inverse or any(key not in by_parameter for key in measurement.inverse_of):
                    measurement.is_void = True  # no state yet, or the passes used different parameters
                    return
                identities = measurement.inverse_of
                chosen = _as_real([by_parameter[key] for key in identities])
                tensors = list(torch._foreach_mul(measurement.inverse, chosen))
            norms.append(self._parts.squared_norms(_as_real(tensors), identities, self._loss_scale()))

    def _prepare_inverse(self, measurement: _Measurement, held: list[tuple[nn.Parameter, Tensor]]) -> None:
        """The inverse metric of the parameters with a gradient in the first pass that have been stepped before."""
        if measurement.inverse is not None:
            return
        assert self._preconditioner is not None
        present = {id(one) for one, _ in held}
        groups: Groups = []
        for options in self._optimizer.param_groups:
            stepped = [one for one in options["params"] if id(one) in present]
            stepped = [one for one in stepped if self._preconditioner.is_ready([(options, [one])])]
            groups.append((options, stepped))
        self._preconditioner.beta_exponent = self._beta_exponent()
        measurement.inverse = self._preconditioner.inverse(groups, is_known_ready=True) or []
        measurement.inverse_of = tuple(id(one) for _, stepped in groups for one in stepped)

    # --- what DDP calls ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def reduce(self, group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        plan, buffer = self._plan, bucket.buffer()
        is_last_bucket = bucket.is_last()
        if plan is None:  # a backward pass outside the loop: plain averaging
            plan = PassPlan(weight=1.0 / group.size())
        if self._is_closed:
            buffer.zero_()
            return _completed(buffer)
        is_again = bucket.index() in self._arrived
        self._backs_twice |= is_again
        self._arrived.add(bucket.index())
        if is_again and self._measurement is not None:
            self._measurement.is_void = True  # the norm of a sum does not follow from the norms of its parts
        if is_last_bucket:
            self._on_ready()
        if self._measurement is not None:
            with self._costs(buffer):
                self._measure_pass(self._measurement, bucket, buffer, plan)
        if plan.is_last and self._keeps_views:
            self.views.update(
                (id(one), view) for one, view in zip(bucket.parameters(), bucket.gradients(), strict=True)
            )
        if not plan.is_last:
            if plan.weight != 0.0:
                self._accumulate(bucket, buffer, plan.weight)
            buffer.zero_()
            return _completed(buffer)
        earlier = None
        if not plan.is_first:
            earlier = (
                self._reduced_before(bucket, buffer, group) if is_again else self._take_accumulated(bucket, buffer)
            )
        if plan.weight == 0.0:
            buffer.zero_()  # not a product: the gradient of a filler may be infinite
        elif plan.weight != 1.0:
            buffer.mul_(plan.weight)
        if earlier is not None:
            buffer.add_(earlier)
        return self._sum(group, bucket, buffer, is_last_bucket)

    def _reduced_before(self, bucket: GradBucket, buffer: Tensor, group: dist.ProcessGroup) -> Tensor | None:
        """A second backward() in a step's last pass: take out what the first one's sum has left in the buffer.

        It is returned on rank 0, so that it is in the new sum once. With one pass, weights add up to 1 over the
        replicas, and the sum keeps it anyway.
        """
        reduced = self._kept.pop(_key(bucket), None)
        if reduced is None:
            self.misuse = TWO_BACKWARDS
            return None
        buffer.sub_(reduced)
        return reduced if group.rank() == 0 else None

    def _accumulate(self, bucket: GradBucket, buffer: Tensor, weight: float) -> None:
        accumulated = self._take_accumulated(bucket, buffer)
        key = _key(bucket)
        self._layout(key, bucket)  # before DDP replaces the bucket
        self._accumulated[key] = buffer * weight if accumulated is None else accumulated.add_(buffer, alpha=weight)

    def _take_accumulated(self, bucket: GradBucket, buffer: Tensor) -> Tensor | None:
        """The gradient that earlier passes accumulated for this bucket; None if there is none.

        DDP changes its bucket layout after its first backward pass, to the order in which gradients came. That may be
        in the middle of a step: accumulated gradients then move from the old buckets to the new ones.
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
        # DDP frees the bucket when this returns, but its parameters and views are needed after the sum.
        views = self._views(bucket) if measurement is not None and not measurement.is_void else None
        if group.size() == 1 or self.failure is not None:
            if measurement is not None and views is not None:
                with self._costs(buffer):
                    measurement.mean.append(self._squared_norms(buffer, views))
            # Send nothing more to a group that failed: a late peer would take it for another message.
            if is_last_bucket and self.failure is None:
                self._on_last()
            return _completed(buffer)
        key = _key(bucket) if self._backs_twice and self._plan is not None and not self._plan.is_first else None
        outcome: torch.futures.Future[Tensor] = torch.futures.Future(devices=_devices(buffer))
        with self._lock:
            is_abandoned = self._is_abandoned
            if not is_abandoned:
                self._pending.append((outcome, buffer))
        if is_abandoned:
            outcome.set_result(buffer)
            return outcome

        def ended(reduced: torch.futures.Future[object]) -> None:
            try:
                reduced.value()
                if key is not None:
                    self._kept[key] = buffer.clone()
                if measurement is not None and views is not None:
                    measurement.mean.append(self._squared_norms(buffer, views))
                if buffer.is_cuda and is_last_bucket:
                    self.sums.note()  # when its future ends, the device has only queued it
                self._end(outcome, buffer)
            except BaseException as error:
                self._end(outcome, buffer, error)

        try:
            work = dist.all_reduce(buffer, group=group, async_op=True)
            assert work is not None
            work.get_future().then(ended)
            if is_last_bucket:
                self._on_last()
        except RuntimeError as error:  # a lost peer may raise here too
            self._end(outcome, buffer, error)
        return outcome

    def _end(self, outcome: torch.futures.Future[Tensor], buffer: Tensor, error: BaseException | None = None) -> None:
        """A collective is over. One that was abandoned may end much later, and is ignored."""
        with self._lock:
            before = len(self._pending)
            self._pending = [entry for entry in self._pending if entry[0] is not outcome]
            was_pending = len(self._pending) < before
            if was_pending:
                self.failure = self.failure or error
        if was_pending:
            outcome.set_result(buffer)

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

    def _measure_pass(self, measurement: _Measurement, bucket: GradBucket, buffer: Tensor, plan: PassPlan) -> None:
        views = self._views(bucket)
        if views is None:
            measurement.is_void = True
        elif plan.weight > 0:  # a filler gives no sample
            measurement.own.append(self._squared_norms(buffer, views))

    def _squared_norms(self, buffer: Tensor, views: _Views) -> Tensor:
        """(NUM_PARTS,) of a bucket's gradients."""
        if not views.gradients:
            return torch.zeros(NUM_PARTS, dtype=torch.float32, device=buffer.device)
        tensors = weighed(self._inverse(views), _as_real(views.gradients))
        return self._parts.squared_norms(tensors, views.identities, self._loss_scale())

    def _inverse(self, views: _Views) -> list[Tensor] | None:
        if self._preconditioner is None:
            return None
        self._preconditioner.beta_exponent = self._beta_exponent()
        inverse = self._preconditioner.inverse(views.groups)
        assert inverse is not None  # views exist only if the parameters were stepped
        return inverse

    def _views(self, bucket: GradBucket) -> _Views | None:
        """The bucket's gradients; in a metric, by parameter group, and None before the first step."""
        key = _key(bucket)
        if self._preconditioner is None:
            return _Views([], bucket.gradients(), key)
        if key not in self._groups:
            self._groups[key] = _by_group(self._optimizer, bucket.parameters())
        if not self._optimizer.state:
            return None
        gradients = bucket.gradients()
        groups: Groups = []
        chosen: list[Tensor] = []
        identities: list[int] = []
        for options, members in self._groups[key]:
            # A parameter that was never stepped has no v̂ yet, and is left out of the norm.
            stepped = [(one, place) for one, place in members if self._preconditioner.is_ready([(options, [one])])]
            groups.append((options, [one for one, _ in stepped]))
            chosen += [gradients[place] for _, place in stepped]
            identities += [id(one) for one, _ in stepped]
        return _Views(groups, chosen, tuple(identities))


def _key(bucket: GradBucket) -> BucketKey:
    return tuple(map(id, bucket.parameters()))


def _by_group(
    optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]
) -> list[tuple[GroupOptions, list[tuple[Tensor, int]]]]:
    """A bucket's parameters by the optimizer's group, each with its place in the bucket."""
    places = {id(parameter): index for index, parameter in enumerate(parameters)}
    return [
        (options, [(one, places[id(one)]) for one in options["params"] if id(one) in places])
        for options in optimizer.param_groups
    ]


def _as_real(tensors: list[Tensor]) -> list[Tensor]:
    return [torch.view_as_real(one) if one.is_complex() else one for one in tensors]


def _completed(buffer: Tensor) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _devices(buffer: Tensor) -> list[int | str | torch.device] | None:
    return [buffer.device] if buffer.is_cuda else None
