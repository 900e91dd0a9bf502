"""The PyTorch library of Pollux: elastic, adaptive training in a few changed lines. Needs the ``train`` extra (torch).

Training scripts call :func:`init`. The other names work alone too: noise scale, learning-rate rules, elastic data,
checkpoints. Each name is imported when first used, so that programs that need one module do not load the others.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pollux.membership.replica import Membership, StaticMembership, StoreMembership
    from pollux.membership.store import Group
    from pollux.train.batching import (
        AdaptiveBatch,
        BatchChoice,
        BatchPolicy,
        BatchSituation,
        FixedBatch,
        LinearBatch,
        RampBatch,
        SeesawBatch,
    )
    from pollux.train.checkpoint import AsyncSaver, Checkpoint, CheckpointDirectory, CheckpointInfo
    from pollux.train.data import ElasticLoader, Pass
    from pollux.train.leaving import Leave
    from pollux.train.loader import AdaptiveLoader
    from pollux.train.moments import GradientMoments, NoiseStats
    from pollux.train.noise import NoiseScale, Preconditioner
    from pollux.train.position import Step, StepShape
    from pollux.train.report import FileReporter, Report, Reporter
    from pollux.train.run import Run, init
    from pollux.train.scaling import (
        LEGW,
        AdaScale,
        DampedRoot,
        Linear,
        NoScaling,
        ScaledRate,
        ScalingRule,
        SquareRoot,
        StepContext,
        rule_for,
    )

__all__ = [
    "LEGW",
    "AdaScale",
    "AdaptiveBatch",
    "AdaptiveLoader",
    "AsyncSaver",
    "BatchChoice",
    "BatchPolicy",
    "BatchSituation",
    "Checkpoint",
    "CheckpointDirectory",
    "CheckpointInfo",
    "DampedRoot",
    "ElasticLoader",
    "FileReporter",
    "FixedBatch",
    "GradientMoments",
    "Group",
    "Leave",
    "Linear",
    "LinearBatch",
    "Membership",
    "NoScaling",
    "NoiseScale",
    "NoiseStats",
    "Pass",
    "Preconditioner",
    "RampBatch",
    "Report",
    "Reporter",
    "Run",
    "ScaledRate",
    "ScalingRule",
    "SeesawBatch",
    "SquareRoot",
    "StaticMembership",
    "Step",
    "StepContext",
    "StepShape",
    "StoreMembership",
    "init",
    "rule_for",
]

_HOMES = {
    "membership.replica": "Membership StaticMembership StoreMembership",
    "membership.store": "Group",
    "train.batching": "AdaptiveBatch BatchChoice BatchPolicy BatchSituation"
    " FixedBatch LinearBatch RampBatch SeesawBatch",
    "train.checkpoint": "AsyncSaver Checkpoint CheckpointDirectory CheckpointInfo",
    "train.data": "ElasticLoader Pass",
    "train.leaving": "Leave",
    "train.loader": "AdaptiveLoader",
    "train.moments": "GradientMoments NoiseStats",
    "train.noise": "NoiseScale Preconditioner",
    "train.position": "Step StepShape",
    "train.report": "FileReporter Report Reporter",
    "train.run": "Run init",
    "train.scaling": "LEGW AdaScale DampedRoot Linear NoScaling ScaledRate ScalingRule SquareRoot StepContext rule_for",
}


def __getattr__(name: str) -> object:
    home = next((module for module, names in _HOMES.items() if name in names.split()), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = globals()[name] = getattr(import_module(f"pollux.{home}"), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        text = 'pollux.train needs torch, which is not installed here: pip install "pollux-scheduler[train]"'
        raise ModuleNotFoundError(text, name="torch") from None
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
