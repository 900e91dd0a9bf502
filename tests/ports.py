"""The ported scripts of ``examples/ports``: what they need, how good they are, and how many of their lines changed."""

from __future__ import annotations

import difflib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PORTS = ROOT / "examples" / "ports"
MOST_LINES = {"nano_gpt": 12}
MOST_LINES_OTHERS = 8
NEEDS = {
    "hf_trainer": ("transformers", "accelerate"),
    "lightning_classifier": ("lightning",),
    "nlp_example": ("transformers", "accelerate"),
}
# What a run may reach, plain, alone with Pollux, or resized and killed: wider than several seeds of the plain script.
BOUNDS = {
    "actor_critic": (0.5, 1.0),
}


def changed_lines(name: str) -> int:
    """Lines that were changed, added or removed: a line in place of another counts once, blank lines do not."""
    before, after = (
        [line for line in path.read_text().splitlines() if line.strip()]
        for path in (PORTS / "plain" / f"{name}.py", PORTS / f"{name}.py")
    )
    blocks = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return sum(max(i2 - i1, j2 - j1) for kind, i1, i2, j1, j2 in blocks if kind != "equal")
