"""The PyTorch side of Pollux: noise scale, learning-rate rules, elastic data. Needs torch (the ``train`` extra)."""

from pollux.train.data import ElasticLoader, Pass
from pollux.train.noise import GradientMoments, NoiseScale, NoiseStats, Preconditioner
from pollux.train.position import Step, StepShape
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
    "ElasticLoader",
    "GradientMoments",
    "Linear",
    "NoScaling",
    "NoiseScale",
    "NoiseStats",
    "Pass",
    "Preconditioner",
    "Run",
    "ScaledRate",
    "ScalingRule",
    "SquareRoot",
    "Step",
    "StepContext",
    "StepShape",
    "init",
    "rule_for",
]
