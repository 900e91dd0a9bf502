"""The throughput model: how long a step takes, by T_grad, T_sync and their overlap (OSDI'21, section 3.2).

θ is an array whose last axis has the parameters in the order of
:class:`~pollux.types.ThroughputParams`; everything broadcasts, so one call serves one
configuration of one job or all configurations of all jobs. The last two may be left out.

    T_grad(m)    = α_g + β_g·m^δ
    T_sync(N, K) = 0                    K = 1
                   α_r + β_r·g(K)       N = 1, K >= 2
                   α_n + β_n·g(K)       N >= 2
    T_step       = (T_grad^γ + T_sync^γ)^(1/γ)
    T_iter       = s·T_grad + T_step

The paper has δ = 1 and g(K) = K - 2. Measured passes are convex in m (δ up to 2), and a ring all-reduce moves
2·(K - 1)/K of the gradient over each link, which makes g(K) = 1 - 2/K: see ``docs/truth.md``.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pollux.types import FloatArray

ALPHA_G, BETA_G, ALPHA_N, BETA_N, ALPHA_R, BETA_R, GAMMA, DELTA, RING = range(9)
NUM_PUBLISHED = 7  # parameters of the paper's model


def grad_s(theta: npt.ArrayLike, device_batch: npt.ArrayLike) -> FloatArray:
    """Seconds of one forward and backward pass over ``device_batch`` examples."""
    theta = np.asarray(theta, dtype=float)
    batch = np.asarray(device_batch)
    if theta.shape[-1] > NUM_PUBLISHED:
        batch = np.asarray(device_batch, dtype=float) ** theta[..., DELTA]
    result: FloatArray = theta[..., ALPHA_G] + theta[..., BETA_G] * batch
    return result


def sync_s(theta: npt.ArrayLike, num_nodes: npt.ArrayLike, num_replicas: npt.ArrayLike) -> FloatArray:
    """Seconds to average gradients over ``num_replicas`` on ``num_nodes``."""
    theta = np.asarray(theta, dtype=float)
    if theta.ndim == 1 and isinstance(num_nodes, int) and isinstance(num_replicas, int):
        return _one_sync_s(theta, num_nodes, num_replicas)
    num_nodes, num_replicas = np.asarray(num_nodes), np.asarray(num_replicas)
    spans = num_nodes > 1
    alpha = np.where(spans, theta[..., ALPHA_N], theta[..., ALPHA_R])
    beta = np.where(spans, theta[..., BETA_N], theta[..., BETA_R])
    more = np.maximum(num_replicas - 2, 0)
    if theta.shape[-1] > NUM_PUBLISHED:
        more = np.where(theta[..., RING] > 0, more / np.maximum(num_replicas, 2), more)
    return np.where(num_replicas > 1, alpha + beta * more, 0.0)


def _one_sync_s(theta: FloatArray, num_nodes: int, num_replicas: int) -> FloatArray:
    """:func:`sync_s` of one configuration: the same numbers, many times faster."""
    if num_replicas < 2:
        return np.zeros(())
    alpha, beta = theta[[ALPHA_N, BETA_N] if num_nodes > 1 else [ALPHA_R, BETA_R]].tolist()
    more: float = num_replicas - 2
    if len(theta) > NUM_PUBLISHED and theta[RING] > 0:
        more /= num_replicas
    return np.array(alpha + beta * more)


def overlap(compute_s: FloatArray, communicate_s: FloatArray, gamma: FloatArray | float) -> FloatArray:
    """γ-norm of two times: their sum at γ = 1, their maximum as γ grows. No overflow."""
    longer = np.maximum(compute_s, communicate_s)
    ratio = np.minimum(compute_s, communicate_s) / longer
    result: FloatArray = longer * (1.0 + ratio**gamma) ** (1.0 / gamma)
    return result


def iteration_s(
    theta: npt.ArrayLike,
    num_nodes: npt.ArrayLike,
    num_replicas: npt.ArrayLike,
    device_batch: npt.ArrayLike,
    accum_steps: npt.ArrayLike = 0,
) -> FloatArray:
    """Seconds of one optimizer step, accumulation passes included."""
    theta = np.asarray(theta, dtype=float)
    compute = grad_s(theta, device_batch)
    step = overlap(compute, sync_s(theta, num_nodes, num_replicas), theta[..., GAMMA])
    result: FloatArray = np.asarray(accum_steps) * compute + step
    return result


def throughput(
    theta: npt.ArrayLike,
    num_nodes: npt.ArrayLike,
    num_replicas: npt.ArrayLike,
    device_batch: npt.ArrayLike,
    accum_steps: npt.ArrayLike = 0,
) -> FloatArray:
    """Examples per second, useful or not."""
    accum_steps = np.asarray(accum_steps)
    total = np.asarray(num_replicas) * np.asarray(device_batch) * (accum_steps + 1)
    result: FloatArray = total / iteration_s(theta, num_nodes, num_replicas, device_batch, accum_steps)
    return result
