"""requirements.lock: every package that a server needs, in the pinned release, with hashes and no address."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = (ROOT / "requirements.lock").read_text()


def releases(text: str) -> dict[str, str]:
    found = re.findall(r"^([A-Za-z0-9_.-]+)==([^\s;]+)", text, re.M)
    return {name.lower().replace("_", "-"): release for name, release in found}


def test_the_lock_has_the_releases_that_are_tested() -> None:
    pinned, locked = releases((ROOT / "constraints.txt").read_text()), releases(LOCK)
    assert locked and locked == {name: pinned.get(name) for name in locked}, "run scripts/lock.py"


def test_the_lock_has_all_that_a_server_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = {re.split(r"[>=<\[ ]", one)[0] for one in [*project["dependencies"], *extras["cli"], *extras["server"]]}
    assert needed - {"pollux-scheduler"} <= releases(LOCK).keys(), "run scripts/lock.py"


def test_every_package_of_the_lock_has_a_hash_and_no_address() -> None:
    entries = re.split(r"\n(?=\S)", LOCK.strip())
    for entry in (one for one in entries if not one.startswith("#")):
        assert re.fullmatch(r"\S+==\S+( \\\n    --hash=sha256:[0-9a-f]{64})+", entry), entry
    assert "://" not in LOCK and "--index" not in LOCK
