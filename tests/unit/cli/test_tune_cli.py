"""``pollux tune`` without a server: what is wrong with a study is said before anything is sent."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from pollux.api.goal import Metric, parse_limit
from pollux.api.study import StudySummary, TrialView
from pollux.cli import tune
from pollux.cli.app import app
from pollux.client.study import make_study, read_study
from pollux.errors import InputFileError

SCRIPT = "from pollux import train\n"


@pytest.fixture
def script(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    return "train.py"


def run(*words):
    return CliRunner().invoke(app, ["tune", *words])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--space", "lr=1..1", "--metric", "loss"), "the range 1..1 is empty"),
        (("--space", "lr=0..1"), "no metric"),
        (("--metric", "loss"), "0 parameters"),
        (("--space", "lr=0..1", "--metric", "loss", "--pruner", "none", "--weight", "x"), "a number is needed"),
        (("--space", "lr=0..1", "--metric", "loss", "--file", "study.toml"), "say all in one"),
        (("--space", "lr=0..1", "--metric", "loss:up"), "NAME, NAME:min or NAME:max is needed"),
        (("--space", "lr=0..1", "--metric", "loss", "--metric", "loss"), "named twice"),
        (("--space", "lr=0..1", "--metric", "a", "--metric", "b", "--maximize"), "2 metrics beside one direction"),
        (("--space", "lr=0..1", "--metric", "a:min", "--maximize"), "a:min beside one direction"),
        (("--space", "lr=0..1", "--metric", "a", "--metric", "b", "--pruner", "asha"), "compares trials by one metric"),
        (("--space", "lr=0..1", "--metric", "a", "--limit", "time<20"), "NAME<=NUMBER or NAME>=NUMBER is needed"),
        (("--space", "lr=0..1", "--metric", "a", "--limit", "t<=1", "--limit", "t>=2"), "no value keeps both"),
        (("--space", "lr=0.0..1.0", "--metric", "loss", "--first", "lr"), "NAME=VALUE,NAME=VALUE"),
        (("--space", "lr=0.0..1.0", "--metric", "loss", "--first", "rate=1"), "the space has lr"),
        (("--space", "lr=0.0..1.0", "--metric", "loss", "--first", "lr=2"), "a number within lr=0.0..1.0"),
        (("--space", "size=choice:8,16", "--metric", "loss", "--first", "size=9"), "one of 8, 16"),
        (("--space", "size=16..128 step 16", "--metric", "loss", "--first", "size=17"), "none of the steps"),
        (("--space", "depth=1..4", "--metric", "loss", "--first", "depth=1.5"), "a whole number"),
        (("--space", "lr=0.0..1.0", "--metric", "loss", "--trials", "1", "--first", "lr=0", "--first", "lr=1"), "2 t"),
    ],
)
def test_a_study_that_cannot_be_is_refused_here(script, words, said):
    answer = run(script, *words)
    assert answer.exit_code == 2 and said in answer.output


def test_the_script_may_stand_before_or_behind_the_options(script):
    """Both get as far as looking for a server."""
    words = ("--space", "lr=0.1..1", "--metric", "loss", "--server", "http://127.0.0.1:9")
    for order in ((script, *words), (*words, script), (*words, "--", "python", script, "--epochs", "3")):
        answer = run(*order)
        assert (answer.exit_code == 2 and "POLLUX_TOKEN" in answer.output) or "no" in answer.output.lower()
        assert "No such option" not in answer.output


def test_commands_below_are_no_scripts():
    assert "STUDY" in run("show", "--help").output


def test_a_script_is_run_by_python_and_the_study_has_the_weight(script):
    asked = make_study([script], {"lr": "log:1e-4..0.1"}, {"metric": "loss", "weight": 3.0, "max_replicas": 2})
    assert asked.job.command == ("python", "train.py") and asked.job.max_replicas == 2
    assert asked.weight == 3.0 and asked.job.weight == 1.0 and asked.job.kind == "elastic"


def test_metrics_and_limits_are_the_same_in_a_file_and_in_python(script, tmp_path):
    path = tmp_path / "study.toml"
    path.write_text(
        'command = "python train.py"\nmetric = ["loss", "accuracy:max"]\nlimits = "latency<=20"\n'
        '[space]\nlr = "0.0..1"\n'
    )
    options = {"metric": ["loss:min", "accuracy:max"], "limits": ["latency <= 20"]}
    asked = make_study([script], {"lr": "0.0..1"}, options)
    assert read_study(path) == asked
    assert [(one.name, one.direction) for one in asked.further] == [("accuracy", "maximize")]
    assert (asked.metric, asked.direction, asked.pruner, str(asked.limits[0])) == (
        *("loss", "minimize", "none", "latency<=20"),
    )


def test_a_file_says_with_what_to_begin(script, tmp_path):
    path = tmp_path / "study.toml"
    path.write_text(
        'command = "python train.py"\nmetric = "loss"\n[space]\nlr = "log:1e-4..0.1"\n[[first]]\nlr = 0.01\n'
    )
    assert read_study(path).first == ({"lr": 0.01},)


def test_a_file_says_the_same(script, tmp_path):
    path = tmp_path / "study.toml"
    path.write_text(
        'command = "python train.py"\nmetric = "loss"\ntrials = 4\n[space]\nlr = "log:1e-4..0.1"\nwidth = [8, 16]\n'
        "[job]\nmax_replicas = 2\n"
    )
    asked = read_study(path)
    assert (asked.trials, asked.job.max_replicas, asked.space[1].choices) == (4, 2, (8, 16))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("command = 3\n", "are needed"),
        ('command = "python train.py"\nmetrics = "loss"\n[space]\nlr = "0..1"\n', "unknown metrics"),
        ('command = "python train.py"\nmetric = "loss"\n[space]\nlr = "1..0"\n', "is empty"),
        ("command = [", "no TOML"),
        ('command = "python train.py"\nmetric = 3\n[space]\nlr = "0..1"\n', "a text or a list of texts"),
        ('command = "python train.py"\nmetric = "a"\nlimits = 3\n[space]\nlr = "0..1"\n', "a text or a list of texts"),
    ],
)
def test_a_file_that_cannot_be(script, tmp_path, text, said):
    path = tmp_path / "study.toml"
    path.write_text(text)
    with pytest.raises(InputFileError, match=said):
        read_study(path)


def test_what_users_write_shows_no_escapes(capsys):
    escapes = "\x1b]0;owned\x07\x1b[2J"
    found = StudySummary(
        name="s", state="failed", reason=escapes, metric=escapes, direction="minimize", created_at=0, ended_at=1,
        num_trials=1, counts={}, best_value=0.5, best_trial=0, best_params={"kind": escapes}, slot_s=0, warnings=(),
    )  # fmt: skip
    tune._say_state(found, False)
    shown = capsys.readouterr().out + tune._short(found)
    assert "owned" in shown and "\x1b" not in shown and "\x07" not in shown


def test_names_that_look_like_markup_are_shown_as_they_are(capsys):
    names = ("x[/y]", "[link=file:///etc/passwd]click[/link]")
    found = StudySummary(
        name="s", state="finished", reason="", metric="loss[/b]", direction="minimize", created_at=0, ended_at=1,
        num_trials=1, counts={}, best_value=0.5, best_trial=0, best_params={"[/z]": 1}, slot_s=0, warnings=(),
        limits=tuple(parse_limit(f"{name}<=1") for name in names), further=(Metric(name="f[/z]"),), front=(0,),
    )  # fmt: skip
    tune._report(found, False)
    shown = capsys.readouterr().out
    assert all(name in shown for name in (*names, "loss[/b]", "[/z]=1", "f[/z]"))


def test_waiting_for_a_study_ends_with_its_warnings(capsys):
    found = StudySummary(
        name="s", state="finished", reason="all trials are done", metric="loss", direction="minimize", created_at=0,
        ended_at=1, num_trials=3, counts={"complete": 3}, best_value=0.5, best_trial=0, best_params={}, slot_s=0,
        warnings=("all trials give the same values",),
    )  # fmt: skip
    tune._report(found, False)
    assert "warning: all trials give the same values" in capsys.readouterr().err


def test_a_front_and_limits_are_shown(capsys):
    found = StudySummary(
        name="s", state="finished", reason="", metric="loss", direction="minimize", created_at=0, ended_at=1,
        num_trials=8, counts={"complete": 8}, best_value=None, best_trial=None, best_params={}, slot_s=0, warnings=(),
        further=(Metric(name="size"),), limits=(parse_limit("latency<=20"),), front=(3, 7),
    )  # fmt: skip
    shown = tune._short(found)
    assert "limits: latency<=20; * breaks one" in shown
    assert "front: 3, 7; no trial beats these in loss and size together" in shown
    one = TrialView(
        number=4, job="s-4", state="complete", params={"lr": 0.1}, value=0.5, progress=1.0, rung=0, num_replicas=0,
        chance=None, slot_s=1.0, reason="", values={"size": 3.0, "latency": "nan"}, keeps_limits=False,
    )  # fmt: skip
    row = tune._row(one, found.watched)
    assert row[:6] == ("4*", "complete", "0.5", "3", "nan", "100%")
