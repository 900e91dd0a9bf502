"""Loads the input of a simulation: a workload and the applications its jobs train.

All commands that simulate take the same two arguments: a workload (a CSV file, or ``builtin:NAME``) and a
directory of traces (or nothing: the built-in profiles). Traces whose files name accelerator types are in the Sia
artifact's format, others in the OSDI'21 artifact's. A directory with a file ``profiles.json`` holds condensed
profiles, of recorded jobs say; ``pollux replay --workload-out`` makes one. One with ``step_times.csv`` holds measured
step times for workloads whose jobs say how many steps they take; ``pollux workload import`` makes one. A workload
``FORMAT:FILE`` is a production trace in one of that command's formats, its traces the measured throughputs: both are
imported on the fly.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from pollux.simulator.application import Application
from pollux.simulator.builtin import load_builtin, load_profiles
from pollux.simulator.generate import builtin_workload
from pollux.simulator.importers import FORMATS, import_trace
from pollux.simulator.osdi21 import load_traces
from pollux.simulator.sia import is_sia, load_sia_traces
from pollux.simulator.step_tables import STEP_TIMES_FILE, load_jobs, load_tables
from pollux.simulator.workload import Workload, load_workload

BUILTIN_PREFIX = "builtin:"
PROFILES_FILE = "profiles.json"
WORKLOAD_FILE = "workload.csv"  # of an imported trace


def load_applications(traces: str | None) -> Mapping[str, Application]:
    """The applications below directory ``traces``, or the built-in ones.

    Raises:
        InputFileError: ``traces`` is not a directory of usable traces.
    """
    if traces is None:
        return load_builtin()
    profiles = Path(traces) / PROFILES_FILE
    if profiles.is_file():
        return load_profiles(profiles)
    return load_sia_traces(traces) if is_sia(traces) else load_traces(traces)


def load_source(workload: str, traces: str | None, seed: int = 0) -> tuple[Workload, Mapping[str, Application]]:
    """The workload and the applications of its jobs.

    ``workload`` is a file's path, ``builtin:NAME`` or ``FORMAT:FILE``; ``seed`` is for built-in ones only, which are
    generated.

    Raises:
        InputFileError: a file cannot be used.
        UnknownNameError: there is no built-in workload of that name.
    """
    kind, _, file = workload.partition(":")
    if kind in FORMATS and traces is not None:
        imported, category = import_trace(kind, Path(file), Path(traces))
        with TemporaryDirectory(prefix="pollux-import-") as folder:
            (Path(folder) / WORKLOAD_FILE).write_text(imported.workload_csv(category), encoding="utf-8")
            (Path(folder) / STEP_TIMES_FILE).write_text(imported.step_times_csv(), encoding="utf-8")
            return load_source(str(Path(folder) / WORKLOAD_FILE), folder)
    if traces is not None and (tables := Path(traces) / STEP_TIMES_FILE).is_file():
        jobs = load_jobs(Path(workload), load_tables(tables))
        return load_workload(workload, jobs), jobs
    applications = load_applications(traces)
    if workload.startswith(BUILTIN_PREFIX):
        return builtin_workload(workload.removeprefix(BUILTIN_PREFIX), applications, seed=seed), applications
    return load_workload(workload, applications), applications
