"""``python -m pollux.elastic report``: what a job that is a shell script says after its steps.

Only rank 0 sends. A report that does not get through is no reason to stop: it is said on stderr, and the exit code
is 0. Wrong options end with 2.
"""

from __future__ import annotations

import argparse
import http.client
import os
import sys
from collections.abc import Sequence

from pollux.elastic.batch import MAX_NOISE_SCALE, Batch, BatchBounds
from pollux.elastic.report import Replica, new_state, report_fields
from pollux.elastic.sender import Address
from pollux.errors import InvalidValueError

MAX_REPLICAS = 4096  # of independent work


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        replica = Replica.from_environment(os.environ, options.accelerator)
        address = Address.from_environment(os.environ)
        report = _report(options, replica)
    except InvalidValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if replica.rank != 0:
        return 0
    if address is None:
        print("not in a cluster (POLLUX_URL is not set): nothing was sent", file=sys.stderr)
        return 0
    try:
        status, answer = address.post(report)
        if status >= 400:
            print(f"the server refuses the report: {status} {answer.get('error')}", file=sys.stderr)
    except (OSError, http.client.HTTPException) as error:
        print(f"the server does not take the report: {error}", file=sys.stderr)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pollux.elastic", description=__doc__)
    report = parser.add_subparsers(required=True, metavar="COMMAND").add_parser("report", help="say how far the job is")
    report.add_argument("--done", type=int, required=True, metavar="N", help="examples that are done, by all replicas")
    report.add_argument("--total", type=int, metavar="N", help="examples that the job has, if it knows")
    report.add_argument("--step-s", type=float, metavar="S", help="seconds of one step")
    batch = report.add_mutually_exclusive_group(required=True)
    batch.add_argument("--batch", type=int, metavar="N", help="examples of a step, shared by all replicas")
    batch.add_argument(
        "--per-replica", type=int, metavar="N", help="examples of a step of each replica: more replicas do more work"
    )
    report.add_argument("--accelerator", metavar="TYPE", help="where a cluster has several types")
    report.add_argument(
        "--metric", action="append", default=[], metavar="NAME=VALUE", help="may be given several times"
    )
    return parser


def _report(options: argparse.Namespace, replica: Replica) -> dict[str, object]:
    batch = options.batch if options.per_replica is None else options.per_replica
    for name, value, least in (("done", options.done, 0), ("total", options.total, 1), ("batch", batch, 1)):
        if value is not None and value < least:
            raise InvalidValueError(f"--{name} is {value}; at least {least} is needed")
    if options.step_s is not None and not 0 < options.step_s < float("inf"):
        raise InvalidValueError(f"--step-s is {options.step_s}; a positive number of seconds is needed")
    if odd := [pair for pair in options.metric if "=" not in pair]:
        raise InvalidValueError(f"--metric {odd[0]!r}; NAME=VALUE is needed")
    size, noise_scale = replica.num_replicas, None
    if options.per_replica is not None:  # independent work: an example counts the same in a step of any size
        bounds = BatchBounds(initial=batch, maximum=batch * MAX_REPLICAS, device_min=batch, device_max=batch)
        step, noise_scale = Batch(batch * size, batch), MAX_NOISE_SCALE
    else:
        bounds = BatchBounds(initial=batch, maximum=batch, device_min=1, device_max=batch)
        step = Batch(size * -(-batch // size), -(-batch // size))
    state = new_state()
    state["num_steps"], state["num_examples"] = options.done // batch, options.done
    state["num_useful"] = float(options.done)
    return report_fields(
        replica=replica,
        bounds=bounds,
        batch=step,
        state=state,
        noise_scale=noise_scale,
        times=None if options.step_s is None else (options.step_s, options.step_s, 1),
        total_examples=options.total,
        metrics=dict(pair.split("=", 1) for pair in options.metric),
    )


if __name__ == "__main__":
    raise SystemExit(main())
