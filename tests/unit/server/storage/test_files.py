"""Files that are written whole or not at all, and for whom."""

from __future__ import annotations

import os

import pytest

from pollux.errors import StoreError
from pollux.server.storage.files import make_directory, write_whole
from tests.intruder import NOBODY, needs_another_user


def test_a_file_is_its_owners_unless_it_is_said_otherwise(tmp_path):
    secret, shared = tmp_path / "secret", tmp_path / "shared"
    (tmp_path / "secret.new").write_text("left by a crash, for everybody to read")
    (tmp_path / "secret.new").chmod(0o666)
    write_whole(secret, "é")
    write_whole(shared, "x", mode=0o644)
    assert secret.read_text(encoding="utf-8") == "é"
    assert (secret.stat().st_mode & 0o777, shared.stat().st_mode & 0o777) == (0o600, 0o644)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret", "shared"]


def test_what_cannot_be_written_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_whole(path, "before")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)  # the disk says so only now
    with pytest.raises(OSError, match="No space"):
        write_whole(path, "after")
    assert path.read_text() == "before"


@needs_another_user
def test_a_directory_of_another_user_is_refused(tmp_path):
    """Its owner could read and replace tokens in it, whatever its mode."""
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    make_directory(mine)
    theirs.mkdir(mode=0o777)
    os.chown(theirs, NOBODY, NOBODY)
    with pytest.raises(StoreError, match="is user 65534's, who could read and replace what is in it"):
        make_directory(theirs)
