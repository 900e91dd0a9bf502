"""Folders of jobs where some of them run as Unix users: what other users of the machine can read of them."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pollux.api.access import TeamChange, UserChange
from pollux.api.request import JobRequest
from pollux.engines.processes.starters import ColdStarter
from pollux.errors import StoreError
from pollux.server.live.unix_users import give_folders
from pollux.server.storage.files import SETTINGS_FILE, DecisionSettings, write_decision_settings
from tests.intruder import NOBODY, needs_another_user, run_as_nobody
from tests.unit.server.live.world import World

pytestmark = needs_another_user
UNIX_USER = "daemon"  # every machine has it
# Prints what of the paths given another user can read.
LOOK = """
import os, sys
for path in sys.argv[1:]:
    try:
        print(os.listdir(path) if os.path.isdir(path) else open(path).read())
    except OSError as error:
        pass
"""


@pytest.fixture
def world() -> Iterator[World]:
    """In a folder that other users can pass through."""
    outer = Path(tempfile.mkdtemp(prefix="pollux-passable-"))
    outer.chmod(0o755)
    (outer / "data").mkdir(mode=0o700)
    made = World(outer / "data")
    made.cluster.start()
    made.cluster.accounts.set_team("vision", TeamChange(), is_new=True)
    made.cluster.accounts.set_user("ada", UserChange(team="vision", unix_user=UNIX_USER), is_new=True)
    made.cluster.accounts.set_user("bob", UserChange(team="vision"), is_new=True)
    yield made
    made.cluster.stop(keeps_jobs=True)
    made.store.close()
    shutil.rmtree(outer)


def test_another_user_reads_no_logs_and_no_checkpoints(world: World) -> None:
    data = world.path
    for owner in ("bob", "ada"):
        request = JobRequest(command=("true",), kind="fixed", name=f"of-{owner}", owner=owner)
        world.cluster.submit(request)
        world.cluster._jobs.launch_of(f"of-{owner}")
    assert data.stat().st_mode & 0o777 == 0o711  # the jobs of ada have to come to their checkpoints
    paths = []
    for name in ("of-ada", "of-bob"):
        logs, checkpoints = data / "jobs" / name / "logs" / "1", data / "jobs" / name / "checkpoints"
        ColdStarter(prefix=()).make_folder(str(logs))
        checkpoints.mkdir(exist_ok=True)
        for path in (logs / "0.out", checkpoints / "state"):
            path.write_text("a secret")
            path.chmod(0o644)  # as replicas make them
            paths.append(path)
    write_decision_settings(data / SETTINGS_FILE, DecisionSettings(policy="a secret"))
    assert json.loads((data / SETTINGS_FILE).read_text())["policy"] == "a secret"
    paths += [data / SETTINGS_FILE, data / "pollux.db", data / "jobs" / "of-ada", data / "jobs"]
    assert run_as_nobody(LOOK, *map(str, paths)) == ""


@pytest.mark.parametrize("where", ["pollux-1", "pollux-1/job", "pollux-1/job/checkpoints"])
@pytest.mark.parametrize("is_link", [True, False])
def test_what_another_user_has_put_into_the_storage_gives_nothing_away(
    tmp_path: Path, where: str, is_link: bool
) -> None:
    """Who can write in the folder of ``--storage`` can also replace what is in it."""
    data, storage, elsewhere = (tmp_path / name for name in ("data", "storage", "elsewhere"))
    for folder in (data, storage, elsewhere):
        folder.mkdir()
    planted = storage / where
    planted.parent.mkdir(parents=True, exist_ok=True)
    if is_link:
        planted.symlink_to(elsewhere)
    else:
        planted.mkdir()
        os.chown(planted, NOBODY, NOBODY)
    checkpoints = storage / "pollux-1" / "job" / "checkpoints"
    if planted == checkpoints and not is_link:  # of its user before
        give_folders(UNIX_USER, data, data / "jobs" / "job", str(checkpoints))
        assert checkpoints.owner() == UNIX_USER
    else:
        with pytest.raises(StoreError, match=f"'{planted.name}'|is user {NOBODY}'s, who could"):
            give_folders(UNIX_USER, data, data / "jobs" / "job", str(checkpoints))
    assert elsewhere.stat().st_uid == 0 and list(elsewhere.iterdir()) == []


def test_folders_in_the_storage_are_made_and_given(tmp_path: Path) -> None:
    data, storage = tmp_path / "data", tmp_path / "new" / "storage"
    data.mkdir()
    checkpoints = storage / "pollux-1" / "job" / "checkpoints"
    for _ in range(2):  # at each start
        give_folders(UNIX_USER, data, data / "jobs" / "job", str(checkpoints))
        assert checkpoints.owner() == UNIX_USER and checkpoints.stat().st_mode & 0o777 == 0o700
        assert checkpoints.parent.owner() == "root" and checkpoints.parent.stat().st_mode & 0o777 == 0o755
