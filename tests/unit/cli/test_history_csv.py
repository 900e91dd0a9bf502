"""``pollux history --csv`` on a terminal, and into a file."""

from __future__ import annotations

import contextlib
import io
from types import SimpleNamespace

import pytest

from pollux.cli import history


@pytest.mark.parametrize(("is_terminal", "shown"), [(True, "^[]0;mine^G left"), (False, "\x1b]0;mine\x07 left")])
def test_a_reason_cannot_command_the_terminal(monkeypatch, is_terminal, shown):
    """Another user's job says why it failed."""
    view = SimpleNamespace(**dict.fromkeys(history._COLUMNS, 1), attained_slot_s=1.0, reason="\x1b]0;mine\x07 left")
    view.finished_at = 9e12
    client = SimpleNamespace(jobs=lambda *_, **__: [SimpleNamespace(last_seen=view)])
    monkeypatch.setattr(history, "connect", lambda *_: contextlib.nullcontext(client))
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: is_terminal)
    monkeypatch.setattr("sys.stdout", out)
    history.history(since="1d", states=None, user=None, as_csv=True)
    assert out.getvalue().splitlines()[1].endswith(f",{shown}")
