"""Importer of the OSDI'21 artifact's traces: one folder per application, all on one accelerator type.

Semantics (petuum/adaptdl, branch osdi21-artifact, ``simulator/``): see :mod:`pollux.simulator.traces`. Where the
artifact stops with an error (outside what was measured) the nearest measured edge is extended instead.
"""

from __future__ import annotations

from pathlib import Path

from pollux.errors import InputFileError
from pollux.simulator.traces import StepTimes, TraceApplication, TrainingRuns, blaming
from pollux.types import BatchLimits

# The artifact trains for a fixed number of epochs, whatever the metric.
NUM_EPOCHS = {"bert": 2, "cifar10": 100, "deepspeech2": 80, "imagenet": 90, "ncf": 10, "yolov3": 50}
FIXED_BATCH_ON_ONE_GPU = {"ncf": 32768}  # adaptive policies train it so; its embeddings do not scale out
REQUIRED_FILES = ("placements.csv", "scalability.csv")

_MAX_NODES = 16  # more nodes count as this many
_MAX_DEVICE_BATCH = {"yolov3": 8}  # the artifact overrides the measured 16


def load_traces(directory: str | Path) -> dict[str, TraceApplication]:
    """Every application below ``directory``.

    Raises:
        InputFileError: this is not a directory of traces, or a file in it cannot be used.
    """
    root = Path(directory)
    if not root.is_dir():
        raise InputFileError(root, "not a directory; a directory with one folder per application is needed")
    folders = sorted(path for path in root.iterdir() if path.is_dir() and (path / REQUIRED_FILES[0]).is_file())
    if not folders:
        raise InputFileError(root, f"no traces here: no folder <application>/ holds {' and '.join(REQUIRED_FILES)}")
    return {folder.name: _application(folder) for folder in folders}


def _application(folder: Path) -> TraceApplication:
    name = folder.name
    times = StepTimes(*(folder / file for file in REQUIRED_FILES), max_nodes=_MAX_NODES)
    runs = TrainingRuns(folder, NUM_EPOCHS.get(name))
    fixed = FIXED_BATCH_ON_ONE_GPU.get(name)
    device_min, device_max = times.device_bounds
    with blaming(folder, runs):
        limits = BatchLimits(
            initial=runs.batch_sizes[0],
            maximum=runs.batch_sizes[-1],
            device_min=device_min,
            device_max=_MAX_DEVICE_BATCH.get(name, device_max),
            minimum=fixed or runs.batch_sizes[0],
            accumulates_alone=True,
        )
    return TraceApplication(
        name=name, limits=limits, times={"": times}, runs=runs, max_replicas=1 if fixed else limits.max_replicas
    )
