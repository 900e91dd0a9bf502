"""Importer of the Sia artifact's traces: applications measured on several accelerator types.

One folder per application, with ``placements-<type>.csv`` and ``scalability-<type>.csv`` for each type it was measured
on and ``validation-<batch size>.csv`` for all of them. Semantics (siasosp23/artifacts, ``sia-simulator/``): as of
:mod:`pollux.simulator.traces`, and: more nodes than were measured on a type count as the most that were; the largest
device batch is that of the very placement; rows that repeat what is known already are passed over. An application
can run on those types alone that it was measured on.

``gpt_pmp`` is a pipeline: its files give the time in which one stage goes forward over one micro-batch, and its
replicas here are slots, of which as many as there are stages make one pipeline. A step is 3·(stages - 1 + n) such times
for n micro-batches, which is the artifact's formula at its n = 48; slots left over after whole pipelines idle.
Where the artifact has no answer (slots on other nodes than were measured) the nearest measured shape is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pollux.errors import InputFileError
from pollux.simulator.application import StepTime
from pollux.simulator.osdi21 import FIXED_BATCH_ON_ONE_GPU, NUM_EPOCHS
from pollux.simulator.traces import Placement, StepTimes, TraceApplication, TrainingRuns, TypeTimes, blaming
from pollux.types import BatchLimits

_PLACEMENTS, _SCALABILITY = "placements-", "scalability-"
_MAX_DEVICE_BATCH = {("deepspeech2", "rtx"): 57}  # the artifact overrides the measured 80
_STAGES = {"gpt_pmp": {"rtx": 8, "dgx-ext": 2}}
_MICRO_BATCHES = 48  # of one example each, per pipeline and step


def is_sia(directory: str | Path) -> bool:
    """Whether a folder in there has files that name an accelerator type."""
    return any(Path(directory).glob(f"*/{_PLACEMENTS}*.csv"))


def load_sia_traces(directory: str | Path) -> dict[str, TraceApplication]:
    """Every application below ``directory``.

    Raises:
        InputFileError: this is not a directory of such traces, or a file in it cannot be used.
    """
    root = Path(directory)
    if not root.is_dir():
        raise InputFileError(root, "not a directory; a directory with one folder per application is needed")
    folders = sorted(path for path in root.iterdir() if any(path.glob(f"{_PLACEMENTS}*.csv")))
    if not folders:
        raise InputFileError(root, f"no traces here: no folder <application>/ holds {_PLACEMENTS}<type>.csv")
    return {folder.name: _application(folder) for folder in folders}


def _application(folder: Path) -> TraceApplication:
    name = folder.name
    measured = {}
    for path in sorted(folder.glob(f"{_PLACEMENTS}*.csv")):
        kind = path.stem.removeprefix(_PLACEMENTS)
        scalability = folder / f"{_SCALABILITY}{kind}.csv"
        measured[kind] = StepTimes(path, scalability, has_whole_steps=name not in _STAGES)
    runs = TrainingRuns(folder, NUM_EPOCHS.get(name))
    if name in _STAGES:
        return _pipeline(folder, measured, runs)
    fixed = FIXED_BATCH_ON_ONE_GPU.get(name)
    most = {kind: _MAX_DEVICE_BATCH.get((name, kind), times.device_bounds[1]) for kind, times in measured.items()}
    with blaming(folder, runs):
        limits = BatchLimits(
            initial=runs.batch_sizes[0],
            maximum=runs.batch_sizes[-1],
            device_min=min(times.device_bounds[0] for times in measured.values()),
            device_max=max(most.values()),
            minimum=fixed or runs.batch_sizes[0],
            device_max_on=tuple(most.items()),
            accumulates_alone=True,
        )
    return TraceApplication(
        name=name,
        limits=limits,
        times=measured,
        runs=runs,
        max_replicas=1 if fixed else limits.max_replicas,
        bounds_placements=True,
    )


# Pipelines ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _PipelineTimes:
    """Steps of pipelines on one accelerator type, a stage to a slot."""

    stages: StepTimes  # forward through one stage, by micro-batch; the synchronisation of pipelines beside it
    num_stages: int

    def at(self, placement: Placement, device_batch: int) -> StepTime:
        stage, num_slots = self.stages.at(placement, 1), sum(placement)
        num_pipelines = max(num_slots // self.num_stages, 1)
        num_micro_batches = math.ceil(num_slots * device_batch / num_pipelines)
        turns = max(self.num_stages / num_slots, 1.0)  # stages that share a slot go one after the other
        step_s = 3 * (self.num_stages - 1 + num_micro_batches) * stage.step_s * turns
        return StepTime(step_s, min(stage.sync_s, 0.99 * step_s))

    def device_max(self, placement: Placement) -> int:
        return _MICRO_BATCHES // self.num_stages

    def placements(self, num_replicas: int, slots_per_node: int, num_nodes: int) -> Iterator[Placement]:
        return self.stages.placements(num_replicas, slots_per_node, num_nodes)


def _pipeline(folder: Path, measured: Mapping[str, StepTimes], runs: TrainingRuns) -> TraceApplication:
    name = folder.name
    times: dict[str, TypeTimes] = {}
    most: dict[str, int] = {}
    for kind, stages in measured.items():
        num_stages = _STAGES[name].get(kind)
        if num_stages is None:
            known = ", ".join(sorted(_STAGES[name]))
            raise InputFileError(
                folder / f"{_PLACEMENTS}{kind}.csv",
                f"how {name} is cut into stages on {kind!r} is not known; known: {known}; remove the file",
            )
        times[kind] = _PipelineTimes(stages, num_stages)
        most[kind] = _MICRO_BATCHES // num_stages
    with blaming(folder, runs):
        limits = BatchLimits(
            initial=runs.batch_sizes[0],
            maximum=runs.batch_sizes[-1],
            device_min=min(most.values()),
            device_max=max(most.values()),
            minimum=min(max(_MICRO_BATCHES, runs.batch_sizes[0]), runs.batch_sizes[-1]),
            device_max_on=tuple(most.items()),
            accumulates_alone=True,
        )
    num_slots = max(_STAGES[name][kind] for kind in times)  # what one pipeline takes on any of the types
    return TraceApplication(
        name=name,
        limits=limits,
        times=times,
        runs=runs,
        min_replicas=num_slots,
        max_replicas=max(limits.max_replicas, num_slots),
    )
