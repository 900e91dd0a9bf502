"""What ``pollux check`` says about one line of a script."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Literal, NamedTuple

Severity = Literal["error", "warning", "hint"]
"""``error``: it fails, or trains something else. ``warning``: output or speed suffer. ``hint``: it may be meant so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    file: str
    line: int
    rule: str
    severity: Severity
    problem: str
    advice: str


class Found(NamedTuple):
    """What a rule yields."""

    node: ast.AST
    problem: str
    advice: str
    severity: Severity = "error"
