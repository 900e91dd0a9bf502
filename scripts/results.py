"""Runs the suites and writes what came out into docs/results.md and docs/policies.md.

    python scripts/results.py [--suite NAME ...] [--workloads N] [--folder out/results] [--keep]

Each suite is ``pollux compare --suite NAME``; its JSON stays in the folder until it is run again. With ``--keep`` a
suite that is there is not run again. The published data is looked for as that command does (``--artifacts``,
``../shared``). No page is written if one of the suites that were run failed. A suite whose JSON is not in the folder
keeps its part of docs/results.md, and the page says so; without any part there it is an error. Text between the marks
in docs/policies.md is replaced, once ``osdi21`` and ``hetero`` are there; the rest is by hand.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pollux.evaluation.registry import SUITES
from pollux.evaluation.suites import Column, by_table
from pollux.policy import policy_names

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
SUITE_TIMEOUT_S = 3600.0
Document = Mapping[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", action="append", choices=list(SUITES), help="only this; may be repeated")
    parser.add_argument("--folder", type=Path, default=ROOT / "out" / "results", help="where the suites' JSON is")
    parser.add_argument("--artifacts", type=Path, help="folder with osdi21/ and sia/")
    parser.add_argument("--workloads", type=int, help="only the first so many workloads of each; the page says so")
    parser.add_argument("--keep", action="store_true", help="do not run a suite again whose JSON is there")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    failures = []
    for name in arguments.suite or SUITES:
        if not (arguments.keep and (folder / f"{name}.json").is_file()):
            failures += run(name, folder, arguments.artifacts, arguments.workloads)
    if failures:
        print(f"no page: {'; '.join(failures)}; --keep runs only what is missing", file=sys.stderr)
        return 1
    there = [name for name in SUITES if (folder / f"{name}.json").is_file()]
    results, policies = DOCS / "results.md", DOCS / "policies.md"
    before = earlier_parts(results.read_text() if results.is_file() else "")
    missing = [name for name in SUITES if name not in there and name not in before]
    if missing or not there:
        print(f"no page yet: {', '.join(missing or SUITES)} not run", file=sys.stderr)
        return 1
    documents = {name: json.loads((folder / f"{name}.json").read_text()) for name in there}
    made = {results: results_page(documents, before)}
    if {claim.suite for claim in CLAIMS} <= documents.keys():
        made[policies] = with_blocks(policies.read_text(), policy_blocks(documents))
    for page, text in made.items():
        page.write_text(text)
    print(f"wrote {' and '.join(map(str, made))}")
    return 0


def run(name: str, folder: Path, artifacts: Path | None, most_workloads: int | None = None) -> list[str]:
    """Why it failed, if it did: the suite's document is there only if this run has written it.

    A policy that fails makes the command fail with 1, but the document tells so, and the rest is there.
    """
    document = folder / f"{name}.json"
    document.unlink(missing_ok=True)  # or an older run's figures would be published as this one's
    words = [sys.executable, "-m", "pollux", "compare", "--suite", name, "--output", str(document)]
    words += ["--artifacts", str(artifacts)] if artifacts is not None else []
    words += ["--workloads", str(most_workloads)] if most_workloads is not None else []
    print(" ".join(words[1:]), flush=True)
    try:
        code = subprocess.run(words, cwd=ROOT, timeout=SUITE_TIMEOUT_S, check=False).returncode
    except subprocess.TimeoutExpired:
        code, reason = None, f"took longer than {SUITE_TIMEOUT_S:g} s"
    else:
        reason = f"ended with exit code {code}"
    if code in (0, 1) and document.is_file():
        return []
    document.unlink(missing_ok=True)
    return [f"suite {name} {reason}"]


# docs/results.md ------------------------------------------------------------------------------


def earlier_parts(page: str) -> dict[str, str]:
    """The parts of a page that was written before, by suite; each begins with its title and names its command."""
    parts = {}
    for part in re.split(r"^(?=## )", page, flags=re.MULTILINE)[1:]:
        if (command := re.search(r"^    pollux compare --suite (\w+)", part, re.MULTILINE)) is not None:
            parts[command[1]] = part.rstrip()
    return parts


def results_page(documents: Mapping[str, Document], before: Mapping[str, str] | None = None) -> str:
    some = next(iter(documents.values()))
    versions = ", ".join(f"{name} {number}" for name, number in some["versions"].items())
    parts = [
        "# Results",
        "",
        _wrapped(
            "The results of the suites of `pollux compare`. `python scripts/results.py` runs them all and writes "
            "this page; each part is one command, which also takes `--html FILE` for a page with plots. The "
            "artifacts' data is not part of the project ([where it is looked for](simulation.md#suites)). Words "
            "are explained in [Simulation](simulation.md#words-in-tables); rows in italics are the artifacts', "
            "measured with their own code, and × is the average JCT over theirs. Simulated times repeat to the "
            "last digit; decision times depend on the machine, whose cores were all busy."
        ),
        "",
        f"Made with {versions} on a machine with {some['machine']}.",
    ]
    kept = [name for name in SUITES if name in (before or {}) and name not in documents]
    if kept:
        parts += ["", _wrapped(f"Not run again with this version, and as they were before: {', '.join(kept)}.")]
    for name in [name for name in SUITES if name in documents or name in kept] or documents:
        if name not in documents:
            parts += ["", (before or {})[name]]
            continue
        document = documents[name]
        parts += ["", f"## {document['title']}", "", f"    {document['command']}", "", _wrapped(document["about"])]
        parts += [f"\n{_wrapped(note)}" for note in document["notes"]]
        parts += [f"\nLeft out: {name} ({reason})." for name, reason in document["failed"].items()]
        tables = list(reversed(by_table(document["rows"]).items()))
        has_means = len(tables) > 1 and bool(tables[0][1][0].get("is_mean"))
        for number, (title, rows) in enumerate(tables if has_means else reversed(tables)):
            table = markdown(document["columns"], rows)
            folded = has_means and number > 0
            parts += ["", f"<details><summary>{title}</summary>" if folded else f"*{title}*", "", table]
            parts += ["", "</details>"] if folded else []
        parts += ["", f"{document['wall_s']:.0f} s in all."]
    return "\n".join(parts) + "\n"


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def markdown(columns: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> str:
    shown = [Column(**column) for column in columns]
    shown = [column for column in shown if any(row.get(column.key) is not None for row in rows)]
    lines = [
        f"| | {' | '.join(column.heading for column in shown)} |",
        f"|---{'|---:' * len(shown)}|",
    ]
    for row in rows:
        label = f"*{row['policy']}*" if row["is_published"] else row["policy"]
        lines.append(f"| {label} | {' | '.join(column.text(row) for column in shown)} |")
    return "\n".join(lines)


# docs/policies.md -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a paper says of its policy, and what is nearest to that here."""

    policy: str
    says: str
    source: str
    suite: str = "osdi21"
    against: tuple[str, ...]
    key: str = "avg_jct_s"
    of: str = "average JCT"
    word: str
    names_lower: bool = False  # who has a lower one than this policy is added to the word


CLAIMS = (
    Claim(
        policy="pollux",
        says="37 to 50 % lower average JCT than the state of the art with tuned jobs",
        source="OSDI'21, abstract",
        against=("tiresias", "optimus"),
        word="About as claimed; Tiresias and Optimus are those of that paper's artifact, to the last digit.",
    ),
    Claim(
        policy="sia",
        says="30 to 93 % lower average JCT than the state of the art on three GPU types",
        source="SOSP'23, abstract",
        suite="hetero",
        against=("gavel", "tiresias"),
        word="Agrees. Against the artifact's own Sia see the suite.",
    ),
    Claim(
        policy="gavel",
        says="average JCT and makespan up to 3.5 times better than policies that know nothing of types",
        source="OSDI'20, abstract",
        suite="hetero",
        against=("tiresias",),
        word="Not here, on average: the median job ends sooner than under Tiresias, the longest much later. The aim "
        "is max-min fairness, and moves cost time. The Sia artifact's own Gavel is slow there, too.",
    ),
    Claim(
        policy="tiresias",
        says="average JCT up to 5.5 times better than a YARN-based manager",
        source="NSDI'19, abstract",
        against=("fifo",),
        word="The order agrees; `fifo` takes the place of that manager.",
    ),
    Claim(
        policy="gittins",
        says="comparable to solutions that assume perfect knowledge",
        source="NSDI'19 (Tiresias), abstract",
        against=("srtf", "tiresias"),
        word="Not quite: `srtf` knows every length, this learns their distribution from at most 160 jobs.",
    ),
    Claim(
        policy="optimus",
        says="job completion time better by about 139 %, makespan by 63 % than representative schedulers",
        source="EuroSys'18, abstract",
        against=("fifo", "equal"),
        word="Agrees for the queue, not for equal shares, which adapt batch sizes here.",
    ),
    Claim(
        policy="themis",
        says="fairness better by more than 2.25 times, 5 to 250 % more efficient",
        source="NSDI'20, abstract",
        against=("tiresias", "slaq"),
        key="rho_max",
        of="worst ρ",
        word="Agrees for Tiresias, which lets jobs starve.",
        names_lower=True,
    ),
    Claim(
        policy="shockwave",
        says="makespan 1.3 times, fairness 2 times better than fair schedulers",
        source="NSDI'23, abstract",
        suite="shockwave",
        against=("gavel, max-min fairness", "gavel, finish-time fairness"),
        key="makespan_s",
        of="makespan",
        word="Agrees, on the authors' trace; their physical runs are beside it in the suite.",
    ),
    Claim(
        policy="gandiva",
        says="26 % better utilisation of a cluster of 180 GPUs",
        source="OSDI'18, abstract",
        against=("fifo",),
        key="makespan_s",
        of="makespan",
        word="Utilisation shows in the makespan. Turns take minutes here, as suspending costs 30 s instead of one.",
    ),
    Claim(
        policy="antman",
        says="42 % more GPU memory and 34 % more compute in use",
        source="OSDI'20, abstract",
        against=("fifo",),
        word="Not the same measure. One tenant has the whole quota here, so that jobs are guaranteed their GPUs in "
        "order of submission, as in a queue, and the others wait or run as guests.",
    ),
    Claim(
        policy="slaq",
        says="quality up to 73 % better on average, delay up to 44 % lower than fair schedulers",
        source="SoCC'17, abstract",
        against=("equal",),
        word="Not comparable: it is after half-trained models early, and JCT counts the last step. `equal` adapts "
        "batch sizes besides.",
    ),
    Claim(
        policy="lucid",
        says="left out: its figures were not at hand",
        source="ASPLOS'23",
        against=("tiresias", "fifo"),
        word="It never preempts, and some jobs wait long (worst ρ).",
    ),
)


def policy_blocks(documents: Mapping[str, Document]) -> dict[str, str]:
    """Text for docs/policies.md by the name in its marks."""
    document = documents["osdi21"]
    tables = by_table(document["rows"])
    names = list(tables)
    blocks = {}
    for key, name in (("first", names[0]), ("mean", names[-1])):
        blocks[key] = f"*{name}*\n\n" + markdown(document["columns"], _by_jct(tables[name]))
    lines = ["| policy | its paper | here | |", "|---|---|---|---|"]
    for claim in CLAIMS:
        rows = {row["policy"]: row for row in list(by_table(documents[claim.suite]["rows"]).values())[-1]}
        lines.append(
            f"| `{claim.policy}` | {claim.says} ({claim.source}) | {_here(claim, rows)} | {_word(claim, rows)} |"
        )
    blocks["claims"] = "\n".join(lines)
    return blocks


def _by_jct(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return sorted(rows, key=lambda row: float(row["avg_jct_s"]))


def _here(claim: Claim, rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Our own ratio to each of the others; none to a policy that failed."""
    told = []
    for other in claim.against:
        if claim.policy in rows and other in rows:
            change = rows[claim.policy][claim.key] / rows[other][claim.key] - 1
            told.append(f"{change:+.0%} against `{other}`")
    return f"{claim.of} {', '.join(told)}" if told else "–"


def _word(claim: Claim, rows: Mapping[str, Mapping[str, Any]]) -> str:
    """With all policies that have a lower figure, from the lowest; variants of a policy are left out."""
    if not claim.names_lower or claim.policy not in rows:
        return claim.word
    found = {name: row[claim.key] for name, row in rows.items() if name in policy_names()}
    lower = sorted((name for name in found if found[name] < found[claim.policy]), key=lambda name: found[name])
    names = ", ".join(f"`{name}`" for name in lower)
    told = f"A lower {claim.of}, from the lowest: {names}." if lower else f"The lowest {claim.of} here."
    return f"{claim.word} {told}"


def with_blocks(text: str, blocks: Mapping[str, str]) -> str:
    """The text with new blocks between ``<!-- name -->`` and ``<!-- /name -->``."""
    for name, block in blocks.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if not pattern.search(text):
            raise SystemExit(f"docs/policies.md has no marks <!-- {name} --> and <!-- /{name} -->")
        text = pattern.sub(lambda match, block=block: f"{match[1]}{block}\n{match[2]}", text)  # type: ignore[misc]
    return text


if __name__ == "__main__":
    raise SystemExit(main())
