"""Users and teams against a real server: who may do what with which token, and what the commands print."""

from __future__ import annotations

import json
import os
import pwd
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pollux.cli.app import app
from pollux.client import Client, address
from pollux.errors import AccessDeniedError
from pollux.server.service import Service
from pollux.types import Node
from tests.long import long
from tests.unit.live_server import ELASTIC, eventually, live_server

runner = CliRunner()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with live_server(tmp_path_factory.mktemp("users") / "data") as service:
        yield service


@pytest.fixture(autouse=True)
def data(service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("POLLUX_URL", "POLLUX_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("POLLUX_DATA", str(service.config.data_directory))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    return service.config.data_directory


def pollux(*arguments: str, code: int = 0) -> str:
    result = runner.invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.stderr


def read(*arguments: str) -> Any:
    return json.loads(pollux(*arguments, "--json"))


def add_user(service: Service, name: str, *options: str) -> Client:
    """A client with the user's own token."""
    if not read("team", "ls")["teams"]:
        pollux("team", "add", "vision", "--weight", "2")
    (token,) = pollux("user", "add", name, "--team", "vision", *options).splitlines()
    return Client(url=service.url, token=token)


def test_single_user_needs_none_of_this(service: Service) -> None:
    assert pollux("whoami").startswith("operator, admin")
    assert pollux("user", "ls") == ""
    with Client() as operator:
        job = operator.submit(["sleep", "600"], name="plain")
        assert (job.last_seen.owner, job.last_seen.team) == ("operator", "")
        job.cancel()


def test_members_change_their_own_jobs_and_no_others(service: Service) -> None:
    with add_user(service, "ada") as ada, add_user(service, "bob") as bob, Client() as operator:
        assert (ada.me().user, ada.me().team, ada.me().role) == ("ada", "vision", "member")
        job = ada.submit(["sleep", "600"], name="hers")
        assert (job.last_seen.owner, job.last_seen.team) == ("ada", "vision")
        assert bob.job("hers").last_seen.owner == "ada"  # all may look
        with pytest.raises(AccessDeniedError, match="job 'hers' is ada's"):
            bob.job("hers").cancel()
        for forbidden in (
            lambda: bob.drain("local"),
            bob.shutdown,
            lambda: bob.revoke(user="ada"),
            lambda: bob.tokens("ada"),
            lambda: bob.make_token("ada"),
            lambda: bob.make_token(None),
            lambda: bob.remove_team("vision"),
            lambda: bob.submit(["true"], owner="ada"),
        ):
            with pytest.raises(AccessDeniedError):
                forbidden()
        assert [user.name for user in bob.users()] == ["bob"]
        assert job.state != "cancelled"
        job.cancel("no longer needed")
        theirs = operator.submit(["true"], name="for-bob", owner="bob")
        assert theirs.last_seen.owner == "bob"
        theirs.cancel()


def test_viewers_and_links_may_only_look(service: Service) -> None:
    address = pollux("dashboard", "--read-only", "--expires", "1h").strip()
    link = Client(url=service.url, token=address.partition("#token=")[2])
    with add_user(service, "eve", "--role", "viewer") as eve, link:
        for client in (eve, link):
            assert client.status().num_slots == 4 and client.me().role == "viewer"
            for forbidden in (lambda c=client: c.submit(["true"]), lambda c=client: c.make_token("ada")):
                with pytest.raises(AccessDeniedError, match="viewer"):
                    forbidden()


def test_a_revoked_token_ends_requests_and_open_streams(service: Service) -> None:
    with add_user(service, "mallory") as mallory:
        stream = mallory.events(every_s=0.5)
        assert next(stream).is_full
        assert read("user", "revoke", "mallory")["tokens"][0]["user"] == "mallory"
        with pytest.raises(AccessDeniedError, match="revoked"):
            mallory.status()
        with pytest.raises(AccessDeniedError, match="revoked"):
            for _ in stream:
                pass


def test_listing_and_changing(service: Service) -> None:
    add_user(service, "grace", "--limit", "2").close()
    assert "grace" in pollux("user", "ls") and "vision" in pollux("team", "ls")
    assert read("user", "set", "grace", "--weight", "3", "--limit", "none")["limit"] == {}
    made = read("user", "token", "grace", "--label", "laptop", "--expires", "never")
    assert made["summary"]["expires_at"] is None
    assert "laptop" in pollux("user", "tokens", "grace")
    assert read("team", "set", "vision", "--guarantee", "3")["guarantee"] == {"any": 3}
    assert "guarantees of 9 slots" in pollux("team", "set", "vision", "--guarantee", "9", code=2)
    assert read("team", "ls")["teams"][0]["guarantee"] == {"any": 3}
    pollux("team", "set", "vision", "--guarantee", "none")
    assert "team 'nlp'" in pollux("team", "rm", "nlp", code=2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("user", "add", "x", "--team", "no-such-team"), "team 'no-such-team'"),
        (("user", "add", "x", "--role", "king"), "role 'king'"),
        (("user", "add", "x", "--limit", "many"), "slots 'many'"),
        (("user", "add", "x", "--expires", "soon"), "duration 'soon'"),
        (
            (
                "user",
                "revoke",
            ),
            "say whose",
        ),
        (("user", "revoke", "--token", "12345"), "12345"),
        (("user", "set", "no-such-user"), "no-such-user"),
        (("team", "add", "operator"), "operator"),
        (("team", "add", "t", "--weight", "-1"), "weight"),
    ],
)
def test_bad_input_is_one_line(service: Service, arguments: tuple[str, ...], said: str) -> None:
    assert said in pollux(*arguments, code=2)


def test_a_token_goes_to_a_file_that_only_its_owner_reads(service: Service, tmp_path: Path) -> None:
    add_user(service, "fay").close()
    path = tmp_path / "fay.token"
    assert pollux("user", "token", "fay", "--token-file", str(path)) == ""
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with Client(url=service.url, token=path.read_text().strip()) as fay:
        assert fay.me().user == "fay"
    before = len(read("user", "tokens", "fay")["tokens"])
    assert "is there already" in pollux("user", "token", "fay", "--token-file", str(path), code=2)
    assert "leave out --token-file" in pollux("user", "token", "fay", "--token-file", "new", "--json", code=2)
    assert len(read("user", "tokens", "fay")["tokens"]) == before
    assert "cannot be written" in pollux("user", "add", "gus", "--token-file", "nowhere/token", code=2)
    assert "gus" not in pollux("user", "ls")
    assert "unknown user" in pollux("user", "token", "gone", "--token-file", "gone.token", code=2)
    assert not Path("gone.token").exists()


@pytest.mark.parametrize(("uid", "is_warned"), [(0, True), (1000, False)])
def test_a_server_that_is_root_warns_of_users_without_a_unix_user(
    service: Service, monkeypatch: pytest.MonkeyPatch, uid: int, is_warned: bool
) -> None:
    add_user(service, f"hal{uid}").close()  # makes the team
    monkeypatch.setattr(address, "_owner_of", lambda directory, url: uid)
    monkeypatch.setattr(address.Address, "check_listener", lambda self: None)
    for role in ("member", "viewer"):
        result = runner.invoke(app, ["user", "add", f"{role}{uid}", "--team", "vision", "--role", role])
        assert result.exit_code == 0, result.output
        assert ("jobs run as root" in result.stderr) == (is_warned and role == "member")


def can_run_as_nobody() -> bool:
    if os.geteuid() != 0:
        return False
    return subprocess.run(["/bin/sh", "-c", f"'{sys.executable}' -c 1"], user="nobody", group="nogroup").returncode == 0


@pytest.mark.skipif(not can_run_as_nobody(), reason="needs root, and an interpreter that the user nobody can read")
@pytest.mark.parametrize("kind", ["fixed", "elastic"])
def test_jobs_run_as_their_owners_unix_user(service: Service, tmp_path: Path, kind: str) -> None:
    entry = pwd.getpwnam("nobody")
    name = f"unix-{kind}"
    script = tmp_path / "job.py"
    say = "import os; print('uid', os.getuid(), os.getgroups(), os.environ.get('HOME'), flush=True)\n"
    read_token = (
        f"try: open({str(service.config.data_directory / 'token')!r})\nexcept OSError as e: print(e.strerror)\n"
    )
    script.write_text(say + read_token + (ELASTIC if kind == "elastic" else ""))
    script.chmod(0o644)
    for folder in {*script.parents, *service.config.data_directory.parents} - {Path("/")}:
        folder.chmod(folder.stat().st_mode | stat.S_IXOTH)  # pytest's folders are their owner's alone
    bounds = {"max_replicas": 1} if kind == "elastic" else {}
    with add_user(service, name, "--unix-user", "nobody") as user:
        job = user.submit([sys.executable, str(script), "1"], name=name, cwd="/tmp", **bounds)
        eventually(lambda: job.view().is_over, "the job ends")
        lines = list(job.logs())
        assert job.state == "succeeded", lines
    assert f"uid {entry.pw_uid} [{entry.pw_gid}] {entry.pw_dir}" in lines
    assert "Permission denied" in lines
    checkpoints = service.config.data_directory / "jobs" / name / "checkpoints"
    assert checkpoints.stat().st_uid == entry.pw_uid
    logs = service.config.data_directory / "jobs" / name / "logs"
    assert logs.stat().st_uid == 0


@long
def test_a_lent_guarantee_comes_back_by_shrinking(service: Service, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ELASTIC)
    for team in ("borrower", "owner"):
        pollux("team", "add", team)
    tokens = {team: pollux("user", "add", f"{team}-1", "--team", team).strip() for team in ("borrower", "owner")}
    with (
        Client(url=service.url, token=tokens["borrower"]) as borrower,
        Client(url=service.url, token=tokens["owner"]) as owner,
    ):
        long = borrower.submit([sys.executable, "train.py", "1000"], name="long")
        eventually(lambda: long.view().num_replicas >= 3 and long.view().state == "running", "it has what is idle")
        pollux("team", "set", "owner", "--guarantee", "3")
        mine = owner.submit(["sleep", "600"], name="mine", replicas=3, checkpoints=True)
        eventually(lambda: mine.view().state == "running", "the guarantee is back")
        eventually(lambda: long.view().state == "running", "the other one has shrunk")
        seen = long.describe()
        assert seen.num_replicas == 1
        assert all(change.target != "stopping" for change in seen.transitions), "shrunk, not stopped"
        (team,) = [one for one in read("team", "ls")["teams"] if one["name"] == "owner"]
        assert (team["num_held"], team["lent_to"]) == (3, {})
        assert "team owner has 3 of its 3 guaranteed" in pollux("describe", "mine")
        mine.cancel()
        again = borrower.submit(["sleep", "600"], name="again", replicas=3, checkpoints=True)
        eventually(lambda: again.view().state == "running", "it is lent again")
        assert read("team", "ls")["teams"][-1]["lent_to"] == {"borrower": 3}
        for job in (long, again):
            job.cancel()
    pollux("team", "set", "owner", "--guarantee", "none")


def test_a_cluster_too_small_for_its_guarantees_says_so(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    pollux("team", "add", "large", "--guarantee", "3")
    assert "warning" not in pollux("status")
    monkeypatch.setattr(service.cluster.accounts, "nodes", lambda: [Node(name="a", num_slots=2)])  # restored elsewhere
    told = "not all guarantees can be kept: guarantees of 3 slots in all (large 3); the cluster has 2"
    assert told in " ".join(pollux("status").split())
    assert told in runner.invoke(app, ["team", "ls"]).stderr
    pollux("team", "rm", "large")


def test_a_limit_holds_and_is_told(service: Service) -> None:
    pollux("team", "add", "small", "--limit", "1")
    token = pollux("user", "add", "small-1", "--team", "small").strip()
    with Client(url=service.url, token=token) as client:
        jobs = [client.submit(["sleep", "600"], name=f"limited-{i}") for i in range(2)]
        eventually(lambda: jobs[0].view().state == "running", "the first runs")
        eventually(lambda: "limited to 1 slot" in jobs[1].view().reason, "the second says why it waits")
        pollux("team", "set", "small", "--limit", "2")
        eventually(lambda: jobs[1].view().state == "running", "the limit was raised")
        for job in jobs:
            job.cancel()


@long
def test_usage_is_told_by_user_and_as_csv(service: Service) -> None:
    pollux("team", "add", "metered")
    token = pollux("user", "add", "meg", "--team", "metered").strip()
    with Client(url=service.url, token=token) as client:
        job = client.submit(["sleep", "1"], name="counted")
        assert job.wait(60) == "succeeded"

        def used() -> list[dict[str, Any]]:
            return [row for row in read("usage", "--by", "job", "--by", "team")["rows"] if row["job"] == "counted"]

        eventually(lambda: sum(row["slot_hours"] for row in used()) * 3600 >= 0.9, "it is counted")
        assert used()[0]["team"] == "metered" and used()[0]["slot_hours"] * 3600 <= 60
        assert {row.team for row in client.usage(["user"])} == {"metered"}  # members see their own team
    lines = pollux("usage", "--csv").splitlines()
    assert lines[0] == "team,user,slot_hours,gpu_hours,goodput_hours,cost"
    assert any(line.startswith("metered,meg,0.0") for line in lines)
    assert "meg" in pollux("usage")
    for arguments in (("--by", "planet"), ("--since", "yesterday")):
        assert arguments[1] in pollux("usage", *arguments, code=2)
    with Client() as operator, operator.open("GET", "/metrics") as answer:
        assert 'pollux_usage_slot_seconds_total{team="metered",user="meg"}' in "".join(answer.parts)
