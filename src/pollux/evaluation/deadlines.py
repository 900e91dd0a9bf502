"""The workloads of the suite ``deadlines``: ElasticFlow's trace, imported for as long as this process runs."""

from __future__ import annotations

import atexit
import dataclasses
import shutil
import tempfile
from pathlib import Path

from pollux.simulator.importers import import_trace
from pollux.simulator.step_tables import STEP_TIMES_FILE

ALL = "all jobs have deadlines"
HALF = "every second job has a deadline"


def deadline_workloads(folder: Path, num_jobs: int | None = None) -> dict[str, Path]:
    """Workload files by table, each beside its step times. ``num_jobs``: the first ones only.

    Raises:
        InputFileError: names file and row, and what is allowed.
    """
    trace, category = import_trace("elasticflow", folder / "traces" / "195job.csv", folder / "throughputs_A100")
    root = Path(tempfile.mkdtemp(prefix="pollux-deadlines-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    (root / STEP_TIMES_FILE).write_text(trace.step_times_csv())
    jobs = trace.jobs[:num_jobs]
    half = tuple(dataclasses.replace(job, deadline_s=None) if i % 2 else job for i, job in enumerate(jobs))
    found = {ALL: root / "all.csv", HALF: root / "half.csv"}
    for path, chosen in zip(found.values(), (jobs, half), strict=True):
        path.write_text(dataclasses.replace(trace, jobs=chosen).workload_csv(category))
    return found
