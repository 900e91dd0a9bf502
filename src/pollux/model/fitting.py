"""Fits θ of the throughput model to a profile (OSDI'21, section 4.1). Scheduler and jobs call it.

Minimises

    RMSLE(T_grad) + RMSLE(T_step) + 1e-3·(γ-1)² + 1e-2·(δ-1)² + w·((β_n/α_n)² + (β_r/α_r)²)

over α, β >= 1e-8, 1 <= γ <= 10 and 1 <= δ <= 2. The published model has δ = 1 and w = 1e-2 (``is_published``). Ours has
w = 1e-4, because T_sync is bounded: β is what infinitely many replicas add, not what each does.

Times vary over orders of magnitude, so α and β are searched by their logarithms: the same minimum, better conditioned.
The loss is a sum of norms of smooth residuals, which a damped Gauss-Newton step (Levenberg-Marquardt, each norm
replaced by the parabola that touches it from above) descends in a dozen cheap iterations where L-BFGS-B needs forty;
the tests hold it against L-BFGS-B.

Priors make what is unexplored look good, so that jobs explore: see :meth:`_Problem.fix_the_unexplored`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pollux.errors import FitError
from pollux.model.profile import Observations
from pollux.model.throughput import (
    ALPHA_G,
    ALPHA_N,
    ALPHA_R,
    BETA_G,
    BETA_N,
    BETA_R,
    DELTA,
    GAMMA,
    iteration_s,
)
from pollux.types import FloatArray, ShapeFactor, ShapeFactors, ThroughputParams

LOWER_BOUND = 1e-8  # of α and β, in seconds; these five numbers are the OSDI'21 artifact's
MAX_GAMMA = 10.0
_GAMMA_WEIGHT = 1e-3
_DELTA_WEIGHT = 1e-2  # lets δ leave 1 where three batch sizes or more show a curve
_PUBLISHED_RATIO_WEIGHT = 1e-2
_RATIO_WEIGHT = 1e-4  # 1e-3 forgets a third of how T_sync of deepspeech2 grows from 2 to 4 replicas (docs/truth.md)
MAX_DELTA = 2.0
_NUM_SEARCHED = 8  # coordinates of x
_ACROSS_NODES = 1.1  # without multi-node data, synchronisation across nodes takes this much longer than within one
_SMOOTH = 1e-6  # rounds off the tip of the square root where the fit is perfect; far below any measured error

_LOG_LOWER = math.log(LOWER_BOUND)
_LOWER = np.array([_LOG_LOWER] * 6 + [1.0, 1.0])
_UPPER = np.array([math.log(1e6)] * 6 + [MAX_GAMMA, MAX_DELTA])
_MAX_ITERATIONS = 100  # a dozen are usual
_TOLERANCE = 1e-4  # relative decrease of the loss below which the search ends; step times are known to 1 % at best
_MAX_DAMPING = 1e8  # at this damping steps are too small to matter: there is no descent any more
_POOR = 0.15  # loss above which the fit may be a local minimum: a good one explains step times to some percent


@dataclass(frozen=True, slots=True)
class Fit:
    """θ, how well it explains the data, and whether it is new (or the last good one, and why).

    Seven parameters for all placements leave errors of some percent; ``shape_factors`` are these errors for each
    measured number of replicas.
    """

    params: ThroughputParams
    rmsle_grad: float
    rmsle_step: float
    shape_factors: ShapeFactors = ()
    has_converged: bool = True
    message: str = ""


def fit(observations: Observations, last_good: ThroughputParams | None = None, *, is_published: bool = False) -> Fit:
    """θ that explains ``observations`` best; ``last_good`` is a second place to start from, and the fall-back.

    ``is_published``: of the paper's model, as its artifact fits it.

    Raises:
        FitError: the search failed and there is no ``last_good``.
    """
    problem = _Problem(observations, is_published=is_published)
    with np.errstate(all="ignore"):
        starts = [problem.initial_guess()]
        if last_good is not None:
            starts.append(problem.project(np.array(last_good)))
        x, value = _descend(problem, min(starts, key=lambda start: problem.expand(start)[0]))
        if not value < _POOR:  # it may be a local minimum: try another start
            x, value = min((x, value), _descend(problem, problem.initial_guess(overlaps=True)), key=_loss_of)
    if not math.isfinite(value):
        message = "the fit of the throughput model did not converge"
        if last_good is None:
            raise FitError(f"{message}, and there is no earlier fit to fall back to")
        return Fit(last_good, math.nan, math.nan, has_converged=False, message=f"{message}; keeping the last good one")
    rmsle_grad, rmsle_step = problem.errors(x)
    theta = problem.to_theta(x)
    if not problem.has_multi_node:
        theta[ALPHA_N] = max(theta[ALPHA_N], _ACROSS_NODES * theta[ALPHA_R])
        theta[BETA_N] = max(theta[BETA_N], _ACROSS_NODES * theta[BETA_R])
    params = ThroughputParams(*theta.tolist())._replace(ring=float(not is_published))
    return Fit(params, rmsle_grad, rmsle_step, _shape_factors(observations, params))


def _loss_of(found: tuple[FloatArray, float]) -> float:
    return found[1] if math.isfinite(found[1]) else math.inf


def _shape_factors(data: Observations, params: ThroughputParams) -> ShapeFactors:
    """Geometric mean of predicted to measured step time, for each measured shape."""
    predicted = iteration_s(params, data.num_nodes, data.num_replicas, data.device_batch)
    ratios: dict[tuple[bool, int], list[float]] = {}
    for nodes, replicas, log_ratio in zip(
        data.num_nodes.tolist(), data.num_replicas.tolist(), np.log(predicted / data.step_s).tolist(), strict=True
    ):
        ratios.setdefault((nodes > 1, int(replicas)), []).append(log_ratio)
    return tuple(
        ShapeFactor(spans, replicas, math.exp(sum(logs) / len(logs)))
        for (spans, replicas), logs in sorted(ratios.items())
    )


def _descend(problem: _Problem, x: FloatArray) -> tuple[FloatArray, float]:
    """Damped Gauss-Newton from ``x``, staying inside the bounds."""
    damping = 1e-3
    value, slope, curvature = problem.expand(x)
    for _ in range(_MAX_ITERATIONS):
        stuck = ~problem.free | ((x <= _LOWER) & (slope > 0)) | ((x >= _UPPER) & (slope < 0))
        if stuck.all():
            break
        hessian, target = curvature.copy(), -slope
        hessian[stuck] = 0.0
        hessian[:, stuck] = 0.0
        target[stuck] = 0.0
        scale = hessian.diagonal() + 1e-9
        improved = False
        while damping < _MAX_DAMPING:
            damped = hessian.copy()
            damped.flat[:: _NUM_SEARCHED + 1] += damping * scale  # the diagonal
            step = np.linalg.solve(damped, target)
            trial = np.minimum(np.maximum(x + np.minimum(np.maximum(step, -3.0), 3.0), _LOWER), _UPPER)
            trial_value, trial_slope, trial_curvature = problem.expand(trial)
            if trial_value < value:
                improved = True
                break
            damping *= 5.0
        if not improved:
            break
        gained = value - trial_value
        x, value, slope, curvature = trial, trial_value, trial_slope, trial_curvature
        damping = max(damping * 0.1, 1e-9)
        if gained <= _TOLERANCE * value:
            break
    return x, value


class _Problem:
    """The loss over x = (log α_g, log b, log α_n, log β_n, log α_r, log β_r, γ, δ).

    b is the slope of T_grad's chord at the mean batch m̄, β_g·m̄^(δ-1): it hardly depends on δ, which β_g does.
    """

    def __init__(self, data: Observations, *, is_published: bool = False) -> None:
        self.ratio_weight = _PUBLISHED_RATIO_WEIGHT if is_published else _RATIO_WEIGHT
        is_parallel = data.num_replicas > 1
        spans = is_parallel & (data.num_nodes > 1)
        self.m = data.device_batch
        self.mean_m = math.exp(float(np.mean(np.log(data.device_batch))))
        self.log_m = np.log(data.device_batch / self.mean_m)
        self.spans = spans.astype(float)
        self.local = (is_parallel & ~spans).astype(float)
        self.extra = np.maximum(data.num_replicas - 2, 0.0)
        if not is_published:
            self.extra /= np.maximum(data.num_replicas, 2)
        self.grad_s, self.step_s = data.grad_s, data.step_s
        self.log_grad, self.log_step = np.log(data.grad_s), np.log(data.step_s)
        self.has_multi_node = bool(spans.any())
        self.has_local = bool(self.local.any())
        self.fixed_x = np.array([_LOG_LOWER] * 6 + [1.0, 1.0])
        self.free = self.fix_the_unexplored(data)
        if is_published:
            self.free[DELTA] = False

    def to_theta(self, x: FloatArray) -> FloatArray:
        theta = np.exp(x)
        theta[GAMMA], theta[DELTA] = x[GAMMA], x[DELTA]
        theta[BETA_G] *= self.mean_m ** (1.0 - x[DELTA])
        return theta

    def fix_the_unexplored(self, data: Observations) -> npt.NDArray[np.bool_]:
        """Which parameters the data determine; the others have optimistic values in ``fixed_x``.

        One batch size seen: α_g is half the mean T_grad. Fewer than three: δ is 1. No multi-node (no local
        multi-replica) observation: α_n, β_n (α_r, β_r) at the lower bound. At most two replicas seen: both β.
        """
        free = np.ones(_NUM_SEARCHED, dtype=bool)
        free[DELTA] = len(np.unique(data.device_batch)) >= 3
        if np.all(data.device_batch == data.device_batch[0]):
            self.fixed_x[ALPHA_G] = math.log(max(float(np.mean(data.grad_s)) / 2, LOWER_BOUND))
            free[ALPHA_G] = False
        if not self.has_multi_node:
            free[[ALPHA_N, BETA_N]] = False
        if not self.has_local:
            free[[ALPHA_R, BETA_R]] = False
        if np.all(data.num_replicas <= 2):
            free[[BETA_N, BETA_R]] = False
        if not (self.has_multi_node or self.has_local):
            free[GAMMA] = False
        return free

    def initial_guess(self, overlaps: bool = False) -> FloatArray:
        """Straight lines through the measured times: close enough that few steps remain.

        ``overlaps``: computing is hidden behind communication, rather than both adding up.
        """
        theta = self.to_theta(self.fixed_x)
        mean_m, mean_t = float(np.mean(self.m)), float(np.mean(self.grad_s))
        if self.free[ALPHA_G]:
            centred = self.m - mean_m
            slope = float(centred @ self.grad_s) / float(centred @ centred)
            slope = min(max(slope, 0.01 * mean_t / mean_m), 0.99 * mean_t / mean_m)
            theta[BETA_G], theta[ALPHA_G] = slope, mean_t - slope * mean_m
        else:
            theta[BETA_G] = (mean_t - theta[ALPHA_G]) / mean_m
        sync = self.step_s if overlaps else np.maximum(self.step_s - self.grad_s, 0.05 * self.grad_s)
        for mask, alpha, beta in ((self.spans, ALPHA_N, BETA_N), (self.local, ALPHA_R, BETA_R)):
            if self.free[alpha]:
                mean_sync = float(sync @ mask) / float(mask.sum())
                mean_extra = float(self.extra @ mask) / float(mask.sum())
                theta[alpha], theta[beta] = 0.8 * mean_sync, 0.2 * mean_sync / (1.0 + mean_extra)
        theta[GAMMA] = 5.0 if overlaps else 1.3
        return self.project(theta)

    def project(self, theta: FloatArray) -> FloatArray:
        """θ as a point of this problem: logarithms, inside the bounds, fixed coordinates in place."""
        theta = np.append(theta, 1.0)[:_NUM_SEARCHED] if len(theta) < _NUM_SEARCHED else theta[:_NUM_SEARCHED].copy()
        theta[BETA_G] *= self.mean_m ** (theta[DELTA] - 1.0)
        x = np.log(np.maximum(theta, LOWER_BOUND))
        x[GAMMA], x[DELTA] = theta[GAMMA], theta[DELTA]
        # A parameter that was not determined before is at its bound, where the logarithm has no slope.
        unborn = self.free & (np.arange(_NUM_SEARCHED) < GAMMA) & (x < _LOG_LOWER + 1.0)
        if unborn.any():
            x[unborn] = math.log(0.1 * float(np.mean(self.step_s)))
        return np.where(self.free, np.minimum(np.maximum(x, _LOWER), _UPPER), self.fixed_x)

    def errors(self, x: FloatArray) -> tuple[float, float]:
        """RMSLE of T_grad and of T_step."""
        theta = self.to_theta(x)
        grad, sync = self._times(theta)
        step = np.maximum(grad, sync) * _overlap_factor(grad, sync, theta[GAMMA])
        return _rms(np.log(grad) - self.log_grad), _rms(np.log(step) - self.log_step)

    def _times(self, theta: FloatArray) -> tuple[FloatArray, FloatArray]:
        grad = theta[ALPHA_G] + theta[BETA_G] * self.m ** theta[DELTA]
        sync = self.spans * (theta[ALPHA_N] + theta[BETA_N] * self.extra)
        sync += self.local * (theta[ALPHA_R] + theta[BETA_R] * self.extra)
        return grad, sync

    def expand(self, x: FloatArray) -> tuple[float, FloatArray, FloatArray]:
        """Loss, gradient and Gauss-Newton curvature at ``x``."""
        theta = self.to_theta(x)
        alpha_g, _, alpha_n, beta_n, alpha_r, beta_r, gamma, delta = theta.tolist()
        n = len(self.m)
        grad, sync = self._times(theta)

        # d log T / dx: the first n columns for T_grad, the others for T_step.
        jac, errors = np.zeros((_NUM_SEARCHED, 2 * n)), np.empty(2 * n)
        share_alpha = alpha_g / grad
        jac[ALPHA_G, :n], jac[BETA_G, :n] = share_alpha, 1.0 - share_alpha
        jac[DELTA, :n] = (1.0 - share_alpha) * self.log_m
        log_grad = np.log(grad)
        np.subtract(log_grad, self.log_grad, out=errors[:n])
        if self.has_multi_node or self.has_local:
            ratio = sync / grad
            power = ratio**gamma
            share_grad = 1.0 / (1.0 + power)
            log_norm = -np.log(share_grad)
            errors[n:] = log_grad + log_norm / gamma - self.log_step
            for row in (ALPHA_G, BETA_G, DELTA):
                np.multiply(jac[row, :n], share_grad, out=jac[row, n:])
            share_sync = 1.0 - share_grad
            per_sync = share_sync / np.maximum(sync, 1e-300)
            per_sync_n, per_sync_r = per_sync * self.spans, per_sync * self.local
            jac[ALPHA_N, n:] = alpha_n * per_sync_n
            jac[BETA_N, n:] = beta_n * (self.extra * per_sync_n)
            jac[ALPHA_R, n:] = alpha_r * per_sync_r
            jac[BETA_R, n:] = beta_r * (self.extra * per_sync_r)
            jac[GAMMA, n:] = (share_sync * np.log(np.maximum(ratio, 1e-300)) - log_norm / gamma) / gamma
        else:
            np.subtract(log_grad, self.log_step, out=errors[n:])
            for row in (ALPHA_G, BETA_G, DELTA):
                jac[row, n:] = jac[row, :n]

        rmsle_grad = math.sqrt(float(errors[:n] @ errors[:n]) / n + _SMOOTH)
        rmsle_step = math.sqrt(float(errors[n:] @ errors[n:]) / n + _SMOOTH)
        weighted = jac.copy()
        weighted[:, :n] /= n * rmsle_grad
        weighted[:, n:] /= n * rmsle_step
        slope, curvature = weighted @ errors, weighted @ jac.T

        ratio_n, ratio_r = beta_n / alpha_n, beta_r / alpha_r
        weight = self.ratio_weight
        priors = _GAMMA_WEIGHT * (gamma - 1.0) ** 2 + weight * (ratio_n**2 + ratio_r**2)
        priors += _DELTA_WEIGHT * (delta - 1.0) ** 2
        slope[DELTA] += 2 * _DELTA_WEIGHT * (delta - 1.0)
        curvature[DELTA, DELTA] += 2 * _DELTA_WEIGHT
        slope[GAMMA] += 2 * _GAMMA_WEIGHT * (gamma - 1.0)
        curvature[GAMMA, GAMMA] += 2 * _GAMMA_WEIGHT
        for alpha, beta, pull in (
            (ALPHA_N, BETA_N, 2 * weight * ratio_n**2),
            (ALPHA_R, BETA_R, 2 * weight * ratio_r**2),
        ):
            slope[alpha] -= pull
            slope[beta] += pull
            curvature[alpha, alpha] += pull
            curvature[beta, beta] += pull
            curvature[alpha, beta] -= pull
            curvature[beta, alpha] -= pull
        return rmsle_grad + rmsle_step + priors, slope, curvature


def _overlap_factor(grad: FloatArray, sync: FloatArray, gamma: float) -> FloatArray:
    longer = np.maximum(grad, sync)
    factor: FloatArray = ((grad / longer) ** gamma + (sync / longer) ** gamma) ** (1.0 / gamma)
    return factor


def _rms(errors: FloatArray) -> float:
    return math.sqrt(float(np.mean(errors**2)))
