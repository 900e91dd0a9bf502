"""Crashes that cost a job work, in words and numbers. :mod:`pollux.server.present.queries` calls it."""

from __future__ import annotations

import math

from pollux.api.job import JobRestart
from pollux.reports import numbers
from pollux.scheduler.setbacks import Setback


def job_restart(found: Setback) -> JobRestart:
    return JobRestart(
        at=found.at,
        cause=found.cause,
        pause_s=found.pause_s,
        step=found.step,
        num_steps_again=found.num_steps,
        again_s=found.again_s,
        words=setback_in_words(found),
    )


def setback_in_words(found: Setback) -> str:
    begun = f"started again from step {found.step}" if found.step else "began anew from step 0"
    again = "nothing was trained again"
    if found.num_steps:
        took = "" if found.again_s is None else f" ({numbers.duration(found.again_s)})"
        again = f"about {_about(found.num_steps)} {'steps' if found.num_steps > 1 else 'step'}{took} trained again"
    return f"{found.cause}; {begun} after {numbers.duration(found.pause_s)}; {again}"


def _about(count: int) -> int:
    """Two digits: what came after the last report is not known."""
    power = max(int(math.log10(count)) - 1, 0)
    return round(count, -power)
