"""The ported scripts of ``examples/ports``: what they need, how good they are, and how many of their lines changed."""

from __future__ import annotations

import difflib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PORTS = ROOT / "examples" / "ports"
MOST_LINES = {"diffusion": 9, "imagenet": 12, "nano_gpt": 13, "word_language_model": 11}
MOST_LINES_OTHERS = 8
NEEDS = {
    "hf_trainer": ("transformers", "accelerate"),
    "lightning_classifier": ("lightning",),
    "nlp_example": ("transformers", "accelerate"),
}
# What a run may reach, plain, alone with Pollux, or resized and killed: wider than several seeds of the plain script.
BOUNDS = {
    "actor_critic": (0.4, 1.0),  # share of the longest episode
    "dcgan": (0.0, 0.6),  # distance from the data's mean; 1 without training
    "diffusion": (0.25, 0.47),  # mean distance to the next centre; 0.5 and more without training
    "distill": (0.8, 1.0),  # share of rows on which the student agrees; 0.25 by chance
    "hf_trainer": (0.8, 1.6),  # loss; 3.5 without training
    "imagenet": (0.85, 1.0),  # accuracy; 0.25 by chance
    "lightning_classifier": (0.3, 0.6),  # loss; 1.1 without training
    "min_gpt": (0.9, 1.0),  # accuracy; 0.33 by chance
    "mnist": (0.6, 1.0),  # accuracy; 0.25 by chance
    "nano_gpt": (0.0, 0.4),  # loss; 3.3 without training
    "nlp_example": (0.9, 1.0),  # accuracy; 0.5 by chance
    "reinforce": (0.5, 1.0),  # return; 0.73 at best
    "vae": (14.0, 26.0),  # loss; 44 without training
    "word_language_model": (0.8, 1.5),  # loss; 3.0 without training
}


def changed_lines(name: str) -> int:
    """Lines that were changed, added or removed: a line in place of another counts once, blank lines do not."""
    before, after = (
        [line for line in path.read_text().splitlines() if line.strip()]
        for path in (PORTS / "plain" / f"{name}.py", PORTS / f"{name}.py")
    )
    blocks = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return sum(max(i2 - i1, j2 - j1) for kind, i1, i2, j1, j2 in blocks if kind != "equal")
