"""The PyTorch side of Pollux: elastic, adaptive training in a few changed lines. Needs torch (the ``train`` extra).

:func:`init` begins a run; the rest is usable alone: the noise scale, learning-rate rules, elastic data, checkpoints.
"""

from pollux.train.batching import AdaptiveBatch, BatchChoice, BatchPolicy, BatchSituation, FixedBatch, LinearBatch
from pollux.train.checkpoint import AsyncSaver, Checkpoint, CheckpointDirectory, CheckpointInfo
from pollux.train.data import ElasticLoader, Pass
from pollux.train.leaving import Leave
from pollux.train.loader import AdaptiveLoader
from pollux.train.membership import Group, Membership, StaticMembership, StoreMembership
from pollux.train.moments import GradientMoments, NoiseStats
from pollux.train.noise import NoiseScale, Preconditioner
from pollux.train.position import Step, StepShape
from pollux.train.report import FileReporter, Report, Reporter
from pollux.train.run import Run, init
from pollux.train.scaling import (
    LEGW,
    AdaScale,
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
    "Report",
    "Reporter",
    "Run",
    "ScaledRate",
    "ScalingRule",
    "SquareRoot",
    "StaticMembership",
    "Step",
    "StepContext",
    "StepShape",
    "StoreMembership",
    "init",
    "rule_for",
]
