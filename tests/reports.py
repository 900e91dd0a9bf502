"""What a job could tell, for tests to change what matters to them."""

from __future__ import annotations

from typing import Any

from pollux.types import BatchLimits


def report_fields(**values: Any) -> dict[str, Any]:
    """Of :class:`pollux.train.report.Report`; on the wire the job's name is one more."""
    fields: dict[str, Any] = dict(
        batch=BatchLimits(initial=32, maximum=512, device_max=64),
        generation=1,
        num_replicas=1,
        num_nodes=1,
        accelerator="some name of torch's",
        epoch=0,
        num_steps=10,
        progress=0.5,
        remaining_examples=1000.0,
        stalled_s=0.0,
        device_batch=32,
        accum_steps=0,
        total_batch=32,
        noise_scale=100.0,
        noise_scale_error=15.0,
        efficiency=1.0,
        gain=1.0,
        throughput=50.0,
        goodput=50.0,
    )
    return {**fields, **values}
