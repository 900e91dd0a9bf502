"""What ``pollux check`` says about one line of a script."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning"]
"""``error``: it fails, or trains something else. ``warning``: output or speed suffer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    file: str
    line: int
    rule: str
    severity: Severity
    problem: str
    advice: str
