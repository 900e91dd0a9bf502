"""Draw docs/images/slots.svg: slots that change hands, as a real server recorded it.

``python scripts/slots_picture.py [DATA]`` reads a server's data directory; without one, the recorded demo of the tests.
The picture moves by itself wherever SVG is shown, needs no script, and stands still where motion is not wanted.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from pollux.cli.gather import find_source, gather, parse_window  # noqa: E402
from pollux.simulator.recording import RecordedJob, Recording  # noqa: E402

OUTPUT = ROOT / "docs/images/slots.svg"
# Okabe and Ito's colours, which stay apart for people who see fewer of them.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442", "#999999")
LOOP_S = 14.0  # of the picture, whatever the recording took
HOLD = 0.12  # share of the loop in which the end is shown
WIDTH, LEFT, RIGHT, TOP, LANE, GAP = 880, 64, 286, 44, 44, 8


@dataclass(frozen=True, slots=True)
class Stay:
    """A job on a slot, for a while."""

    job: int
    slot: int
    begin: float
    end: float


def stays(jobs: Sequence[RecordedJob], num_slots: int) -> list[Stay]:
    """Which job is on which slot: counts are on record, so a job keeps the slots it has, and takes free ones."""
    times = sorted({moment for job in jobs for begin, end, _ in job.allocations for moment in (begin, end)})
    on: list[tuple[int, float] | None] = [None] * num_slots
    found = []
    for now in times:
        wanted = [sum(n for begin, end, n in job.allocations if begin <= now < end) for job in jobs]
        for slot in reversed(range(num_slots)):
            held = on[slot]
            if held is not None and sum(one is not None and one[0] == held[0] for one in on) > wanted[held[0]]:
                found.append(Stay(held[0], slot, held[1], now))
                on[slot] = None
        for index, count in enumerate(wanted):
            for _ in range(count - sum(one is not None and one[0] == index for one in on)):
                if None not in on:
                    break  # a resize counts both sizes for a moment
                on[on.index(None)] = (index, now)
    return sorted(found, key=lambda stay: (stay.begin, stay.slot))


def _batches(job: RecordedJob) -> str:
    """From which batch to which it went."""
    seen = [point.total_batch for point in job.points]
    if not seen:
        return ""
    return f"batch {seen[0]}" if max(seen) == seen[0] else f"batch {seen[0]} → {max(seen)}"


def draw(recording: Recording) -> str:
    """The picture."""
    jobs, num_slots = recording.jobs, recording.num_slots
    length_s = max(job.finished_at for job in jobs)
    plot = WIDTH - LEFT - RIGHT
    bottom = TOP + num_slots * (LANE + GAP)
    height = bottom + 44

    def x(moment: float) -> float:
        return LEFT + plot * moment / length_s

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="13">',
        f"<title>{len(jobs)} training jobs share {num_slots} slots; each grows and shrinks as others come</title>",
        "<style>.t{fill:#1f2328}.m{fill:#59636e}.f{fill:#f6f8fa}"
        "@media(prefers-color-scheme:dark){.t{fill:#f0f6fc}.m{fill:#9198a1}.f{fill:#161b22}}"
        f"@keyframes s{{0%{{width:0}}{100 * (1 - HOLD):.0f}%,100%{{width:{plot}px}}}}"
        f"@keyframes c{{0%{{x:{LEFT}px}}{100 * (1 - HOLD):.0f}%,100%{{x:{LEFT + plot}px}}}}"
        f".s{{animation:s {LOOP_S:g}s linear infinite}}.c{{animation:c {LOOP_S:g}s linear infinite}}"
        "@media(prefers-reduced-motion:reduce){.s,.c{animation:none}.c{display:none}}</style>",
        f'<clipPath id="p"><rect class="s" x="{LEFT}" y="0" width="{plot}" height="{height}"/></clipPath>',
        f'<text class="t" x="{LEFT}" y="24" font-size="15" font-weight="600">'
        f"{len(jobs)} real training jobs share {num_slots} slots; processes are kept as jobs grow and shrink</text>",
    ]
    for slot in range(num_slots):
        y = TOP + slot * (LANE + GAP)
        parts.append(f'<text class="m" x="{LEFT - 12}" y="{y + LANE / 2 + 4}" text-anchor="end">slot {slot + 1}</text>')
        parts.append(f'<rect class="f" x="{LEFT}" y="{y}" width="{plot}" height="{LANE}" rx="4"/>')
    parts.append('<g clip-path="url(#p)">')
    for stay in stays(jobs, num_slots):
        y, wide = TOP + stay.slot * (LANE + GAP), x(stay.end) - x(stay.begin)
        parts.append(
            f'<rect x="{x(stay.begin):.1f}" y="{y}" width="{max(wide - 1, 1):.1f}" height="{LANE}" rx="4" '
            f'fill="{COLOURS[stay.job % len(COLOURS)]}"/>'
        )
    parts.append("</g>")
    parts.append(f'<rect class="m c" x="{LEFT}" y="{TOP - 6}" width="1.5" height="{bottom - TOP}"/>')
    step_s = next((step for step in (10, 20, 30, 60, 120, 300, 600, 1800, 3600) if length_s / step <= 8), 7200)
    for number in range(int(length_s // step_s) + 1):
        moment = number * step_s
        parts.append(f'<text class="m" x="{x(moment):.1f}" y="{bottom + 18}" text-anchor="middle">{moment} s</text>')
    for index, job in enumerate(jobs):
        y = TOP + 12 + index * (bottom - TOP) / len(jobs)
        left = WIDTH - RIGHT + 24
        parts.append(
            f'<rect x="{left}" y="{y - 10}" width="12" height="12" rx="2" fill="{COLOURS[index % len(COLOURS)]}"/>'
            f'<text class="t" x="{left + 20}" y="{y}">{escape(job.spec.name)}'
            f'<tspan class="m" dx="8">{_batches(job)}</tspan></text>'
        )
    parts.append("</svg>\n")
    return "\n".join(parts)


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "data", nargs="?", type=Path, help="a server's data directory; the tests' recorded demo if left out"
    )
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        if options.data is None:
            from tests.recordings import unpack

            options.data = unpack("demo", Path(made))
        recording = gather(find_source(options.data, None), parse_window(None, None, None))
    options.output.write_text(draw(recording))
    print(f"{options.output}: {len(recording.jobs)} jobs on {recording.num_slots} slots")


if __name__ == "__main__":
    main()
