"""What a job writes must not command the terminal of the person who looks at it."""

from __future__ import annotations

import io

import pytest

from pollux.cli.jobs import print_lines
from pollux.cli.terminal import visible


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
