"""Averages a sharded model's gradients over replicas, accumulates them over passes, and measures their norms.

The counterpart of :class:`~pollux.train.gradients.GradientHook` for FSDP2, which calls it in place of its own
collectives: :meth:`ShardedGradients.gather` before a layer runs, and :meth:`ShardedGradients.reduce` with a layer's
gradient, flat, when its backward pass is over.

- Gradients are weighted by n/N before they are added up, so the sum is the mean over all examples of the step.
- The reduced gradient of a pass that is not the step's last is kept, sharded, and ``.grad`` gets zeros. The last pass
  adds it. So accumulation takes one shard of memory, and each pass one more reduce-scatter.
- With copies of the shards, replicas agree before each step that all have their gradients: :meth:`agree`.
- A collective that fails does not raise inside the user's loop. It gives zeros, no more is sent, and the session checks
  :attr:`ShardedGradients.failure` before gradients are used.

Noise scale: a replica sees its own gradient before it is added up, as with DDP. In the metric of Adam and the like it
can divide only the rows that it owns, as the second moments are sharded too. So replica r measures the rows S_r of its
own gradient. E|g_r[S_r]|² = |G[S_r]|² + tr Σ[S_r]/m, and the sum over all r is |G|² + tr Σ/m: what one whole gradient
would give. This is unbiased and needs no communication. It rests on one gradient for each coordinate instead of K, so
its error is larger.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pollux.errors import PeerLostError
from pollux.train.device_sums import DeviceSums
from pollux.train.gradients import Norms, PassPlan
from pollux.train.noise import WARM_UP_STEPS, GroupOptions, Preconditioner, squared_norm
from pollux.train.parameter_parts import NUM_PARTS, ParameterParts
from pollux.train.sharded_module import ShardGroup
from pollux.train.team import Team

# Their names until torch 2.13 are deprecated there.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

DIFFERENT_PASSES = (
    "the passes of a step used different parameters of a sharded layer: all passes must use the same ones, or the step "
    "must be one pass (device_batch_size)"
)


@dataclass(slots=True)
class _NormList:
    """Norms of several tensors, 0-d each, and the identities of the parameters that they belong to."""

    norms: list[Tensor] = field(default_factory=list)
    identities: tuple[int, ...] = ()

    def add(self, norms: list[Tensor], identities: tuple[int, ...]) -> None:
        self.norms += norms
        self.identities += identities


@dataclass(slots=True)
class _Measurement:
    own: _NormList = field(default_factory=_NormList)  # by pass and layer
    mean: _NormList = field(default_factory=_NormList)  # by layer, of this rank's rows
    is_void: bool = False
    host_s: float = 0.0
    marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Measured:
    """Which parameters of a layer are measured: those of the optimizer, by its parameter groups."""

    places: list[int]  # in the layer
    identities: tuple[int, ...]
    groups: list[tuple[GroupOptions, list[nn.Parameter]]]


class _Comm:
    """What FSDP2 calls in place of its own all-gather or reduce-scatter, within ``no_grad``."""

    def __init__(self, gradients: ShardedGradients) -> None:
        self._gradients = gradients

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Comm):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        self._gradients.call(_all_gather, output_tensor, input_tensor, group=group)


class _Reduce(_Comm):
    def __init__(self, gradients: ShardedGradients, index: int) -> None:
        super().__init__(gradients)
        self._index = index

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object, async_op: bool = False
    ) -> None:
        self._gradients.reduce(self._index, output_tensor, input_tensor, group)


class ShardedGradients:
    """One per sharded model. ``attach`` for each new group; the rest as :class:`~pollux.train.gradients.GradientHook`.

    ``on_ready`` and ``on_last`` are called when a backward pass is over, the latter in the step's last pass.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        team: Team,
        *,
        beta_exponent: Callable[[], float] = lambda: 1.0,
        on_ready: Callable[[], None] = lambda: None,
        on_last: Callable[[], None] = lambda: None,
        confirm: Callable[[], None] = lambda: None,
    ) -> None:
        self._optimizer, self._team, self._confirm = optimizer, team, confirm
        self._preconditioner = Preconditioner.for_optimizer(optimizer)
        self.warm_up_steps = 0 if self._preconditioner is None else WARM_UP_STEPS
        self._beta_exponent, self._on_ready, self._on_last = beta_exponent, on_ready, on_last
        self._groups: list[ShardGroup] = []
        self._options: dict[int, GroupOptions] = {}  # by parameter's identity
        self._measured: dict[int, _Measured] = {}  # by layer, made when it is measured first
        self._parts = ParameterParts(optimizer)
        self._copies: dist.ProcessGroup | None = None
        self._plan: PassPlan | None = None
        self._accumulated: dict[int, Tensor] = {}  # by layer, at least in single precision
        self._arrived: set[int] = set()  # layers whose gradient has arrived in this pass
        self._is_ending = False  # a callback for the end of the backward pass is queued
        self._measurement: _Measurement | None = None
        self.failure: BaseException | None = None
        self.misuse: str | None = None
        self.views: dict[int, Tensor] = {}  # as GradientHook has it; FSDP2 keeps a gradient that it has
        self.sums = DeviceSums()

    def attach(self, groups: list[ShardGroup], copies: dist.ProcessGroup | None) -> None:
        """Take over the collectives of these layers. ``copies`` is the group of replicas with the same shard."""
        self._groups, self._copies = groups, copies
        num_shards = self._team.size // (1 if copies is None else copies.size())
        for index, group in enumerate(groups):
            group.module.set_custom_all_gather(_Gather(self))
            group.module.set_custom_reduce_scatter(_Reduce(self, index))
            if num_shards == 1:  # FSDP2 reduces nothing then; otherwise the hook is work for nothing
                group.module.set_all_reduce_hook(partial(self.reduce_alone, index))
            # Sums, not means: the weights are n/N.
            group.module.set_force_sum_reduction_for_comms(True)
            group.module.set_gradient_divide_factor(1.0)

    def bind(self) -> None:
        """The optimizer has the parameters of the new group."""
        self._options = {id(one): group for group in self._optimizer.param_groups for one in group["params"]}
        self._parts = ParameterParts(self._optimizer)
        self._measured.clear()

    # --- the step, pass by pass --------------------------------------------------------------------------------

    def begin_pass(self, plan: PassPlan) -> None:
        self._plan, self._is_ending = plan, False
        self._arrived.clear()
        if plan.is_first:
            self._accumulated.clear()
            self._measurement = _Measurement() if plan.measures else None

    def take_norms(self) -> Norms | None:
        """The norms of the step that has just ended: ``sqr_mean`` of this rank's rows. None without a measurement."""
        measurement, self._measurement, self._plan = self._measurement, None, None
        if measurement is None or measurement.is_void or not measurement.mean.norms:
            return None
        own, mean = (self._by_part(one) for one in (measurement.own, measurement.mean))
        if self._preconditioner is not None:
            own *= self._num_shards  # the sum over replicas counts every row once in num_shards
        return Norms(own, mean / self._num_copies, measurement.host_s, tuple(measurement.marks))

    def close(self) -> None:
        """For several models, which cannot be sharded."""

    @property
    def has_arrived(self) -> bool:
        return bool(self._arrived)

    def reset(self) -> None:
        """Forget the step under way and the layers. Called before a new group."""
        self._plan, self._measurement, self.failure, self._copies = None, None, None, None
        self._accumulated.clear()
        self.sums.reset()
        self._groups, self._options, self._is_ending = [], {}, False
        self._measured.clear()

    def abandon(self, reason: BaseException) -> None:
        """Send nothing more. A collective under way ends by itself. May be called from another thread."""
        self.failure = self.failure or reason

    # --- what FSDP2 calls --------------------------------------------------------------------------------------

    def call(self, collective: Any, output: Tensor, *tensors: Tensor, **options: Any) -> None:
        """Run a collective that writes to ``output``. Zeros if the group has failed, now or before.

        On a GPU it is not asynchronous for torch, which would take another stream and two events. The host does not
        wait for it all the same.
        """
        if self.failure is None:
            try:
                if output.is_cuda:
                    collective(output, *tensors, **options)
                else:
                    self._team.wait(collective(output, *tensors, async_op=True, **options))
                return
            except RuntimeError as error:
                self.failure = self.failure or error
        output.zero_()

    def reduce(self, index: int, output: Tensor, data: Tensor, group: dist.ProcessGroup) -> None:
        """The gradient of a layer: ``data`` of all rows, ``output`` for the sum of this rank's."""
        plan, own = self._begin(index), data.view(group.size(), -1)[group.rank()]
        inverse = self._measure_own(index, data, own, plan) if self._measurement is not None else None
        _weigh(data, plan.weight)
        if output.is_cuda:
            self.call(_reduce_scatter, output, data, group=group)
        else:
            # gloo's own reduce-scatter is an all-reduce too, and cannot be given up when a peer is lost.
            self.call(dist.all_reduce, data, group=group)
            output.copy_(own)
        self._complete(index, output, plan, inverse)

    def reduce_alone(self, index: int, output: Tensor) -> None:
        """The gradient of a layer with one shard, which FSDP2 does not reduce."""
        plan = self._begin(index)
        inverse = self._measure_own(index, output, output, plan) if self._measurement is not None else None
        _weigh(output, plan.weight)
        self._complete(index, output, plan, inverse)

    @property
    def _num_copies(self) -> int:
        return 1 if self._copies is None else self._copies.size()

    @property
    def _num_shards(self) -> int:
        return self._team.size // self._num_copies

    def _begin(self, index: int) -> PassPlan:
        if index in self._arrived and self._measurement is not None:
            self._measurement.is_void = True  # a second backward(): the norm of a sum does not follow from its parts'
        self._arrived.add(index)
        if not self._is_ending:
            # FSDP2's own callback was queued before, at the beginning of the backward pass, so this one comes after it.
            self._is_ending = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        return self._plan or PassPlan(weight=1.0 / self._team.size)  # outside the loop: plain averaging

    def _complete(self, index: int, output: Tensor, plan: PassPlan, inverse: list[Tensor] | None) -> None:
        if self._copies is not None:
            self.call(dist.all_reduce, output, group=self._copies)
        if self._accumulated and (earlier := self._accumulated.pop(index, None)) is not None:
            if earlier.shape != output.shape:
                self.misuse = DIFFERENT_PASSES
                return
            output.copy_(earlier.add_(output))
        if not plan.is_last:
            self._accumulated[index] = output.to(torch.promote_types(output.dtype, torch.float32), copy=True)
            output.zero_()
            return
        measurement = self._measurement
        if measurement is not None and not measurement.is_void:
            with _costs(measurement, output):
                self._add_norms(measurement.mean, index, output.view(1, -1), inverse)

    def _end_backward(self) -> None:
        """All sums of the pass were launched, and the current stream waits for them."""
        self._is_ending = False
        plan = self._plan
        if plan is not None and not plan.is_last:
            self._on_ready()
            return
        if self._accumulated:
            self._give_unused()
        self.note_sums()
        self._on_ready()
        if plan is not None and self._copies is None and self.failure is None:
            self._on_last()

    def note_sums(self) -> None:
        """The optimizer's step will use what was launched on the current stream until now.

        One mark is enough. A sum that is launched after :meth:`abandon` is not used, and one launched before it has its
        mark when the device is asked, or no optimizer step behind it.
        """
        if self._team.is_cuda and self.failure is None:
            self.sums.note()

    def agree(self) -> None:
        """Before the optimizer's step, with copies of the shards: go on only if all replicas have their gradients.

        A lost replica may have summed with the replicas of its shards, and not with its copy. Without this, some shards
        would make the step and others would not, and the state would be lost. So the host waits for its own device, and
        then for the step's exchange, which each replica begins when its sums are there.
        """
        if self._copies is None or self.failure is not None:
            return
        try:
            self._team.settle()
            self._on_last()
            self._confirm()
        except PeerLostError as error:
            self.failure = self.failure or error

    @torch.no_grad()
    def _give_unused(self) -> None:
        """Layers that earlier passes used, and the last one did not: their gradients are complete as they are."""
        for index, flat in self._accumulated.items():
            group = self._groups[index]
            for parameter, view in zip(group.parameters, group.split(flat) or (), strict=False):
                assert isinstance(parameter, DTensor)
                if parameter.grad is None:
                    parameter.grad = _like(parameter, view)
                else:
                    parameter.grad.to_local().add_(view.view_as(parameter.grad.to_local()))  # type: ignore[attr-defined]
            if self._measurement is not None:
                self._measurement.is_void = True
        self._accumulated.clear()

    @torch.no_grad()
    def clip(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their norm over all shards is at most ``max_norm``. The norm before."""
        owned = [one.grad for group in self._optimizer.param_groups for one in group["params"] if one.grad is not None]
        grads = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in owned]
        norm = squared_norm(grads, 1.0) if grads else torch.zeros((), device=self._team.device)
        if self._team.size > 1:
            norm /= self._num_copies
            self.call(dist.all_reduce, norm)
            self.note_sums()
        norm = norm.sqrt()
        if grads:
            torch._foreach_mul_(grads, (max_norm / (norm + 1e-6)).clamp(max=1.0))  # as torch's clip_grad_norm_
        return norm

    # --- measuring ---------------------------------------------------------------------------------------------

    def _measure_own(self, index: int, data: Tensor, own: Tensor, plan: PassPlan) -> list[Tensor] | None:
        """This replica's own gradient: all of it, or its own rows where the metric is sharded. The metric of these."""
        measurement, inverse = self._measurement, None
        if measurement is None or measurement.is_void:
            return None
        with _costs(measurement, data):
            if self._preconditioner is not None:
                inverse = self._inverse(index)
                measurement.is_void |= inverse is None
            if plan.weight > 0 and not measurement.is_void:
                rows = data.view(data.numel() // own.numel(), -1) if inverse is None else own.view(1, -1)
                self._add_norms(measurement.own, index, rows, inverse)
        return inverse

    def _inverse(self, index: int) -> list[Tensor] | None:
        """The optimizer's metric on this rank's rows of a layer. None if it is not known for all of them."""
        assert self._preconditioner is not None
        groups = self._measured_of(index).groups
        self._preconditioner.beta_exponent = self._beta_exponent()
        return self._preconditioner.inverse(groups)

    def _add_norms(self, sums: _NormList, index: int, rows: Tensor, inverse: list[Tensor] | None) -> None:
        """Norms of a layer's gradient: some ranks' rows, as FSDP2 lays them out; with a metric, this rank's alone."""
        group, measured = self._groups[index], self._measured_of(index)
        if rows.size(1) != group.size:  # a parameter had no gradient, so the others cannot be told apart
            assert self._measurement is not None
            if inverse is None:
                sums.add(self._parts.norms([rows.reshape(-1)]), (0,))
            else:
                self._measurement.is_void = True
            return
        views = [group.split(row, with_padding=len(rows) > 1) or [] for row in rows]
        gradients = [row[place] for row in views for place in measured.places]
        if gradients:
            if inverse is not None:  # not in place: the metric is used again for the mean
                gradients = list(torch._foreach_mul([one.reshape(-1) for one in inverse], gradients))
            sums.add(self._parts.norms(gradients), measured.identities * len(rows))

    def _by_part(self, sums: _NormList) -> Tensor:
        """(NUM_PARTS,) squared norms."""
        if not sums.norms:
            return torch.zeros(NUM_PARTS, device=self._team.device)
        return self._parts.add_up(sums.norms, sums.identities, 1.0)

    def _measured_of(self, index: int) -> _Measured:
        measured = self._measured.get(index)
        if measured is None:
            parameters = self._groups[index].parameters
            options = [self._options.get(id(one)) for one in parameters]
            order = list(dict.fromkeys(id(one) for one in options if one is not None))
            places = sorted(
                (place for place, one in enumerate(options) if one is not None),
                key=lambda place: order.index(id(options[place])),
            )
            groups = [
                (next(one for one in options if one is not None and id(one) == key),
                 [parameters[place] for place in places if id(options[place]) == key])
                for key in order
            ]  # fmt: skip
            identities = tuple(id(parameters[place]) for place in places)
            measured = self._measured[index] = _Measured(places, identities, groups)
        return measured


def _weigh(data: Tensor, weight: float) -> None:
    if weight == 0.0:
        data.zero_()  # not a product: the gradient of a filler may be infinite
    elif weight != 1.0:
        data.mul_(weight)


def _like(parameter: DTensor, flat: Tensor) -> Tensor:
    return DTensor.from_local(
        flat.view_as(parameter.to_local()),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


@contextmanager
def _costs(measurement: _Measurement, tensor: Tensor) -> Iterator[None]:
    begun, marks = time.perf_counter(), None
    if tensor.is_cuda:
        marks = _timing_event(), _timing_event()
        marks[0].record()
    yield
    if marks is not None:
        marks[1].record()
        measurement.marks.append(marks)
    measurement.host_s += time.perf_counter() - begun


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
