"""Averages a sharded model's gradients over replicas, accumulates them over passes, and measures their norms.

The counterpart of :class:`~pollux.train.gradients.GradientHook` for FSDP2, which calls it in place of its own
collectives: :meth:`ShardedGradients.gather` before a layer runs, and :meth:`ShardedGradients.reduce` with a layer's
gradient, flat, when its backward pass is over.

- Gradients are weighted by n/N before they are added up, so the sum is the mean over all examples of the step.
- The reduced gradient of a pass that is not the step's last is kept, sharded, and ``.grad`` gets zeros. The last pass
  adds it. So accumulation takes one shard of memory, and each pass one more reduce-scatter.
- With copies of the shards, replicas agree before each step that all have their gradients.
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
from pollux.train.noise import WARM_UP_STEPS, GroupOptions, Preconditioner, squared_norm, weighed
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
class _Measurement:
    own: list[Tensor] = field(default_factory=list)  # (NUM_PARTS,) by pass and layer
    mean: list[Tensor] = field(default_factory=list)  # (NUM_PARTS,) by layer, of this rank's rows
    is_void: bool = False
    host_s: float = 0.0
    marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)


class _Comm:
    """What FSDP2 calls in place of its own all-gather or reduce-scatter."""

    def __init__(self, call: Callable[[Tensor, Tensor, dist.ProcessGroup], None]) -> None:
        self._call = call

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, *_: object, **__: object
    ) -> None:
        self._call(output_tensor, input_tensor, group)


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
    ) -> None:
        self._optimizer, self._team = optimizer, team
        self._preconditioner = Preconditioner.for_optimizer(optimizer)
        self.warm_up_steps = 0 if self._preconditioner is None else WARM_UP_STEPS
        self._beta_exponent, self._on_ready, self._on_last = beta_exponent, on_ready, on_last
        self._groups: list[ShardGroup] = []
        self._options: dict[int, GroupOptions] = {}  # by parameter's identity
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
        for index, group in enumerate(groups):
            group.module.set_custom_all_gather(_Comm(self.gather))
            group.module.set_custom_reduce_scatter(_Comm(partial(self.reduce, index)))
            group.module.set_all_reduce_hook(partial(self.reduce_alone, index))
            # Sums, not means: the weights are n/N.
            group.module.set_force_sum_reduction_for_comms(True)
            group.module.set_gradient_divide_factor(1.0)

    def bind(self) -> None:
        """The optimizer has the parameters of the new group."""
        self._options = {id(one): group for group in self._optimizer.param_groups for one in group["params"]}
        self._parts = ParameterParts(self._optimizer)

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
        if measurement is None or measurement.is_void or not measurement.mean:
            return None
        return Norms(
            torch.stack(measurement.own or [torch.zeros_like(measurement.mean[0])]).sum(0),
            torch.stack(measurement.mean).sum(0),
            measurement.host_s,
            tuple(measurement.marks),
        )

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

    def abandon(self, reason: BaseException) -> None:
        """Send nothing more. A collective under way ends by itself. May be called from another thread."""
        self.failure = self.failure or reason

    # --- what FSDP2 calls --------------------------------------------------------------------------------------

    def gather(self, output: Tensor, data: Tensor, group: dist.ProcessGroup) -> None:
        self._try(output, lambda: _all_gather(output, data, group=group, async_op=True))

    @torch.no_grad()
    def reduce(self, index: int, output: Tensor, data: Tensor, group: dist.ProcessGroup) -> None:
        """The gradient of a layer: ``data`` of all rows, ``output`` for the sum of this rank's."""
        plan = self._begin(index)
        own = data.view(group.size(), -1)[group.rank()]
        self._measure_own(index, data, own, group.size(), plan)
        _weigh(data, plan.weight)
        if output.is_cuda:
            self._try(output, lambda: _reduce_scatter(output, data, group=group, async_op=True))
        else:
            # gloo's own reduce-scatter is an all-reduce too, and cannot be given up when a peer is lost.
            self._try(data, lambda: dist.all_reduce(data, group=group, async_op=True))
            output.copy_(own)
        self._complete(index, output, plan)

    @torch.no_grad()
    def reduce_alone(self, index: int, output: Tensor) -> None:
        """With one shard FSDP2 reduces nothing, and the gradient is here. Otherwise it has come to :meth:`reduce`."""
        if self._num_shards > 1:
            return
        plan = self._begin(index)
        self._measure_own(index, output, output, 1, plan)
        _weigh(output, plan.weight)
        self._complete(index, output, plan)

    @property
    def _num_shards(self) -> int:
        return self._team.size // (1 if self._copies is None else self._copies.size())

    def _begin(self, index: int) -> PassPlan:
        if index in self._arrived and self._measurement is not None:
            self._measurement.is_void = True  # a second backward(): the norm of a sum does not follow from its parts'
        self._arrived.add(index)
        if not self._is_ending:
            # FSDP2's own callback was queued before, at the beginning of the backward pass, so this one comes after it.
            self._is_ending = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        return self._plan or PassPlan(weight=1.0 / self._team.size)  # outside the loop: plain averaging

    def _complete(self, index: int, output: Tensor, plan: PassPlan) -> None:
        copies = self._copies
        if copies is not None:
            self._try(output, lambda: dist.all_reduce(output, group=copies, async_op=True))
        earlier = self._accumulated.pop(index, None)
        if earlier is not None:
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
                norm = self._squared_norms(index, output.view(1, -1))
                if norm is None:
                    measurement.is_void = True
                else:
                    measurement.mean.append(norm / (1 if copies is None else copies.size()))

    def _try(self, output: Tensor, start: Callable[[], dist.Work]) -> None:
        """Run a collective. Zeros if the group has failed, now or before."""
        if self.failure is None:
            try:
                self._team.finish(start(), output)
                if output.is_cuda:
                    self.sums.note()
                return
            except RuntimeError as error:
                self.failure = self.failure or error
        output.zero_()

    def _end_backward(self) -> None:
        self._is_ending = False
        plan = self._plan
        if plan is not None and plan.is_last:
            self._give_unused()
            self._agree()
        self._on_ready()
        if plan is not None and plan.is_last and self.failure is None:
            self._on_last()

    def _agree(self) -> None:
        """With copies of the shards: go on only if all replicas have their gradients.

        A lost replica may have summed with the replicas of its shards, and not with its copy. Without this, some shards
        would make the step and others would not, and the state would be lost. The host waits for the device here.
        """
        if self._copies is None:
            return
        flag = torch.zeros(1, device=self._team.device)
        self._try(flag, lambda: dist.all_reduce(flag, async_op=True))
        if self.failure is None:
            try:
                self._team.settle()
            except PeerLostError as error:
                self.failure = self.failure or error

    @torch.no_grad()
    def _give_unused(self) -> None:
        """Layers that earlier passes used, and the last one did not: their gradients are complete as they are."""
        for index, flat in self._accumulated.items():
            for parameter, view in self._groups[index].split(flat) or ():
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
            norm /= 1 if self._copies is None else self._copies.size()
            self._try(norm, lambda: dist.all_reduce(norm, async_op=True))
        norm = norm.sqrt()
        if grads:
            torch._foreach_mul_(grads, (max_norm / (norm + 1e-6)).clamp(max=1.0))  # as torch's clip_grad_norm_
        return norm

    # --- measuring ---------------------------------------------------------------------------------------------

    def _measure_own(self, index: int, data: Tensor, own: Tensor, num_shards: int, plan: PassPlan) -> None:
        """This replica's own gradient: all of it, or its own rows where the metric is sharded."""
        measurement = self._measurement
        if measurement is None or measurement.is_void or plan.weight <= 0:
            return
        with _costs(measurement, data):
            if self._preconditioner is None:
                norm = self._squared_norms(index, data.view(num_shards, -1))
            elif (norm := self._squared_norms(index, own.view(1, -1))) is not None:
                norm *= num_shards  # the sum over replicas counts every row once in num_shards
            if norm is None:
                measurement.is_void = True
            else:
                measurement.own.append(norm)

    def _squared_norms(self, index: int, shards: Tensor) -> Tensor | None:
        """(NUM_PARTS,) |x|² of some ranks' rows, in the optimizer's metric. None if it is not known for all of them.

        ``shards``: a row for each rank, as FSDP2 lays out a layer's gradient. With a metric, this rank's alone.
        """
        views: dict[int, list[Tensor]] = {}  # of each parameter, by shard
        members: dict[int, nn.Parameter] = {}
        for shard in shards:
            pairs = self._groups[index].split(shard, with_padding=len(shards) > 1)
            if pairs is None:  # a parameter had no gradient, so the others cannot be told apart
                return None if self._preconditioner else self._parts.squared_norms([shards.reshape(-1)], (0,), 1.0)
            for parameter, view in pairs:
                if id(parameter) in self._options:  # otherwise not the optimizer's
                    members[id(parameter)] = parameter
                    views.setdefault(id(parameter), []).append(view)
        if not members:
            return torch.zeros(NUM_PARTS, device=shards.device)
        if self._preconditioner is None:
            identities = tuple(key for key, several in views.items() for _ in several)
            return self._parts.squared_norms([one for several in views.values() for one in several], identities, 1.0)
        groups: dict[int, tuple[GroupOptions, list[nn.Parameter]]] = {}
        for key, parameter in members.items():
            options = self._options[key]
            if not self._preconditioner.is_ready([(options, [parameter])]):
                return None
            groups.setdefault(id(options), (options, []))[1].append(parameter)
        self._preconditioner.beta_exponent = self._beta_exponent()
        chosen = list(groups.values())
        inverse = self._preconditioner.inverse(chosen, is_known_ready=True)
        if not inverse:
            return torch.zeros(NUM_PARTS, device=shards.device)
        identities = tuple(id(one) for _, stepped in chosen for one in stepped)
        gradients = [views[key][0] for key in identities]
        return self._parts.squared_norms(weighed([one.reshape(-1) for one in inverse], gradients), identities, 1.0)


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
