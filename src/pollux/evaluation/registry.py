"""Suites by name. ``pollux compare --suite`` and ``scripts/results.py`` read it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from pollux.errors import UnknownNameError
from pollux.evaluation import catalogue as main
from pollux.evaluation import experiments
from pollux.evaluation.catalogue import Artifacts
from pollux.evaluation.deadline_suite import deadlines_suite
from pollux.evaluation.suites import Suite


@dataclass(frozen=True, slots=True)
class SuiteEntry:
    """A suite, made when it is asked for."""

    summary: str
    make: Callable[[Artifacts, bool], Suite]


SUITES: dict[str, SuiteEntry] = {
    "osdi21": SuiteEntry(
        "every policy on the published workloads: JCT, makespan, fairness, resizes, decisions", main.osdi21
    ),
    "fairness": SuiteEntry("finish-time fairness by the exponent p, beside themis, equal and gavel", main.fairness),
    "load": SuiteEntry("half to twice as many jobs", main.load),
    "interference": SuiteEntry("jobs that span nodes and slow each other down, avoided and not", main.interference),
    "interval": SuiteEntry("rounds of half a minute to eight, with and without decisions on events", main.interval),
    "ablation": SuiteEntry("pollux with each of its parts left out", experiments.ablation),
    "realistic": SuiteEntry(
        "jobs as users configure them, beside tuned ones; needs the OSDI'21 artifact's data", experiments.realistic
    ),
    "hetero": SuiteEntry("Sia's cluster of three GPU types; needs that artifact's data", main.hetero),
    "truth": SuiteEntry("models against measurements of Zeus, ElasticFlow and Gavel; needs their data", main.truth),
    "tune": SuiteEntry("studies: static trials, ASHA, Ray Tune's sharing and ours; needs the extra tune", main.tune),
    "shockwave": SuiteEntry(
        "four policies beside their authors' physical runs on 32 V100s; needs their data", experiments.shockwave
    ),
    "deadlines": SuiteEntry(
        "deadlines met on ElasticFlow's trace, by the layer and by others; needs it", deadlines_suite
    ),
    "scale": SuiteEntry("time and quality of decisions from 64 to 10,000 GPUs", main.scale),
}


def make_suite(name: str, artifacts: Artifacts, *, is_quick: bool = False) -> Suite:
    """The suite of that name; ``is_quick``: fewer cases.

    Raises:
        UnknownNameError: there is none.
        InputFileError: it needs data that is not there.
    """
    if name not in SUITES:
        raise UnknownNameError("suite", name, SUITES)
    return dataclasses.replace(SUITES[name].make(artifacts, is_quick), is_quick=is_quick)
