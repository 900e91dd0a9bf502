from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pollux.engines.ray.storage_probe import storage_problem, write_probe


def test_a_node_that_shares_the_storage_can_use_it(tmp_path: Path) -> None:
    probe = write_probe(str(tmp_path / "storage"), "c")
    assert probe is not None and storage_problem(probe) == ""
    assert os.listdir(tmp_path / "storage") == [".pollux-c"]  # nothing is left


def test_a_link_in_the_place_of_the_file_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("keep me")
    (tmp_path / ".pollux-c").symlink_to("precious")
    with pytest.raises(OSError, match="symbolic link"):
        write_probe(str(tmp_path), "c")
    assert (tmp_path / "precious").read_text() == "keep me"


def test_a_node_without_the_storage_says_so(tmp_path: Path) -> None:
    problem = storage_problem(str(tmp_path / "storage" / ".pollux-c"))
    assert problem.startswith(f"it does not see the storage at {tmp_path / 'storage'}")


@pytest.mark.skipif(not os.path.exists("/proc/version"), reason="needs /proc")
def test_a_folder_that_cannot_be_written_to_is_no_storage() -> None:
    assert storage_problem("/proc/version").startswith("it cannot write to the storage at /proc: ")


@pytest.mark.skipif(sys.platform != "linux", reason="needs mount namespaces")
def test_a_read_only_mount_is_no_storage(tmp_path: Path) -> None:
    probe = write_probe(str(tmp_path / "storage"), "c")
    folder = tmp_path / "storage"
    mounts = f"mount --bind {folder} {folder} && mount -o remount,bind,ro {folder}"
    code = f"from pollux.engines.ray.storage_probe import storage_problem as p; print(p({probe!r}))"
    script = f'{mounts} || exit 9; exec {sys.executable} -c "{code}"'
    done = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, timeout=60)
    if done.returncode == 9 or "unshare" in done.stderr:
        pytest.skip(f"no mount may be made here: {done.stderr.strip()}")
    assert done.stdout.strip() == f"it cannot write to the storage at {folder}: Read-only file system"


def test_a_url_needs_its_package() -> None:
    assert write_probe("nosuch://bucket/x", "c") == "nosuch://bucket/x"
    assert "nosuch://bucket/x" in storage_problem("nosuch://bucket/x")


def test_a_url_whose_package_is_there() -> None:
    pytest.importorskip("fsspec")
    assert storage_problem("memory://x") == ""
