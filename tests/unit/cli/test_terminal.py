"""What a job writes must not command the terminal of the person who looks at it."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from pollux.cli import api, up
from pollux.cli.app import app
from pollux.cli.jobs import print_lines
from pollux.cli.terminal import visible
from pollux.client.client import Answer
from pollux.server.config import ServiceConfig


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("loss 0.5\tstep 3", "loss 0.5\tstep 3"),
        ("10 %\r20 %", "10 %\r20 %"),
        ("\x1b[1;31mred\x1b[0m", "\x1b[1;31mred\x1b[0m"),
        ("\x1b]0;root@host\x07", "^[]0;root@host^G"),  # the window's title
        ("\x1b[2J\x1b[H$ ", "^[[2J^[[H$ "),  # an empty screen with a false prompt
        ("\x1b[6n\x1bP$q\x1b\\", "^[[6n^[P$q^[\\"),  # questions that the terminal answers into the shell
        ("\x9b2J", "<U+009B>2J"),
        ("\u202etxt.exe", "<U+202E>txt.exe"),
        ("Größe 日本", "Größe 日本"),
    ],
)
def test_escapes_are_shown_instead_of_obeyed(line, shown):
    assert visible(line) == shown


def test_a_terminal_gets_them_visible_and_a_file_as_they_are():
    terminal, file = Terminal(), io.StringIO()
    for to in (terminal, file):
        print_lines(["\x1b[2Jx"], to)
    assert (terminal.getvalue(), file.getvalue()) == ("^[[2Jx\n", "\x1b[2Jx\n")


def test_an_answer_of_text_is_shown_to_a_terminal_without_escapes(monkeypatch):
    """``pollux api jobs/NAME/logs`` has what a job wrote, too."""
    answer = Answer(media_type="text/plain", parts=iter(["loss\x1b[2J\n0.5\n", "$ "]))
    client = SimpleNamespace(open=lambda *_: contextlib.nullcontext(answer))
    monkeypatch.setattr(api, "connect", lambda *_: contextlib.nullcontext(client))
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    api.api("jobs/one/logs", None, None)
    assert terminal.getvalue() == "loss^[[2J\n0.5\n$ "


def test_an_error_is_shown_without_escapes(tmp_path):
    found = CliRunner().invoke(app, ["ls", "--data", f"{tmp_path}/\x1b[2J"])
    assert found.exit_code == 2 and "^[[2J" in found.stderr and "\x1b" not in found.stderr


def test_the_address_of_a_ray_cluster_cannot_write_over_what_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("psutil")
    monkeypatch.setenv("RAY_ADDRESS", "host\x1b[2K:1")
    up._say_how_to_join(ServiceConfig(data_directory=tmp_path, engine="ray"))
    assert capsys.readouterr().err == "Other machines join by: ray start --address=host^[[2K:1\n"
