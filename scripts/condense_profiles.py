"""Condense the OSDI'21 traces into the built-in profiles (run by hand; the result is committed).

    python scripts/condense_profiles.py TRACES [--output FILE] [--compare WORKLOAD.csv]

Per application: θ of the throughput model fitted to all measured step times, small factors for what θ's straight
lines miss (T_grad by device batch, T_sync by nodes and replicas), the length of an epoch, and one noise scale
per epoch. Prints how well that explains the step times; with ``--compare`` also the average JCT of three
policies under the traces and under the condensed profiles.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import minimize_scalar

from pollux.model.efficiency import noise_scale
from pollux.model.fitting import fit
from pollux.model.profile import Observations
from pollux.model.throughput import grad_s, iteration_s, overlap, sync_s
from pollux.policy import PolicySettings, make_policy
from pollux.simulator.application import Application
from pollux.simulator.builtin import BUILTIN_PROFILES, load_builtin
from pollux.simulator.config import SimulationConfig
from pollux.simulator.csvfile import read_rows, to_float, to_int
from pollux.simulator.osdi21 import TraceApplication, load_traces
from pollux.simulator.run import simulate
from pollux.simulator.workload import load_workload
from pollux.types import DEFAULT_ACCELERATOR, FloatArray, ThroughputParams

SOURCE = (
    "condensed from the traces of petuum/adaptdl, branch osdi21-artifact, simulator/, Apache-2.0, Copyright Petuum Inc."
)
METHOD = (
    "scripts/condense_profiles.py: step times averaged over placements with equal (nodes, replicas); params = the "
    "throughput model fitted to all of them up to limits.device_max (seconds); pass_factors = geometric mean of "
    "measured to fitted T_grad by device batch; sync_factors = factor on T_sync by nodes x replicas that explains the "
    "step times best; progress_per_epoch in steps at limits.initial; noise_scales in examples, one per epoch, "
    "geometric mean over the larger half of the batch sizes that were trained with (where it matters most)"
)
POLICIES = ("tiresias", "optimus", "pollux")
MAX_PHI = 1e9  # larger ones are measured where the signal is lost in the noise
MAX_FACTOR = 20.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", type=Path, help="directory with one folder per application")
    default = Path(__file__).parents[1] / "src/pollux/simulator/profiles" / BUILTIN_PROFILES
    parser.add_argument("--output", type=Path, default=default)
    parser.add_argument("--compare", type=Path, metavar="WORKLOAD", help="simulate this workload both ways")
    arguments = parser.parse_args()

    traced = load_traces(arguments.traces)
    table = {name: condense(application, arguments.traces / name) for name, application in traced.items()}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(as_json(table), encoding="utf-8")
    print(f"{arguments.output}: {arguments.output.stat().st_size} bytes")
    if arguments.compare:
        if arguments.output.resolve() != default.resolve():
            parser.error("--compare reads the packaged profiles: leave --output at its default")
        compare(arguments.compare, traced)


def condense(application: TraceApplication, folder: Path) -> dict[str, Any]:
    """One application's row of the table; prints how well it explains the step times."""
    observed = read_step_times(folder, application.limits.device_max)
    theta = ThroughputParams(*(rounded(value, 5) for value in fit(observed).params))
    pass_factors = fit_pass_factors(theta, observed)
    compute = grad_s(theta, observed.device_batch) * [pass_factors[int(m)] for m in observed.device_batch]
    sync_factors = fit_sync_factors(theta, observed, compute)
    shapes = map(shape, observed.num_nodes, observed.num_replicas)
    factors = np.array([sync_factors.get(key, 1.0) for key in shapes])
    communicate = sync_s(theta, observed.num_nodes, observed.num_replicas) * factors
    plain = iteration_s(theta, observed.num_nodes, observed.num_replicas, observed.device_batch)
    corrected = overlap(compute, communicate, theta.gamma)
    print(
        f"{application.name:12s} {len(observed.step_s):4d} configurations   RMSLE of step times: "
        f"θ alone {rmsle(plain, observed.step_s):.3f}, corrected {rmsle(corrected, observed.step_s):.3f}   of passes: "
        f"θ alone {rmsle(grad_s(theta, observed.device_batch), observed.grad_s):.3f}, "
        f"corrected {rmsle(compute, observed.grad_s):.3f}"
    )
    limits, num_epochs = application.limits, application.num_epochs
    return {
        "limits": {
            "initial": limits.initial,
            "minimum": limits.minimum,
            "maximum": limits.maximum,
            "device_min": limits.device_min,
            "device_max": limits.device_max,
            "accumulates_alone": limits.accumulates_alone,
        },
        "max_replicas": application.max_replicas,
        "num_epochs": num_epochs,
        "progress_per_epoch": progress_per_epoch(application),
        "noise_scales": noise_scales(application, folder),
        "accelerators": {
            DEFAULT_ACCELERATOR: {
                "params": theta._asdict(),
                "pass_factors": {str(batch): factor for batch, factor in pass_factors.items()},
                "sync_factors": sync_factors,
            }
        },
    }


# Step times -----------------------------------------------------------------------------------


def read_step_times(folder: Path, device_max: int) -> Observations:
    """All that was measured, averaged over placements with equal (nodes, replicas, device batch)."""
    rows: dict[tuple[int, int, int], list[tuple[float, float]]] = {}

    def add(path: Path, number: int, row: dict[str, str], num_nodes: int, num_replicas: int) -> None:
        batch = to_int(path, number, row, "local_bsz")
        step, sync = to_float(path, number, row, "step_time"), to_float(path, number, row, "sync_time")
        if batch <= device_max:
            rows.setdefault((num_nodes, num_replicas, batch), []).append((max(step - sync, 1e-3 * step), step))

    path = folder / "placements.csv"
    for number, row in read_rows(path, ("placement", "local_bsz", "step_time", "sync_time")):
        digits = row["placement"]
        add(path, number, row, len(digits), sum(map(int, digits)))
    path = folder / "scalability.csv"
    for number, row in read_rows(path, ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time")):
        add(path, number, row, to_int(path, number, row, "num_nodes"), to_int(path, number, row, "num_replicas"))
    columns = np.array([(*key, *np.mean(found, axis=0)) for key, found in sorted(rows.items())])
    return Observations(*columns.T.copy())


def fit_pass_factors(theta: ThroughputParams, observed: Observations) -> dict[int, float]:
    """Measured to fitted T_grad by device batch, geometric mean over placements."""
    error = np.log(observed.grad_s / grad_s(theta, observed.device_batch))
    batches = np.unique(observed.device_batch)
    return {int(m): rounded(math.exp(error[observed.device_batch == m].mean()), 3) for m in batches}


def fit_sync_factors(theta: ThroughputParams, observed: Observations, compute: FloatArray) -> dict[str, float]:
    """By (nodes, replicas): the factor on T_sync that explains the step times of all device batches best."""
    found: dict[str, float] = {}
    shapes = np.unique(np.stack([observed.num_nodes, observed.num_replicas], axis=1), axis=0)
    for num_nodes, num_replicas in shapes:
        if num_replicas == 1:
            continue  # nothing to synchronise
        here = (observed.num_nodes == num_nodes) & (observed.num_replicas == num_replicas)
        communicate = sync_s(theta, num_nodes, num_replicas)

        def error(log_factor: float, here: Any = here, communicate: FloatArray = communicate) -> float:
            step = overlap(compute[here], communicate * math.exp(log_factor), theta.gamma)
            return rmsle(step, observed.step_s[here])

        bound = math.log(MAX_FACTOR)
        best = minimize_scalar(error, bounds=(-bound, bound), method="bounded").x
        found[shape(num_nodes, num_replicas)] = rounded(math.exp(best), 3)
    return found


def shape(num_nodes: float, num_replicas: float) -> str:
    return f"{int(num_nodes)}x{int(num_replicas)}"


def rmsle(predicted: FloatArray, measured: FloatArray) -> float:
    return math.sqrt(float(np.mean(np.log(predicted / measured) ** 2)))


# Learning -------------------------------------------------------------------------------------


def progress_per_epoch(application: TraceApplication) -> float:
    """Epochs are equally long but for rounding; checked, since the table keeps one number."""
    num_epochs = application.num_epochs
    mean = application.epoch_end(num_epochs - 1) / num_epochs
    worst = max(abs(application.epoch_end(epoch) / (mean * (epoch + 1)) - 1) for epoch in range(num_epochs))
    if worst > 0.01:
        raise SystemExit(f"{application.name}: epochs differ in length by {worst:.1%}; one number will not do")
    return rounded(mean, 6)


def noise_scales(application: TraceApplication, folder: Path) -> list[float]:
    sizes = sorted(int(path.stem.rsplit("-", 1)[-1]) for path in folder.glob("validation-*.csv"))
    phis = []
    for epoch in range(application.num_epochs):
        stats = [application.gradient(epoch, size) for size in sizes[len(sizes) // 2 :]]
        logs = [math.log(min(float(noise_scale(sizes[0], s.sqr, s.var)), MAX_PHI)) for s in stats]
        phis.append(rounded(math.exp(sum(logs) / len(logs)), 3))
    return phis


# Output ---------------------------------------------------------------------------------------


def rounded(value: float, num_digits: int) -> float:
    """To significant digits, whole where nothing is lost."""
    result = float(f"{value:.{num_digits - 1}e}")
    return int(result) if result == int(result) else result


def as_json(table: Mapping[str, Mapping[str, Any]]) -> str:
    """One line per figure or list: readable, and a change shows as the lines that changed."""
    lines = ["{", f' "source": {json.dumps(SOURCE)},', f' "method": {json.dumps(METHOD)},', ' "applications": {']
    for index, (name, row) in enumerate(table.items()):
        fields = [f'   "{key}": {json.dumps(value)}' for key, value in row.items() if key != "accelerators"]
        kinds = []
        for kind, entry in row["accelerators"].items():
            inner = ",\n".join(f'     "{key}": {json.dumps(value)}' for key, value in entry.items())
            kinds.append(f'    "{kind}": {{\n{inner}\n    }}')
        fields.append('   "accelerators": {\n' + ",\n".join(kinds) + "\n   }")
        body = ",\n".join(fields)
        comma = "," if index + 1 < len(table) else ""
        lines.append(f'  "{name}": {{\n{body}\n  }}{comma}')
    lines += [" }", "}"]
    text = "\n".join(lines) + "\n"
    json.loads(text)
    return text


def compare(workload: Path, traced: Mapping[str, Application]) -> None:
    """Average JCT of each policy, by the traces and by the condensed profiles."""
    for policy in POLICIES:
        averages = []
        for applications in (traced, load_builtin()):
            run = simulate(
                load_workload(workload, applications),
                applications,
                make_policy(policy, PolicySettings()),
                SimulationConfig(),
            )
            times = [job.finished_at - job.spec.submitted_at for job in run.store.jobs.values() if job.finished_at]
            averages.append(sum(times) / len(times))
        by_traces, by_profiles = averages
        print(
            f"{workload.stem} {policy:9s} average JCT: traces {by_traces:.0f} s, profiles {by_profiles:.0f} s "
            f"({by_profiles / by_traces - 1:+.1%})"
        )


if __name__ == "__main__":
    main()
