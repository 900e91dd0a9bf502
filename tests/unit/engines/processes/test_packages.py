"""Packages of jobs: a failure names no password."""

from __future__ import annotations

from pathlib import Path

import pytest

from pollux.api.masking import without_passwords
from pollux.engines.processes.packages import environment_for
from pollux.engines.processes.workdirs import JobCode
from pollux.errors import EngineError
from tests.long import first_of

TOKEN = "s3cret-t0ken"


@pytest.mark.parametrize(
    "line",
    first_of(
        [
            f"--index-url=https://ada:{TOKEN}@127.0.0.1:9/simple",
            f"package @ git+https://{TOKEN}@127.0.0.1:9/ada/package",
            f"--not-an-option=https://ada:{TOKEN}@127.0.0.1:9/simple",  # which pip repeats
            f"{'x' * 178} @ https://ada:{TOKEN}@127.0.0.1:9/x.whl",  # the message is cut in it
        ]
    ),
)
def test_a_failure_names_no_password(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(EngineError, match=r"cannot be installed on this node \(exit code") as error:
        environment_for(JobCode(store="", pip=(line, "./missing")), str(tmp_path))
    assert TOKEN[:3] not in str(error.value)
    kept = list((tmp_path / "cache").rglob("*.failed"))
    assert kept and all(TOKEN[:3] not in path.read_text() for path in kept)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("-i https://ada:pw@host/simple -f http://tok@b", "-i https://host/simple -f http://b"),
        ("https://ada:p@ss@host/x", "https://host/x"),
        ("git+https://host/ada/package@v1.2", "git+https://host/ada/package@v1.2"),
        ("package @ file:///wheels/a.whl, b", "package @ file:///wheels/a.whl, b"),
    ],
)
def test_what_is_taken_out(text: str, shown: str) -> None:
    assert without_passwords(text) == shown
