from __future__ import annotations

import shutil

from pollux.engines.processes.space import SpaceWatch, free_bytes


def test_a_quarter_more_is_needed_to_go_on():
    free = [100 << 20]
    watch = SpaceWatch(64 << 20, lambda path: free[0])
    assert watch.shortage("/d") == ""
    free[0] = 63 << 20
    assert watch.shortage("/d").startswith("paused: 63 MiB free at /d, 64 MiB are needed")
    free[0] = 70 << 20
    assert watch.shortage("/d")
    assert watch.shortage("/other") == ""
    free[0] = 80 << 20
    assert watch.shortage("/d") == ""
    free[0] = 70 << 20
    assert watch.shortage("/d") == ""


def test_a_path_that_is_not_there_yet_has_the_space_of_its_parent(tmp_path):
    seen = free_bytes(str(tmp_path / "a" / "b"))
    assert abs(seen - shutil.disk_usage(tmp_path).free) < 1 << 30
    assert SpaceWatch(1 << 60).shortage(str(tmp_path)).startswith("paused: ")
