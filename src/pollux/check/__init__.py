"""Reads a training script and says what will go wrong when it is resized. ``pollux check`` calls it. Runs no code."""

from __future__ import annotations

from pollux.check.finding import Finding, Severity
from pollux.check.rules import check_script

__all__ = ["Finding", "Severity", "check_script"]
