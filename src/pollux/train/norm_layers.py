"""Measures the noise scale of the normalisation layers' weights, to check the whole model's (Gray et al., 2024).

The session calls it on measured steps, on rank 0. Per-example gradients of a whole model are expensive. Those of the
weights and biases of LayerNorm, RMSNorm, GroupNorm and BatchNorm are cheap: example i's share of the batch's gradient
is the sum of ∂L/∂output·x̂ over its positions, x̂ being the normalised input, and of ∂L/∂output for a bias. So one pass
over n examples gives |G|² and tr(Σ) of these weights, from n gradients of one example each. Their noise scale
follows that of the whole model (arXiv 2411.00999).

- :class:`NormLayers` measures one pass. It puts hooks on the layers for that pass only.
- :class:`NormNoise` averages the samples, and reports when the two noise scales contradict each other.

Layers whose input does not have the examples in dimension 0 are left out. So are layers in a compiled module, as
compiled code does not call hooks added later. BatchNorm couples examples through its statistics: an example's share is
then what its own positions add to the gradient.

Nothing here waits for the device. Letters as in :mod:`pollux.train.noise`.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pollux.train.moments import CONFIDENCE, GradientMoments, MomentsState, NoiseStats
from pollux.train.noise import GroupOptions, Preconditioner
from pollux.train.pending_scalars import MAX_UNREAD
from pollux.train.step_exchange import MIN_SAMPLES

MAX_ELEMENTS = 1 << 24  # of an input that are normalised at once, so that a float32 copy takes at most 64 MB
TOLERANCE = 0.05  # relative error allowed between a gradient and the sum of its shares; half precision needs a few %
# Factor between the bounds of the two noise scales that counts as a contradiction. Layers differ in their noise scales
# by less; a lower factor would report such differences.
CONTRADICTION = 10.0
TWO_SIDED = 1.96  # standard errors of a two-sided 95 % bound

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)  # not SyncBatchNorm: its statistics are not local
_KINDS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, *_BATCH_NORMS)

Marks = tuple[torch.cuda.Event, torch.cuda.Event]


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSample:
    """One pass's sample for the normalisation layers' weights, as 0-d tensors on the device."""

    num_examples: int  # n, the number of gradients, of one example each
    mean_sqr: Tensor  # mean|g_i|²
    sqr_mean: Tensor  # |ḡ|²
    host_s: float = 0.0  # host time that measuring took
    marks: tuple[Marks, ...] = ()  # device events before and after measuring

    @property
    def sqr(self) -> Tensor:
        """An unbiased estimate of |G|²; it may be negative."""
        n = self.num_examples
        return (n * self.sqr_mean - self.mean_sqr) / (n - 1)

    @property
    def var(self) -> Tensor:
        """An unbiased estimate of tr(Σ) of one example."""
        n = self.num_examples
        return (self.mean_sqr - self.sqr_mean) * (n / (n - 1))


@dataclass(slots=True)
class _Measurement:
    """One pass under way."""

    num_examples: int
    shares: dict[Tensor, Tensor] = field(default_factory=dict)  # by parameter: (n, size), added up over its uses
    wholes: dict[Tensor, Tensor] = field(default_factory=dict)  # by parameter: the pass's gradient, from autograd
    host_s: float = 0.0
    marks: list[Marks] = field(default_factory=list)
    is_over: bool = False  # hooks of a graph that outlives its pass do nothing then


class NormLayers:
    """``begin`` before a forward pass, ``end_pass`` after its backward pass, ``take`` before the optimizer's step.

    With Adam, RMSprop and the like, gradients are measured in the optimizer's metric, as for the whole model.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        loss_scale: Callable[[], Tensor | float] = lambda: 1.0,
        beta_exponent: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self.layers = list(dict.fromkeys(_find(module)))
        self._optimizer = optimizer
        self._preconditioner = None if optimizer is None else Preconditioner.for_optimizer(optimizer)
        self._loss_scale, self._beta_exponent = loss_scale, beta_exponent
        self._measurement: _Measurement | None = None
        self._handles: list[RemovableHandle] = []

    @property
    def is_measuring(self) -> bool:
        return self._measurement is not None

    def begin(self, num_examples: int) -> None:
        """Measure the next pass, if it has two examples or more and the layers have trained weights."""
        self.clear()
        parameters = dict.fromkeys(one for layer in self.layers for one in _affine(layer))
        if num_examples < 2 or not parameters:
            return
        measurement = self._measurement = _Measurement(num_examples)
        for layer in self.layers:
            if _affine(layer):
                self._handles.append(layer.register_forward_hook(self._on_forward))
        for parameter in parameters:
            on_whole = partial(_on_whole, measurement, parameter)
            self._handles.append(parameter.register_hook(on_whole))  # type: ignore[no-untyped-call]

    def end_pass(self) -> None:
        """Remove the hooks. The measurement stays until it is taken."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def clear(self) -> None:
        """Forget the pass under way, or the last one."""
        self.end_pass()
        if self._measurement is not None:
            self._measurement.is_over = True
            self._measurement = None

    @torch.no_grad()
    def take(self) -> NormSample | None:
        """The sample of the pass, once. Call it before the optimizer's step: v̂ must not include this gradient yet."""
        measurement = self._measurement
        self.clear()
        if measurement is None:
            return None
        with _costs(measurement, next(iter(measurement.shares.values()), None)):
            sums = self._sums(measurement)
        if sums is None:
            return None
        count, (sum_sqr, sqr_sum) = measurement.num_examples, sums
        # With a mean loss an example's own gradient is n times its share, so their mean is the sum of the shares.
        return NormSample(
            num_examples=count,
            mean_sqr=sum_sqr * count,
            sqr_mean=sqr_sum,
            host_s=measurement.host_s,
            marks=tuple(measurement.marks),
        )

    def _sums(self, measurement: _Measurement) -> tuple[Tensor, Tensor] | None:
        """Σ|share|² and |Σ share|² over the parameters whose shares add up to their gradient; None without any."""
        known = [parameter for parameter in measurement.shares if parameter in measurement.wholes]
        inverse: list[Tensor] | None = None
        if self._preconditioner is not None:
            known, inverse = self._preconditioned(known)
        if not known:
            return None
        shares = torch.cat([measurement.shares[parameter] for parameter in known], dim=1)  # (n, all sizes)
        whole = torch.cat([measurement.wholes[parameter] for parameter in known])
        scale = self._loss_scale()
        shares, whole = shares / scale, whole / scale  # before squaring, which might overflow float32
        total = shares.sum(0)
        missed, size = (total - whole).square(), whole.square()
        if inverse is not None:
            weights = torch.cat([one.reshape(-1) for one in inverse])
            shares, total = shares * weights, total * weights
        sums = torch.stack((shares.square().sum(0), total.square(), missed, size))  # (4, all sizes)
        parts = torch.split(sums, [parameter.numel() for parameter in known], dim=1)
        sum_sqr, sqr_sum, missed, size = torch.stack([part.sum(1) for part in parts], dim=1)  # by parameter
        # Where the shares do not add up to the gradient, the weight is also used outside the layer's forward pass: by a
        # penalty on the weights, a second backward pass, or a subclass with its own forward.
        adds_up = missed <= TOLERANCE**2 * size
        return (sum_sqr * adds_up).sum().float(), (sqr_sum * adds_up).sum().float()

    def _preconditioned(self, known: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The parameters that the optimizer has stepped before, and the inverse metric of each."""
        assert self._optimizer is not None and self._preconditioner is not None
        groups: list[tuple[GroupOptions, list[Tensor]]] = []
        wanted = set(map(id, known))
        for options in self._optimizer.param_groups:
            members = [one for one in options["params"] if id(one) in wanted]
            ready = [one for one in members if self._preconditioner.is_ready([(options, [one])])]
            groups.append((options, ready))
        self._preconditioner.beta_exponent = self._beta_exponent()
        inverse = self._preconditioner.inverse(groups, is_known_ready=True) or []
        return [one for _, ready in groups for one in ready], inverse

    def _on_forward(self, layer: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        measurement = self._measurement
        if measurement is None or torch.compiler.is_compiling():
            return
        x = inputs[0] if inputs else None
        if not isinstance(x, Tensor) or not isinstance(output, Tensor) or not output.requires_grad:
            return
        if output.shape != x.shape or not _has_examples_first(layer, x, measurement.num_examples):
            return
        x = x.detach()
        kept = [(x, x._version)]  # emptied by the hook, so that a graph that lives on does not keep the input in memory
        is_by_batch = layer.training or getattr(layer, "running_mean", None) is None
        on_gradient = partial(_on_gradient, measurement, layer, kept, is_by_batch)
        output.register_hook(on_gradient)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class _Unread:
    num_examples: int
    weight: float
    values: Tensor  # (2,) on the host: mean|g_i|², |ḡ|²
    event: torch.cuda.Event | None  # passed when the values are there

    @property
    def is_there(self) -> bool:
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]


class NormNoiseState(TypedDict):
    moments: MomentsState
    has_told: bool


class NormNoise:
    """The smoothed noise scale of these weights. ``add`` samples; ``process_arrived`` at later steps."""

    def __init__(self) -> None:
        self.moments = GradientMoments(is_relative=True)
        self.noise: NoiseStats | None = None  # None while there are too few samples
        self._unread: deque[_Unread] = deque(maxlen=MAX_UNREAD)
        self._has_told = False

    def add(self, sample: NormSample, weight: float) -> None:
        """Start copying a sample to the host. ``weight`` is the number of steps at M0 that it counts for."""
        values, event = torch.stack((sample.mean_sqr, sample.sqr_mean)), None
        if values.is_cuda:
            host = torch.empty(2, dtype=values.dtype, pin_memory=True)
            host.copy_(values, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            values = host
        self._unread.append(_Unread(sample.num_examples, weight, values, event))

    def process_arrived(self) -> bool:
        """Add the samples that have arrived to the average. Whether there were any."""
        has_arrived = False
        while self._unread and self._unread[0].is_there:
            one, has_arrived = self._unread.popleft(), True
            mean_sqr, sqr_mean = one.values
            if bool(torch.isfinite(sqr_mean / mean_sqr)):  # else there was no gradient, or the loss scale overflowed
                self.moments.update(mean_sqr, sqr_mean, batch_size=1, count=one.num_examples, scale=one.weight)
        if has_arrived:
            self._read()
        return has_arrived

    def contradiction(self, noise: NoiseStats | None) -> str | None:
        """A message if this noise scale contradicts the whole model's, once; None otherwise.

        They contradict each other if their 95 % bounds lie further apart than a factor of CONTRADICTION.
        """
        if noise is None or self.noise is None or self._has_told:
            return None
        (low, high), (own_low, own_high) = _bounds(noise), _bounds(self.noise)
        if own_low <= high * CONTRADICTION and low <= own_high * CONTRADICTION:
            return None
        self._has_told = True
        return (
            f"the noise scale is {noise.noise_scale:.4g} ± {noise.error:.2g}, but {self.noise.noise_scale:.4g} "
            f"± {self.noise.error:.2g} by the normalisation layers: they differ by more than a factor {CONTRADICTION:g}"
        )

    def _read(self) -> None:
        self.noise = self.moments.read() if self.moments.num_samples >= MIN_SAMPLES else None

    def state_dict(self) -> NormNoiseState:
        return {"moments": self.moments.state_dict(), "has_told": self._has_told}

    def load_state_dict(self, state: NormNoiseState) -> None:
        self.moments.load_state_dict(state["moments"])
        self._has_told = bool(state["has_told"])
        self._read()


def _bounds(noise: NoiseStats) -> tuple[float, float]:
    """95 % bounds of φ: those of :class:`NoiseStats`, widened on a logarithmic scale."""
    phi, power = noise.noise_scale, TWO_SIDED / CONFIDENCE
    if noise.low is None or noise.high is None or not 0 < noise.low <= phi <= noise.high:
        return 0.0, math.inf
    return phi * (noise.low / phi) ** power, phi * (noise.high / phi) ** power


def _find(module: nn.Module) -> Iterator[nn.Module]:
    """All normalisation layers with weights, except in compiled modules."""
    if "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None:
        return
    if isinstance(module, _KINDS) and module._parameters.get("weight") is not None:
        yield module
    for child in module.children():
        yield from _find(child)


def _affine(layer: nn.Module) -> list[nn.Parameter]:
    """The layer's weight and bias, if they are trained."""
    both = (layer._parameters.get(name) for name in ("weight", "bias"))
    return [parameter for parameter in both if parameter is not None and parameter.requires_grad]


def _num_inner(layer: nn.Module) -> int:
    """How many trailing dimensions of the input a weight spans; 0 if it spans dimension 1, the channels."""
    return len(layer.normalized_shape) if isinstance(layer, nn.LayerNorm | nn.RMSNorm) else 0


def _has_examples_first(layer: nn.Module, x: Tensor, num_examples: int) -> bool:
    if x.dim() < 2 or len(x) != num_examples:
        return False
    if isinstance(layer, nn.LayerNorm | nn.RMSNorm):
        inner = _num_inner(layer)
        return x.dim() > inner and tuple(x.shape[-inner:]) == tuple(layer.normalized_shape)
    weight = layer._parameters["weight"]
    return weight is not None and x.shape[1] == weight.numel()


@torch.no_grad()
def _on_whole(measurement: _Measurement, parameter: Tensor, grad: Tensor) -> None:
    if not measurement.is_over:
        _add(measurement.wholes, parameter, _wide(grad.detach()).reshape(-1))


@torch.no_grad()
def _on_gradient(
    measurement: _Measurement, layer: nn.Module, kept: list[tuple[Tensor, int]], is_by_batch: bool, grad: Tensor
) -> None:
    """Hook on a layer's output: add the examples' shares when its gradient is computed."""
    if not kept:
        return  # a second backward pass through the same graph: the shares will not add up
    x, version = kept.pop()
    if measurement.is_over or x._version != version:
        return
    with _costs(measurement, grad):
        for parameter, share in _shares(layer, x, grad.detach(), is_by_batch).items():
            _add(measurement.shares, parameter, share)


def _shares(layer: nn.Module, x: Tensor, grad: Tensor, is_by_batch: bool) -> dict[nn.Parameter, Tensor]:
    """Each example's share in the gradients of the layer's parameters: (n, size) by parameter."""
    weight, inner = layer._parameters["weight"], _num_inner(layer)
    positions = tuple(range(1, x.dim() - inner)) if inner else tuple(range(2, x.dim()))
    normalise = _normaliser(layer, x, is_by_batch)
    rows = _rows(x)
    found: dict[nn.Parameter, list[Tensor]] = {parameter: [] for parameter in _affine(layer)}
    for x_part, grad_part in zip(torch.split(x, rows), torch.split(grad, rows), strict=True):
        grad_part = _wide(grad_part)
        for parameter, shares in found.items():
            product = grad_part * normalise(_wide(x_part)) if parameter is weight else grad_part
            shares.append((product.sum(positions) if positions else product).flatten(1))
    return {parameter: shares[0] if len(shares) == 1 else torch.cat(shares) for parameter, shares in found.items()}


def _normaliser(layer: nn.Module, x: Tensor, is_by_batch: bool) -> Callable[[Tensor], Tensor]:
    """A function that normalises some examples of the layer's input ``x``."""
    if isinstance(layer, nn.LayerNorm):
        return lambda part: F.layer_norm(part, layer.normalized_shape, None, None, layer.eps)
    if isinstance(layer, nn.RMSNorm):
        return lambda part: F.rms_norm(part, layer.normalized_shape, None, layer.eps)
    if isinstance(layer, nn.GroupNorm):
        return lambda part: F.group_norm(part, layer.num_groups, None, None, layer.eps)
    assert isinstance(layer, _BATCH_NORMS)
    mean, var = _batch_statistics(x) if is_by_batch else (layer.running_mean, layer.running_var)
    assert mean is not None and var is not None
    shape = (1, -1) + (1,) * (x.dim() - 2)
    centre, inverse = mean.reshape(shape), (var + layer.eps).rsqrt().reshape(shape)
    return lambda part: (part - centre) * inverse


def _batch_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of each channel, in single precision, part by part to save memory."""
    dims = (0, *range(2, x.dim()))
    count = x.numel() // x.shape[1]
    parts = torch.split(x, _rows(x))
    mean = torch.stack([_wide(part).sum(dims, keepdim=True) for part in parts]).sum(0) / count
    var = torch.stack([(_wide(part) - mean).square().sum(dims) for part in parts]).sum(0) / count
    return mean.reshape(-1), var


def _rows(x: Tensor) -> int:
    return max(MAX_ELEMENTS * len(x) // max(x.numel(), 1), 1)


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def _add(sums: dict[Tensor, Tensor], parameter: Tensor, value: Tensor) -> None:
    """Add to the parameter's sum: a weight may be used more than once in a pass."""
    sums[parameter] = sums[parameter] + value if parameter in sums else value.clone()


@contextmanager
def _costs(measurement: _Measurement, tensor: Tensor | None) -> Iterator[None]:
    begun, marks = time.perf_counter(), None
    if tensor is not None and tensor.is_cuda:
        marks = _timing_event(), _timing_event()
        marks[0].record()
    yield
    if marks is not None:
        marks[1].record()
        measurement.marks.append(marks)
    measurement.host_s += time.perf_counter() - begun


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
