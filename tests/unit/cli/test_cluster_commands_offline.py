"""The cluster commands where no server is needed: figures, tables, descriptions, and what is refused before sending."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from pollux.api.cluster import ClusterSummary
from pollux.api.job import JobDetail, JobSummary
from pollux.api.request import OPTIONS
from pollux.cli.app import app
from pollux.cli.describe import description, model_lines, speedup_table
from pollux.cli.follow import exit_code, outcome
from pollux.cli.job_table import batch, job_table
from pollux.cli.top import header
from pollux.cli.up import arguments_of
from pollux.client import Job
from pollux.reports import numbers
from tests.messages import filled

runner = CliRunner()
READING = (
    ("ls",),
    ("status",),
    ("nodes",),
    ("top", "--once"),
    ("describe", "x"),
    ("logs", "x"),
    ("wait", "x"),
    ("cancel", "x"),
    ("drain", "x"),
    ("api", "cluster"),
    ("decisions",),
    ("decisions", "--follow"),
    ("dashboard",),
)
ELASTIC = "from pollux import train\n"


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("POLLUX_URL", "POLLUX_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("POLLUX_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


VIEW: dict[str, Any] = {
    "name": "gpt",
    "state": "running",
    "submitted_at": 100.0,
    "finished_at": None,
    "reason": "",
    "note": "",
    "num_replicas": 2,
    "total_batch": 256,
    "device_batch": 64,
    "accum_steps": 1,
    "noise_scale": 1234.5,
    "noise_scale_error": None,
    "efficiency": 0.83,
    "goodput": 12345.0,
    "progress": 0.42,
    "remaining_s": 65.0,
}


def view(**changes: Any) -> JobSummary:
    return filled(JobSummary, **{**VIEW, **changes})


def detail(**changes: Any) -> JobDetail:
    decision = {
        "round": 7,
        "at": 120.0,
        "trigger": "job ended",
        "before": 1,
        "after": 2,
        "speedup_before": 0.9,
        "speedup_after": 1.7,
        "move_factor": 0.95,
        "note": "",
        "fitness": 1.5,
        "upper_bound": 1.6,
    }
    options = {"option_replicas": [1, 2, 4], "option_speedups": [1.0, 1.7, None]}
    params = {"alpha_g": 0.01, "beta_g": 1e-3, "alpha_n": 1e-8, "beta_n": 1e-8, "alpha_r": 0.02, "beta_r": 0.001}
    model = {"params": {**params, "gamma": 2.0}, "num_configurations": 3, "max_replicas": 2}
    model = {**model, "max_on_a_node": 2, "max_nodes": 1, "rmsle": 0.03}
    known = {
        **VIEW,
        "kind": "elastic",
        "application": "",
        "command": ["python", "my train.py"],
        "cwd": "/w",
        "started_at": 101.0,
        "allocation": [["a", 2]],
        "min_replicas": 1,
        "max_replicas": 1 << 20,
        "weight": 1.0,
        "is_preemptible": True,
        "num_resizes": 1,
        "num_crashes": 0,
        "exit_code": None,
        "after": [],
        "time_limit_s": None,
        "epoch": 3,
        "num_steps": 900,
        "throughput": 15000.0,
        "metrics": {"accuracy": 0.91234567},
        "reported_at": 150.0,
        "running_s": 50.0,
        "lost_s": 1.0,
        "lost_share": 0.02,
        "remaining_s": 65.0,
        "failure": "",
        "models": {"cpu": model},
        "decision": {**decision, **options},
        "decisions": [decision],
        "transitions": [{"at": 101.0, "source": "pending", "target": "starting", "reason": "start on a"}],
        "training_notes": [],
        "resizes": [
            {"generation": 2, "at": 120.0, "before": [["a", 1]], "after": [["a", 2]], "runs_at": 121.0, "took_s": 1.0}
        ],
        "replicas": [{"replica_id": "r0", "rank": 0, "node": "a", "slot": 0, "pid": 12, "state": "member"}],
        "log_directory": "/w/logs",
        **changes,
    }
    return filled(JobDetail, **known)


def text_of(renderable: Any, width: int = 200) -> str:
    console = Console(width=width, highlight=False)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


# Figures --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (float("nan"), "-"),
        (-3, "0s"),
        (2.6e-8, "0s"),
        (0, "0s"),
        (0.0123, "12.3ms"),
        (8.5e-5, "85µs"),
        (0.42, "0.42s"),
        (7.46, "7.5s"),
        (9.96, "10s"),
        (59.6, "1m00s"),
        (65, "1m05s"),
        (3599.7, "1h00m"),
        (7400, "2h03m"),
        (270000, "3d03h"),
    ],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert numbers.duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0, "0"),
        (0.01234, "0.0123"),
        (7.5, "7.5"),
        (99.97, "100"),
        (9999, "9999"),
        (9999.6, "10k"),
        (12800, "12.8k"),
        (999600, "1M"),
        (3.21e6, "3.21M"),
        (float("inf"), "-"),
    ],
)
def test_numbers(value: float | None, text: str) -> None:
    assert numbers.number(value) == text


def test_shares_and_rates() -> None:
    assert [numbers.share(value) for value in (None, 0, 0.0071, 0.42, 1)] == ["-", "0%", "0.7%", "42%", "100%"]
    assert [numbers.rate(value) for value in (None, 12.5)] == ["-", "12.5/s"]


# Tables ---------------------------------------------------------------------------------------


def test_the_job_table_has_a_row_per_job_and_all_columns() -> None:
    text = text_of(job_table([view(), view(name="b", state="pending", num_replicas=0, reason="waiting for a")], 160.0))
    header, first, second = text.splitlines()
    for name in (
        "job",
        "state",
        "replicas",
        "batch",
        "noise scale",
        "efficiency",
        "goodput",
        "progress",
        "left",
        "age",
    ):
        assert name in header
    assert "metric" not in header
    numbers_of_it = ["2", "256", "=", "2×64×2", "1234", "83%", "12.3k/s", "42%", "1m05s", "1m00s"]
    assert first.split() == ["gpt", "running", *numbers_of_it]
    assert "waiting for a" in second


def test_the_metric_that_a_script_logs_has_a_column_where_there_is_room() -> None:
    views = [
        view(metric_name="val_loss", metric=0.31234),
        view(name="b", metric_name="loss", metric="nan"),
        view(name="c"),
    ]
    header, *rows = text_of(job_table(views, 160.0, width=140)).splitlines()
    assert header.split()[-3:] == ["left", "metric", "age"]
    cells = [row.split()[-3:-1] for row in rows]
    assert cells == [["val_loss", "0.312"], ["loss", "nan"], ["1m05s", "-"]]
    narrow = text_of(job_table(views, 160.0, width=80)).splitlines()[0].split()
    assert "metric" not in narrow and {"progress", "left", "goodput"} <= set(narrow)


def test_what_a_job_wrote_is_text_and_moves_no_cursor() -> None:
    text = text_of(job_table([view(name="[red]x", state="failed", reason="bad \x1b[2J [bold]thing\nmore")], 160.0))
    assert "[red]x" in text
    assert "bad  [2J [bold]thing" in text
    assert "\x1b" not in text
    assert "more" not in text


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_a_narrow_terminal_cuts_reasons_not_figures(width: int) -> None:
    text = text_of(job_table([view(state="pending", reason="x" * 300)], 160.0, width=width), width)
    assert len(text.splitlines()) == 2
    assert all(len(line) <= width for line in text.splitlines())
    if width >= 80:
        assert "12.3k/s" in text


def test_parts_of_a_batch_that_do_not_make_it_are_not_shown() -> None:
    assert batch(view(num_replicas=4)) == "256"  # resized since the report
    assert batch(view(num_replicas=1, total_batch=64, accum_steps=0)) == "64"
    assert batch(view(total_batch=None)) == "-"


# Descriptions ---------------------------------------------------------------------------------


def test_a_model_of_one_replica_is_told_in_the_singular() -> None:
    model = next(iter(detail().models.values()))
    alone = dataclasses.replace(model, num_configurations=1, max_replicas=1)
    assert next(model_lines({"cpu": alone})).startswith("on cpu, measured in 1 setup with up to 1 replica;")


def test_a_description_says_why() -> None:
    text = text_of(description(detail(), 160.0))
    for part in (
        "gpt  running",
        "python 'my train.py'",
        "elastic, replicas 1 or more, may be preempted",
        "2 replicas: 2 on a",
        "42%, 900 steps, 3 passes over the data, about 1m05s left",
        "accuracy 0.912346",
        "a pass takes 10ms and 1ms for each example",
        "exchanging gradients between 2 replicas on one node: 20ms, and 1ms for each further one",
        "on cpu, measured in 3 setups with up to 2 replicas; its predictions are 3.0% off",
        "256: 64 per device, 2 passes a step",
        "round 7 (job ended): 1 -> 2 replicas, speedup 0.9 -> 1.7",
        "all jobs together have a mean speedup of 1.5, where at most 1.6 is possible",
        "1.0s lost, 2.0% of its time",
        "pending -> starting  start on a",
        "/w/logs",
    ):
        assert part in text, part
    assert "exchanging gradients between 2 replicas across nodes: not measured yet" in text
    assert "alpha" not in text and "γ" not in text and "factor of" not in text  # that is for --json


def test_what_takes_no_time_is_not_told_in_millionths() -> None:
    models = {"cpu": {"params": {"alpha_g": 2.58e-8, "beta_g": 1.26e-3, "gamma": 1.0}, "num_configurations": 1}}
    text = text_of(description(detail(models=models), 160.0))
    assert "a pass takes 1.26ms for each example" in text and "overlap" not in text
    assert "on one node: not measured yet" in text


def test_why_it_has_its_slots_stands_below_the_change() -> None:
    lines = text_of(description(detail(why="a gave 1 slot to gpt"), 160.0)).splitlines()
    _, change, why, *_ = lines[lines.index("Decisions that changed it") :]
    assert "1 -> 2 replicas" in change and why.strip() == "a gave 1 slot to gpt"


def test_the_chosen_speedup_is_marked() -> None:
    table = speedup_table(detail().decision)
    rows = text_of(table).splitlines()
    assert " ".join(rows[0].split()) == "replicas speedup (1.0: as fast as with its fair share)"
    assert [row.split() for row in rows[1:]] == [["1", "1", "before"], ["2", "1.7", "chosen"], ["4", "-"]]


def test_only_a_resize_that_can_still_end_is_under_way() -> None:
    resizes = [
        {"at": 110.0, "before": [], "after": [["a", 1]], "took_s": None},
        {"at": 120.0, "before": [["a", 1]], "after": [["a", 2]], "took_s": None},
    ]
    assert text_of(description(detail(resizes=resizes), 200.0)).count("under way") == 1
    over = detail(resizes=resizes, state="succeeded", finished_at=150.0)
    assert "under way" not in text_of(description(over, 200.0))


def test_a_restart_after_a_crash_is_listed_with_what_it_cost() -> None:
    words = "gpt-0 was killed by SIGKILL; started again from step 542 after 5.0s; about 270 steps (27s) trained again"
    restart = {"at": 130.0, "pause_s": 5.0, "step": 542, "words": words}
    told = {"at": 130.0, "source": "running", "target": "running", "reason": "gpt-0 was killed by SIGKILL"}
    lost = {"resizes": [{"at": 101.0, "after": [["a", 2]], "took_s": 3.0}], "lost_s": 32.2, "lost_share": 0.3}
    text = text_of(description(detail(restarts=[restart], transitions=[told], **lost), 200.0))
    assert "never resized, started again once after a crash; 32s lost, 30% of its time" in text
    (row,) = [line for line in text.splitlines() if words in line]
    assert "5.0s  gpt-0 was killed" in row
    assert "while running  gpt-0 was killed by SIGKILL" in text and "running -> running" not in text
    assert "started again" not in text_of(description(detail(), 200.0))


def test_a_resize_under_way_says_what_it_waits_for_and_since_when() -> None:
    resizes = [{"at": 120.0, "before": [["a", 1]], "after": [["a", 3]], "took_s": None}]
    phase = {"phase": "new replicas start: 1 of 2 are ready", "phase_since": 120.0}
    text = text_of(description(detail(state="resizing", resizes=resizes, **phase), 200.0))
    told = "new replicas start: 1 of 2 are ready (for 1m20s)"
    assert told in text.splitlines()[0] and text.count(told) == 2 and "under way" not in text


@pytest.mark.parametrize(
    ("noise", "shown"),
    [((120.0, 15.2), "120 ± 15.2 examples"), ((120.0, None), "120 examples"), ((None, None), "-")],
)
def test_a_noise_scale_comes_with_its_standard_error(noise: tuple[float | None, float | None], shown: str) -> None:
    job = detail(noise_scale=noise[0], noise_scale_error=noise[1])
    lines = [line.strip() for line in text_of(description(job, 160.0)).splitlines()]
    assert f"noise scale  {shown}" in lines


def test_what_training_decided_is_told_among_the_states() -> None:
    moves = [
        {"at": 101.0, "source": "pending", "target": "starting", "reason": "1 replica"},
        {"at": 140.0, "source": "running", "target": "resizing", "reason": "1 -> 2 replicas"},
    ]
    many = [{"id": n, "at": 110.0 + n, "text": f"step {n}: batch 64 -> 32"} for n in range(20)]
    text = text_of(description(detail(transitions=moves, training_notes=many), 160.0))
    lines = [line.split("  ", 2)[2].strip() for line in text.partition("History\n")[2].splitlines()]
    training = [f"training  step {n}: batch 64 -> 32" for n in range(10, 20)]
    assert lines == ["pending -> starting  1 replica", *training, "running -> resizing  1 -> 2 replicas"]


def test_a_script_that_logs_nothing_is_told_how() -> None:
    def told(**changes: Any) -> bool:
        text = text_of(description(detail(metrics={}, **changes), 160.0))
        return "metrics      no metric: call run.log(loss=...) in the script" in text

    assert told(started_at=101.0, reported_at=150.0)
    assert not told(started_at=101.0, reported_at=120.0)  # its first epoch may not be over
    assert not told(kind="restartable")
    assert "no metric" not in text_of(description(detail(), 160.0))


def test_a_failure_comes_with_its_traceback() -> None:
    failure = "\n".join(["Traceback:", *(f"  line {n}" for n in range(100)), "ValueError: [bold]no"])
    text = text_of(description(detail(state="failed", reason="exit code 1\nmore", failure=failure), 160.0))
    assert "gpt  failed  exit code 1\n" in text
    assert "ValueError: [bold]no" in text
    assert "line 99" in text
    assert "line 10\n" not in text
    assert "lines before" in text


def test_a_job_of_which_nothing_is_known_can_be_described() -> None:
    unknown = dict.fromkeys(("reported_at", "progress", "goodput", "started_at", "lost_s", "lost_share", "cwd"))
    empty = {"models": {}, "decision": None, "decisions": [], "resizes": [], "transitions": [], "replicas": []}
    text = text_of(description(detail(**unknown, **empty, allocation=[], state="pending", reason="waiting"), 160.0))
    assert "gpt  pending  waiting" in text
    assert "no decision was made" in text
    assert list(model_lines({})) == [text.splitlines()[text.splitlines().index("Performance model") + 1].strip()]


@pytest.mark.parametrize(
    ("state", "why", "shown"),
    [
        ("succeeded", "succeeded", "gpt succeeded"),
        ("cancelled", "cancelled", "gpt cancelled"),
        ("cancelled", "a mistake", "gpt cancelled: a mistake"),
        ("failed", "gpt: exited with 1\nTraceback", "gpt failed: exited with 1"),
        ("failed", "", "gpt failed"),
    ],
)
def test_outcomes(state: str, why: str, shown: str) -> None:
    assert outcome(Job(None, "gpt", view(state=state, reason=why))) == shown  # type: ignore[arg-type]


def test_the_bar_of_the_slots_is_never_longer_than_full() -> None:
    cluster = filled(ClusterSummary, policy="pollux", num_rounds=1, num_slots=2)
    full, over = (header(dataclasses.replace(cluster, num_used_slots=used)).plain for used in (2, 4))
    assert over == full.replace("2 of 2", "4 of 2")


@pytest.mark.parametrize(
    ("state", "code", "expected"),
    [("succeeded", None, 0), ("failed", 3, 3), ("failed", -9, 137), ("failed", None, 1), ("cancelled", 0, 1)],
)
def test_exit_codes(state: str, code: int | None, expected: int) -> None:
    assert exit_code(view(state=state, exit_code=code)) == expected


# Refused --------------------------------------------------------------------------------------


def assert_refused(arguments: list[str], *words: str) -> None:
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr


@pytest.mark.parametrize("arguments", READING, ids=lambda arguments: arguments[0])
def test_no_server(arguments: tuple[str, ...], nowhere: Path) -> None:
    assert_refused(list(arguments), "no Pollux server runs", str(nowhere / "data"), "pollux up")


def test_a_server_that_was_killed_is_no_server(nowhere: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(30)
    (nowhere / "data").mkdir()
    (nowhere / "data/server.json").write_text(json.dumps({"url": "http://127.0.0.1:9", "pid": ended.pid}))
    assert_refused(["ls"], "no Pollux server runs")


def test_a_missing_script_is_seen_before_anything_is_sent(nowhere: Path) -> None:
    assert_refused(["submit", "--", "python", "train.py"], "'train.py' is not there", str(nowhere))
    assert_refused(["run", "--", "python", "train.py"], "'train.py' is not there")


@pytest.mark.parametrize("command", ["submit", "run"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--min-replicas", "4", "--max-replicas", "2"], ["min is above max"]),
        (["--name", "a/b"], ["'a/b'", "a-b"]),
        (["--replicas", "two"], ["--replicas", "'two'"]),
        (["--weight", "nan"], ["weight"]),
        (["--time-limit", "soon"], ["--time-limit"]),
        (["--env", "RANK=1"], ["'RANK'"]),
        (["--env", "A"], ["--env", "KEY=VALUE"]),
        (["--cwd", "nowhere"], ["there is no"]),
        (["--array", "9-0"], ["'9-0'"]),
    ],
    ids=lambda value: value[0].lstrip("-") if isinstance(value, list) else None,
)
def test_options_that_cannot_be(command: str, options: list[str], words: list[str], nowhere: Path) -> None:
    script = nowhere / "train.py"
    script.write_text(ELASTIC)
    assert_refused([command, *options, "--", "python", str(script)], *words)


def test_a_bad_header_is_named_with_its_line(nowhere: Path) -> None:
    (nowhere / "train.py").write_text("#!/usr/bin/env python\n#POLLUX --max-replica 2\n" + ELASTIC)
    assert_refused(["submit", "--", "python", "train.py"], "train.py, line 2", "--max-replicas")


def test_errors_of_a_script_are_said_and_do_not_keep_it_from_the_server(nowhere: Path) -> None:
    loops = "for epoch in range(3):\n    for x in loader:\n        print(x)\n"
    (nowhere / "train.py").write_text(f"{ELASTIC}run = train.init()\nloader = run.dataloader(data)\n{loops}")
    said = runner.invoke(app, ["submit", "--", "python", "train.py"]).stderr
    assert "train.py:4: error: a restart begins this loop" in said
    assert "warning" not in said and said.endswith("--data, $POLLUX_DATA\n")  # no server runs


def test_odd_servers() -> None:
    for url in ("localhost:7077", "http://", "http://127.0.0.1:99999", "http://[::1", "ftp://a", "http://a\n"):
        assert_refused(["ls", "--server", url], "a URL is needed")
    assert_refused(["ls", "--server", "http://127.0.0.1:9"], "no Pollux server answers")
    assert_refused(["ls", "--state", "runing"], "Did you mean 'running'?")
    assert_refused(["up", "--policy", "polux"], "Did you mean 'pollux'?")
    assert_refused(["wait", "x", "--timeout", "soon"], "'soon'")


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLLUX_TOKEN", "x" * 20)
    assert_refused(["ls", "--server", "http://127.0.0.1:9"], "no Pollux server answers at http://127.0.0.1:9")


# The command itself ---------------------------------------------------------------------------


def test_every_option_of_a_job_is_one_of_the_command() -> None:
    for command in ("submit", "run"):
        shown = runner.invoke(app, [command, "--help"], env={"COLUMNS": "200"}).stdout
        for option in OPTIONS:
            assert f"--{option.name}" in shown
            if option.type == "flag":
                assert f"--no-{option.name}" in shown


@pytest.mark.parametrize(
    ("shell", "part"),
    [("bash", "complete -o default -F"), ("zsh", "#compdef pollux"), ("fish", "complete --command pollux")],
)
def test_completion_scripts(shell: str, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shellingham.detect_shell", lambda: (shell, f"/bin/{shell}"))  # not who started the tests
    result = runner.invoke(app, ["--show-completion"], prog_name="pollux")
    assert result.exit_code == 0, result.output
    assert "_POLLUX_COMPLETE" in result.stdout
    assert part in result.stdout


def test_completion_of_jobs_is_silent_without_a_server() -> None:
    env = {"_POLLUX_COMPLETE": "complete_bash", "COMP_WORDS": "pollux describe ", "COMP_CWORD": "2"}
    result = runner.invoke(app, [], prog_name="pollux", env=env)
    assert (result.exit_code, result.output.strip()) == (0, "")


def test_a_detached_server_is_started_with_the_same_settings(nowhere: Path) -> None:
    from pollux.policy import PolicySettings
    from pollux.server.config import ServiceConfig

    settings = PolicySettings(weights="learnt", p=-2.0, avoid_interference=False)
    config = ServiceConfig(data_directory=nowhere, port=0, slots=3, policy="fifo", interval_s=5.0, settings=settings)
    words = arguments_of(config)
    given = dict(zip(words[1::2], words[2::2], strict=True))
    assert words[0] == "up"
    assert given == {
        "--data": str(nowhere),
        "--engine": "local",
        "--weights": "learnt",
        "--p": "-2.0",
        "--avoid-interference": "off",
        "--name": "pollux",
        "--port": "0",
        "--slots": "3",
        "--policy": "fifo",
        "--interval": "5.0",
        "--hang-timeout": "1800.0s",
        "--max-workdir": "512",
        "--log-limit": "1073741824",
    }
