"""Draw the pictures of docs/concepts.md (goodput, noise scale, fairness, a resize) and the chart of the README.

``python scripts/concept_pictures.py [--output DIR]``. Curves and shares are computed with the code that schedules
(``pollux.model``), of jobs with made-up speeds; the times of the resize are those of docs/performance.md, and so are
the bars of the README, which are read from its first table.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src")]

from pollux.model.efficiency import efficiency  # noqa: E402
from pollux.model.throughput import throughput  # noqa: E402

OUTPUT = ROOT / "docs/images"
BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
STYLE = (
    "<style>.t{fill:#1f2328}.m{fill:#59636e}.l{stroke:#d1d9e0}.a{stroke:#59636e}.f{fill:#eaeef2}"
    "@media(prefers-color-scheme:dark){.t{fill:#f0f6fc}.m{fill:#9198a1}.l{stroke:#3d444d}.a{stroke:#9198a1}"
    ".f{fill:#262c36}}</style>"
)
WIDTH = 880


class Picture:
    """An SVG that is made of parts."""

    def __init__(self, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
            'font-family="system-ui, sans-serif" font-size="13">',
            f"<title>{title}</title>",
            STYLE,
        ]

    def text(self, x: float, y: float, words: str, kind: str = "m", anchor: str = "start", more: str = "") -> None:
        self._parts.append(f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{words}</text>')

    def head(self, x: float, y: float, words: str) -> None:
        self.text(x, y, words, "t", more='font-weight="600" font-size="15"')

    def rect(self, x: float, y: float, width: float, height: float, fill: str = "") -> None:
        paint = f'fill="{fill}"' if fill else 'class="f"'
        self._parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="3" {paint}/>')

    def line(self, points: Sequence[tuple[float, float]], colour: str = "", width: float = 2.5, dash: str = "") -> None:
        path = " ".join(f"{'M' if not i else 'L'}{x:.1f} {y:.1f}" for i, (x, y) in enumerate(points))
        paint = f'stroke="{colour}"' if colour else 'class="l"'
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self._parts.append(f'<path d="{path}" fill="none" {paint} stroke-width="{width:g}"{dashes}/>')

    def arrow(self, x: float, y: float, dx: float, dy: float, colour: str, width: float = 2.0) -> None:
        length = math.hypot(dx, dy)
        ux, uy, end = dx / length, dy / length, (x + dx, y + dy)
        self.line([(x, y), end], colour, width)
        left, right = (-5 * ux - 3.5 * uy, -5 * uy + 3.5 * ux), (-5 * ux + 3.5 * uy, -5 * uy - 3.5 * ux)
        corners = [(end[0] + a, end[1] + b) for a, b in (left, (2 * ux, 2 * uy), right)]
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in corners)
        self._parts.append(f'<polygon points="{points}" fill="{colour}"/>')

    def dot(self, x: float, y: float, colour: str) -> None:
        self._parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5.5" fill="{colour}"/>')

    def done(self) -> str:
        return "\n".join([*self._parts, "</svg>", ""])


# --- goodput ---------------------------------------------------------------------------------------------------------

# Seconds of a pass and of an example, of communication within and between nodes, and how far both overlap.
THETA = np.array([0.06, 0.0011, 0.05, 0.004, 0.03, 0.003, 1.6])
TUNED, REPLICAS = 64, 4


def goodput_picture() -> str:
    """Throughput, efficiency and their product over the batch, early and late in training."""
    picture = Picture(350, "Goodput is throughput times efficiency; its best batch grows as the noise scale grows")
    batches = np.geomspace(TUNED, 4096, 120)
    rate = throughput(THETA, 1, REPLICAS, batches / REPLICAS, 0)
    most = float(rate.max())
    wide, high, top = 330, 210, 60
    for left, phi, words in ((70, 150.0, "Early: noise scale 150"), (500, 1500.0, "Late: noise scale 1,500")):

        def place(batch: float, share: float, left: int = left) -> tuple[float, float]:
            x = left + wide * math.log(batch / TUNED) / math.log(4096 / TUNED)
            return x, top + high * (1 - share / 1.05)

        picture.head(left, 28, words)
        picture.line([(left, top), (left, top + high), (left + wide, top + high)], width=1.5)
        for batch in (64, 256, 1024, 4096):
            picture.text(place(batch, 0)[0], top + high + 18, f"{batch:,}", anchor="middle")
        picture.text(left + wide / 2, top + high + 40, "batch size, examples", anchor="middle")
        useful = efficiency(phi, TUNED, batches)
        good = rate * useful / most
        for values, colour, dash in ((rate / most, BLUE, "7 4"), (useful, ORANGE, "2 4"), (good, GREEN, "")):
            picture.line([place(float(b), float(v)) for b, v in zip(batches, values, strict=True)], colour, dash=dash)
        best = int(np.argmax(good))
        picture.dot(*place(float(batches[best]), float(good[best])), RED)
        x, y = place(float(batches[best]), float(good[best]))
        picture.text(x, y + 24, f"best: about {round(float(batches[best]), -1):,.0f}", "t", "middle")
    for x, colour, dash, words in (
        (150, BLUE, "7 4", "throughput, of the highest"),
        (400, ORANGE, "2 4", "efficiency"),
        (560, GREEN, "", "goodput = throughput × efficiency"),
    ):
        picture.line([(x - 36, 337), (x - 8, 337)], colour, dash=dash)
        picture.text(x, 341, words)
    return picture.done()


# --- noise scale -----------------------------------------------------------------------------------------------------


def noise_picture() -> str:
    """Gradients of single batches that agree, and some that do not."""
    picture = Picture(300, "A small noise scale: gradients agree. A large one: their mean is worth more examples")
    rng = np.random.default_rng(3)
    for left, spread, head, words in (
        (40, 0.14, "Small noise scale", "Gradients agree. A larger batch teaches hardly more: keep it small."),
        (470, 1.25, "Large noise scale", "Gradients differ. Their mean is much better than one: a larger batch pays."),
    ):
        picture.head(left, 28, head)
        x, y = left + 30, 150
        angles = rng.normal(-0.25, spread, 10)
        lengths = rng.uniform(80, 105, 10)
        for angle, length in zip(angles, lengths, strict=True):
            picture.arrow(x + 70, y, length * math.cos(angle), length * math.sin(angle), BLUE, 1.4)
        dx, dy = float(np.mean(lengths * np.cos(angles))), float(np.mean(lengths * np.sin(angles)))
        picture.arrow(x + 70, y, dx, dy, RED, 4.5)
        first, second = words.split(". ", 1)
        picture.text(left, 268, f"{first}.", "t")
        picture.text(left, 289, second)
    picture.line([(300, 60), (328, 60)], BLUE, 1.4)
    picture.text(336, 64, "gradient of one batch")
    picture.line([(300, 84), (328, 84)], RED, 4.5)
    picture.text(336, 88, "their mean")
    return picture.done()


# --- fairness --------------------------------------------------------------------------------------------------------

SLOTS = 12
# How goodput grows with slots: nearly in proportion, less, and hardly beyond two.
JOBS: dict[str, Callable[[int], float]] = {
    "scales well": lambda n: float(n**0.95),
    "scales somewhat": lambda n: float(n**0.6),
    "hardly scales": lambda n: 1.0 if n == 1 else 1.35 + 0.02 * (n - 2),
}


def shares() -> tuple[int, ...]:
    """Slots of each job: those with the highest power mean (p = -1) of speedups over the fair share."""
    fair = SLOTS // len(JOBS)

    def fitness(counts: tuple[int, ...]) -> float:
        ups = [speed(n) / speed(fair) for speed, n in zip(JOBS.values(), counts, strict=True)]
        return len(ups) / sum(1 / up for up in ups)

    allowed = (c for c in itertools.product(range(1, SLOTS), repeat=len(JOBS)) if sum(c) == SLOTS)
    return max(allowed, key=fitness)


def fairness_picture() -> str:
    """Equal shares beside the shares of highest fitness."""
    picture = Picture(
        270, "Equal slots beside slots by fitness: jobs that gain from slots get those that others do not use"
    )
    fair, chosen = SLOTS // len(JOBS), shares()
    width, top, gap = 21, 66, 50
    for left, head, counts in ((190, "Equal slots", (fair,) * len(JOBS)), (560, "Highest fitness", chosen)):
        picture.head(left, 28, head)
        ups = []
        for row, (speed, count) in enumerate(zip(JOBS.values(), counts, strict=True)):
            y = top + gap * row
            for slot in range(count):
                picture.rect(left + slot * (width + 3), y, width, 26, (BLUE, ORANGE, GREEN)[row])
            ups.append(speed(count) / speed(fair))
            picture.text(left + count * (width + 3) + 8, y + 18, f"speedup {ups[-1]:.2f}", "t")
        fitness = len(ups) / sum(1 / up for up in ups)
        picture.text(left, top + gap * 3 + 12, f"fitness {fitness:.2f}, goodput of all {_total(counts):.1f}", "t")
    for row, name in enumerate(JOBS):
        picture.text(170, top + gap * row + 18, name, anchor="end")
    picture.text(190, 258, f"{SLOTS} slots. Speedup: goodput over that with the fair share of {fair} slots.")
    return picture.done()


def _total(counts: Sequence[int]) -> float:
    return sum(speed(n) for speed, n in zip(JOBS.values(), counts, strict=True))


# --- a resize --------------------------------------------------------------------------------------------------------

STALL_S, WHOLE_S, RESTART_S = 0.24, 0.51, 4.9  # 1 -> 2 replicas, 63 MB, two CPU cores: docs/performance.md


def resize_picture() -> str:
    """Who trains when: a resize in place, and by checkpoint and restart."""
    picture = Picture(290, "A resize in place pauses training briefly; a restart stops it for seconds")
    left, scale, begin = 150, 118.0, 0.6

    def x(at: float) -> float:
        return left + scale * (at + begin)

    start = WHOLE_S - STALL_S
    end = 5.5
    picture.head(left, 26, "In place: processes stay")
    rows = (
        (46, "replica 0", ((-begin, start, BLUE), (WHOLE_S, end, BLUE))),
        (82, "replica 1", ((WHOLE_S, end, GREEN),)),
        (168, "replica 0", ((-begin, 0.0, BLUE), (RESTART_S, end, BLUE))),
        (204, "replica 1", ((RESTART_S, end, GREEN),)),
    )
    for y, name, spans in rows:
        picture.text(left - 12, y + 17, name, anchor="end")
        picture.rect(x(-begin), y, scale * (begin + end), 26)
        for since, until, colour in spans:
            picture.rect(x(since), y, scale * (until - since), 26, colour)
    picture.rect(x(0), 82, scale * start, 26, ORANGE)
    picture.text(
        x(WHOLE_S) + 8, 124, f"replica 1 starts while replica 0 trains; then {STALL_S} s of pause, for its state"
    )
    picture.head(left, 154, "By checkpoint and restart")
    picture.text(x(0) + 10, 185, f"saves, ends, starts, imports, loads: {RESTART_S} s in which nothing trains", "t")
    for second in range(6):
        picture.text(x(second), 250, f"{second} s", anchor="middle")
    for place, colour, words in ((150, BLUE, "trains"), (250, GREEN, "trains, new"), (390, ORANGE, "starts")):
        picture.rect(place, 266, 14, 14, colour)
        picture.text(place + 22, 278, words)
    return picture.done()


# --- the README's chart ----------------------------------------------------------------------------------------------

# Columns of the first table of docs/performance.md, and what they are called here.
BARS = {  # policies of docs/results.md, and their names for people
    "pollux, learnt": "Pollux, learning lengths",
    "pollux": "Pollux",
    "sia": "Sia",
    "pollux, the artifact": "the paper's own code",
    "equal": "equal shares",
    "tiresias": "Tiresias",
    "optimus": "Optimus",
}


def average_minutes() -> dict[str, float]:
    """Average job completion time of each policy, over the OSDI'21 workloads of the results' page."""
    page = (ROOT / "docs/results.md").read_text()
    table = page[page.index("*mean of") :].split("<details>")[0]
    rows = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in table.splitlines() if "|" in line]
    averages = {row[0]: float(row[1].replace(",", "")) for row in rows if row[0] in BARS}
    return {word: averages[policy] / 60 for policy, word in BARS.items()}


def headline_picture() -> str:
    """Bars of the average completion time."""
    minutes = average_minutes()
    first, *others = minutes.values()
    assert first <= min(others) + 0.1, "the title says that Pollux is shortest"
    picture = Picture(
        40 + 32 * len(minutes), "Average job completion time on the same jobs, in minutes: shortest with Pollux"
    )
    picture.head(170, 22, "Average job time, 160 published jobs on 64 GPUs, simulated")
    scale = 560 / max(minutes.values())
    for row, (name, value) in enumerate(minutes.items()):
        y = 40 + 32 * row
        is_ours = name.startswith("Pollux")
        picture.text(158, y + 17, name, "t" if is_ours else "m", "end")
        picture.rect(170, y, scale * value, 24, BLUE if is_ours else "#8c959f")
        picture.text(178 + scale * value, y + 17, f"{value:.1f} min", "t")
    return picture.done()


PICTURES = {
    "headline": headline_picture,
    "goodput": goodput_picture,
    "noise-scale": noise_picture,
    "fairness": fairness_picture,
    "resize": resize_picture,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    folder = parser.parse_args().output
    for name, draw in PICTURES.items():
        (folder / f"{name}.svg").write_text(draw())
        print(folder / f"{name}.svg")


if __name__ == "__main__":
    main()
