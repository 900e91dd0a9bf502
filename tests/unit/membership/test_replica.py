"""Membership: rosters, and both sides of the protocol over a real store. Replicas are threads of this process."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

pytest.importorskip("torch")

from hypothesis import given
from hypothesis import strategies as st

from pollux.errors import InvalidValueError, MembershipError, PeerLostError
from pollux.membership import replica as membership_module
from pollux.membership.controller import JobController
from pollux.membership.replica import (
    StaticMembership,
    StoreMembership,
    membership_from_environment,
)
from pollux.membership.roster import Member, Roster
from pollux.membership.store import Group, serve_torchrun

NAMES = st.text(st.characters(categories=("L", "N", "P")), min_size=1, max_size=8)


@st.composite
def rosters(draw: st.DrawFn) -> Roster:
    ids = draw(st.lists(NAMES, min_size=1, max_size=6, unique=True))
    num_members = draw(st.integers(1, len(ids)))
    members = tuple(Member(replica_id=name, node=draw(NAMES)) for name in ids[:num_members])
    return Roster(generation=draw(st.integers(1, 10**6)), members=members, lost=tuple(ids[num_members:]))


@given(rosters())
def test_a_roster_survives_json(roster):
    assert Roster.from_json(roster.to_json()) == roster
    assert Roster.from_json(roster.to_json().encode()) == roster


A, B, C = (Member(replica_id=name, node=node) for name, node in (("a", "n1"), ("b", "n2"), ("c", "n1")))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "must be JSON"),
        ("[]", "version 1 was expected"),
        ('{"version": 2}', "got 2: update Pollux"),
        ('{"version": 1, "generation": 1, "lost": []}', "needs generation, members"),
        ('{"version": 1, "generation": 1, "members": [1], "lost": []}', "needs generation, members"),
        ('{"version": 1, "generation": "1", "members": [{"replica_id": "a", "node": "n"}], "lost": []}', "from 1"),
        ('{"version": 1, "generation": 1, "members": [{"replica_id": "", "node": "n"}], "lost": []}', "replica_id"),
        ('{"version": 1, "generation": 1, "members": [], "lost": []}', "no members"),
    ],
)
def test_what_is_not_a_roster_is_refused(text, problem):
    with pytest.raises(InvalidValueError, match=problem):
        Roster.from_json(text)


@pytest.mark.parametrize(
    ("members", "lost", "problem"),
    [((A, A), (), "twice"), ((A, B), ("b",), "as members and as lost"), ((A,), ("",), "replica ids")],
)
def test_rosters_that_cannot_be(members, lost, problem):
    with pytest.raises(InvalidValueError, match=problem):
        Roster(generation=1, members=members, lost=lost)


# Static: alone or under torchrun.


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def torchrun(rank: int, port: int, **more: str) -> dict[str, str]:
    ranks = {"RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2"}
    return {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **more}


def test_alone():
    alone = membership_from_environment({"MASTER_ADDR": "ignored"})
    assert isinstance(alone, StaticMembership)
    assert (alone.rank, alone.world_size, alone.local_rank, alone.is_elastic) == (0, 1, 0, False)
    group = alone.join(1.0)
    assert (group.generation, group.attempt, group.world_size, group.num_nodes) == (0, 0, 1, 1)
    again = alone.recover(1.0)
    assert again is not None and again.attempt == 1
    assert not alone.has_newer()
    with pytest.raises(MembershipError, match="none to advance to"):
        alone.advance(1.0)
    alone.close()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"MASTER_PORT": ""}, "but not MASTER_PORT"),
        ({"RANK": ""}, "but not RANK"),
        ({"WORLD_SIZE": "", "LOCAL_RANK": ""}, "but not WORLD_SIZE, LOCAL_RANK"),
        ({"RANK": "3"}, "got 3 of 3"),
        ({"RANK": "one"}, "RANK must be a whole number.*'one'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE must be a whole number, at least 1"),
    ],
)
def test_half_an_environment_is_an_error_that_names_the_other_half(change, problem):
    with pytest.raises(MembershipError, match=problem):
        StaticMembership.from_environment({**torchrun(0, 1), **change})


def test_rank_0_serves_the_store_and_all_come_to_each_attempt():
    port = free_port()
    replicas = [StaticMembership.from_environment(torchrun(rank, port)) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        groups = list(pool.map(lambda replica: replica.join(10.0), replicas))
        assert [(group.rank, group.local_rank, group.num_nodes) for group in groups] == [
            (0, 0, 2),
            (1, 1, 2),
            (2, 0, 2),
        ]
        groups[0].store.set("key", "first")
        assert groups[1].store.get("key") == b"first"
        again = list(pool.map(lambda replica: replica.recover(10.0), replicas))
        assert [group.attempt for group in again if group is not None] == [1, 1, 1]
        assert not again[2].store.check(["key"])  # type: ignore[union-attr]
    with pytest.raises(PeerLostError, match=r"ranks \[1, 2\] of 3 did not come within 0.1 s"):
        replicas[0].recover(0.1)


def test_an_agents_store_is_not_served_again():
    port = free_port()
    agent = serve_torchrun("127.0.0.1", port)
    more = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
    replicas = [StaticMembership.from_environment(torchrun(rank, port, **more)) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        groups = list(pool.map(lambda replica: replica.join(10.0), replicas))
    assert agent.check(["pollux/3/runs/2/0"])
    assert {group.generation for group in groups} == {2}


def test_a_store_that_no_process_serves():
    replica = StaticMembership.from_environment(torchrun(1, free_port()))
    with pytest.raises(MembershipError, match=r"no process serves the store at 127.0.0.1:\d+ after 0.2 s"):
        replica.join(0.2)


# Elastic: a controller, and replicas as threads.


class served:
    """A controller and its replicas, all closed at the end."""

    def __init__(self) -> None:
        self.controller = JobController("test")
        self.address = self.controller.address
        self.pool = ThreadPoolExecutor(8)
        self.replicas: dict[str, StoreMembership] = {}

    def __enter__(self) -> served:
        return self

    def __exit__(self, *_: object) -> None:
        for replica in self.replicas.values():
            replica.close()
        self.pool.shutdown(wait=True)
        self.controller.close()

    def replica(self, member: Member, planned_rank: int = 0, planned_world: int = 1) -> StoreMembership:
        ranks = {"planned_rank": planned_rank, "planned_world": planned_world}
        made = membership_from_environment(self.controller.environment(member, **ranks))
        assert isinstance(made, StoreMembership)
        self.replicas[member.replica_id] = made
        return made

    def each(self, what: Callable[[StoreMembership], Group | None], *members: Member) -> list[Future[Group | None]]:
        return [self.pool.submit(what, self.replicas[member.replica_id]) for member in members]

    def formed(self, *members: Member) -> list[Group]:
        """Fresh replicas of these members, joined in the next generation."""
        for member in members:
            self.replica(member)
        self.controller.publish(members)
        return groups(self.each(lambda replica: replica.join(10.0), *members))


@pytest.fixture
def job() -> Iterator[served]:
    with served() as job:
        yield job


def groups(futures: list[Future[Group | None]]) -> list[Group]:
    results = [future.result(timeout=15.0) for future in futures]
    assert all(result is not None for result in results)
    return [result for result in results if result is not None]


def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.005)


def advance(replica: StoreMembership) -> Group | None:
    return replica.advance(10.0)


def recover(replica: StoreMembership) -> Group | None:
    return replica.recover(10.0)


def test_the_environment_is_torchruns_and_ours(job):
    env = job.controller.environment(A, planned_rank=1, planned_world=4, local_rank=1, local_world=2, num_restarts=3)
    assert env["RANK"] == "1" and env["WORLD_SIZE"] == "4" and env["LOCAL_WORLD_SIZE"] == "2"
    assert env["POLLUX_STORE"] == job.address and len(env["POLLUX_STORE_SECRET"]) == 64
    assert "MASTER_ADDR" not in env, "a plain TCPStore has no lock"
    assert (env["POLLUX_REPLICA_ID"], env["POLLUX_GENERATION"], env["TORCHELASTIC_RESTART_COUNT"]) == ("a", "1", "3")
    planned = membership_from_environment(env)
    assert (planned.rank, planned.world_size, planned.local_rank, planned.is_elastic) == (1, 4, 1, True)


@pytest.mark.parametrize(
    ("env", "problem"),
    [
        ({"POLLUX_STORE": "1234", "POLLUX_REPLICA_ID": "a"}, "host:port"),
        ({"POLLUX_STORE": "h:1"}, "POLLUX_REPLICA_ID"),
        ({"POLLUX_STORE": "h:1", "POLLUX_REPLICA_ID": "a"}, "POLLUX_STORE_SECRET"),
    ],
)
def test_bad_addresses(env, problem):
    with pytest.raises(MembershipError, match=problem):
        membership_from_environment(env)


def test_a_step_is_made_also_when_the_owner_cannot_be_told(job):
    job.replica(A)
    joining = job.each(lambda replica: replica.join(10.0), A)
    until(lambda: job.controller.is_ready("a"))
    job.controller.publish([A])
    groups(joining)
    job.controller.close()
    job.replicas["a"].note_stepped()


def test_join_waits_for_the_first_generation_that_has_the_replica(job):
    job.replica(A), job.replica(B)
    joining = job.each(lambda replica: replica.join(10.0), A, B)
    until(lambda: job.controller.is_ready("a") and job.controller.is_ready("b"))
    assert not job.controller.is_ready("c")
    assert job.controller.generation == 0 and job.controller.roster is None
    job.controller.publish([A])
    (first,) = groups(joining[:1])
    assert (first.generation, first.attempt, first.rank, first.world_size) == (1, 0, 0, 1)
    time.sleep(0.1)
    assert not joining[1].done()
    assert not job.controller.is_formed(1)
    job.replicas["a"].note_formed(first)
    assert job.controller.is_formed(1) and not job.controller.has_stepped()
    job.replicas["a"].note_stepped()
    assert job.controller.has_stepped()
    job.controller.publish([A, B])
    advanced, joined = groups([*job.each(advance, A), joining[1]])
    assert (advanced.rank, joined.rank, joined.num_nodes, joined.generation) == (0, 1, 2, 2)
    assert (job.replicas["b"].rank, job.replicas["b"].world_size) == (1, 2)
    advanced.store.set("key", "value")
    assert joined.store.get("key") == b"value"
    assert not first.store.check(["key"])


def test_has_newer_comes_from_the_thread_and_leavers_get_none(job):
    first = job.formed(A, B, C)
    assert [(group.local_rank, group.num_nodes) for group in first] == [(0, 2), (0, 2), (1, 2)]
    assert not any(replica.has_newer() for replica in job.replicas.values())
    with pytest.raises(MembershipError, match="no generation is newer than 1"):
        job.replicas["a"].advance(1.0)
    job.controller.publish([A, C])
    until(lambda: all(replica.has_newer() for replica in job.replicas.values()), 2.0)
    stays, leaves, moves = job.each(advance, A, B, C)
    assert leaves.result(10.0) is None
    assert [(group.rank, group.local_rank, group.num_nodes) for group in groups([stays, moves])] == [
        (0, 0, 1),
        (1, 1, 1),
    ]
    assert not job.replicas["a"].has_newer()


def test_nobody_is_left_in_a_generation_that_others_skipped(job):
    """One replica has come to generation 2 when generation 3 is published; the others have not."""
    job.formed(A, B)
    job.controller.publish([B, A])
    early = job.each(advance, A)
    time.sleep(0.1)
    assert not early[0].done()
    job.controller.publish([A, B])
    assert {group.generation for group in groups([*early, *job.each(advance, B)])} == {3}


def test_recover_takes_the_same_members_when_nothing_is_published(job):
    job.formed(A, B)
    recovering = job.each(recover, A)
    time.sleep(0.1)
    assert not recovering[0].done()
    again = groups([*recovering, *job.each(recover, B)])
    assert [(group.generation, group.attempt, group.rank) for group in again] == [(1, 1, 0), (1, 1, 1)]
    for replica, group in zip(("a", "b"), again, strict=True):
        job.replicas[replica].note_formed(group)
    assert job.controller.is_formed(1)
    assert {group.attempt for group in groups(job.each(recover, A, B))} == {2}


def test_recover_takes_a_newer_generation_when_one_comes(job):
    job.formed(A, B, C)
    recovering = job.each(recover, A, C)
    time.sleep(0.1)
    job.controller.publish([A, C], lost=["b"])
    assert [(group.generation, group.attempt, group.rank) for group in groups(recovering)] == [(2, 0, 0), (2, 0, 1)]


def test_recover_sees_a_loss_that_only_an_older_roster_names(job):
    """Both are told "form" for attempt 1, but a member is gone: the next two generations are published meanwhile."""
    job.formed(A, B, C)
    job.controller.publish([A, C], lost=["b"])
    job.controller.publish([A, C])
    store = job.controller._open()
    store.set("verdict/1/1", "form")
    assert {group.generation for group in groups(job.each(recover, A, C))} == {3}


def test_recover_alone_is_an_error_that_names_the_missing(job):
    job.formed(A, B)
    with pytest.raises(PeerLostError, match=r"b on n2 did not come to generation 1, attempt 1, within 0.2 s"):
        job.replicas["a"].recover(0.2)
    # The second call is no second arrival.
    with pytest.raises(PeerLostError):
        job.replicas["a"].recover(0.1)
    assert {group.attempt for group in groups(job.each(recover, A, B))} == {1}


def test_join_without_a_generation_is_an_error(job):
    with pytest.raises(MembershipError, match=r"no generation with a was published within 0.1 s \(newest: none\)"):
        job.replica(A).join(0.1)


def test_a_newcomer_left_out_before_its_first_group_is_told_to_leave(job):
    job.formed(A)
    job.controller.publish([A, B])
    job.replica(B)
    joining = job.each(lambda replica: replica.join(10.0), B)
    until(lambda: job.controller._open().check(["here/2/0"]))
    job.controller.publish([A])
    with pytest.raises(MembershipError, match="left out again"):
        joining[0].result(10.0)
    assert groups(job.each(advance, A))[0].generation == 3


def test_on_lost_is_called_for_losses_alone_and_once(job):
    job.formed(A, B)
    calls: list[str] = []
    job.replicas["a"].on_lost(lambda generation, attempt: 1 / 0)  # type: ignore[arg-type, return-value]
    job.replicas["a"].on_lost(lambda generation, attempt: calls.append("a"))
    job.controller.publish([B, A])
    until(lambda: job.replicas["a"].has_newer())
    assert calls == []
    job.controller.publish([A], lost=["b"])
    job.controller.publish([A])
    until(lambda: bool(calls), 2.0)
    assert groups(job.each(advance, A))[0].generation == 4
    time.sleep(0.15)
    assert calls == ["a"]


def test_who_comes_to_the_next_attempt_has_left_this_one(job):
    job.formed(A, B)
    told: list[tuple[int, int]] = []
    job.replicas["b"].on_lost(lambda generation, attempt: told.append((generation, attempt)))
    leaving = job.each(recover, A)  # its connections may stay open: the store tells
    until(lambda: bool(told), 3.0)
    assert told == [(1, 1)]
    again = groups([*leaving, *job.each(recover, B)])
    assert {group.attempt for group in again} == {1}
    time.sleep(0.15)
    assert told == [(1, 1)]


def test_a_dead_store_is_logged_once_and_blocks_nobody(monkeypatch, caplog):
    monkeypatch.setattr(membership_module, "UNREACHABLE_S", 0.2)
    controller = JobController()
    controller.publish([A])
    replica = StoreMembership.from_environment(controller.environment(A, planned_rank=0, planned_world=1))
    replica.join(10.0)
    controller.close()
    with caplog.at_level(logging.ERROR):
        until(lambda: bool(caplog.records), 5.0)
        time.sleep(1.2)
    assert [record.getMessage().startswith("a: no word from 127.0.0.1:") for record in caplog.records] == [True]
    assert not replica.has_newer()
    with pytest.raises(MembershipError, match="does not answer"):
        replica.recover(1.0)
    replica.close()


def test_a_replica_that_forgets_to_close_ends_cleanly(job):
    code = (
        "import os; from pollux.membership.replica import membership_from_environment as membership;"
        "membership(os.environ).join(20.0)"
    )
    job.controller.publish([A])
    env = {**os.environ, **job.controller.environment(A, planned_rank=0, planned_world=1)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_store_says_what_the_protocol_says(job):
    job.formed(A, B)
    store = job.controller._open()
    assert store.get("generation") == b"1"
    assert json.loads(store.get("roster/1"))["members"][1] == {"replica_id": "b", "node": "n2"}
    assert store.check(["ready/a", "ready/b", "here/1/0", "here/1/0/0", "here/1/0/1"])
    assert store.get("verdict/1/0") == b"form"


# Fenced: replicas that the owner has given up.


def test_only_who_was_given_up_is_fenced(job):
    job.formed(A, B, C)
    told: list[str] = []
    job.replicas["b"].on_fenced(lambda reason: 1 / 0)  # type: ignore[arg-type, return-value]
    job.replicas["b"].on_fenced(told.append)
    assert not any(replica.is_fenced() for replica in job.replicas.values())
    job.controller.publish([A, C], lost=["b"])
    assert job.replicas["b"].is_fenced()
    until(lambda: bool(told), 2.0)
    assert not job.replicas["a"].is_fenced() and not job.replicas["c"].is_fenced()
    job.controller.publish([A])  # c is not needed any more, but it may finish what it is at
    until(job.replicas["c"].has_newer)
    assert not job.replicas["c"].is_fenced()
    job.controller.fence(["c"])
    assert job.replicas["c"].is_fenced() and not job.replicas["a"].is_fenced()
    assert job.replicas["b"].is_fenced()
    assert told == ["its owner has given it up"]


def test_being_given_up_is_noticed_without_asking(job):
    job.formed(A)
    told: list[str] = []
    job.replicas["a"].on_fenced(told.append)
    job.controller.fence(["somebody", "a"])
    until(lambda: bool(told), 2.0)


def test_static_memberships_are_never_fenced():
    alone = membership_from_environment({})
    assert not alone.is_fenced()
    alone.join(1.0)
    assert not alone.is_fenced()
    alone.close()


def test_who_has_not_joined_is_not_fenced(job):
    assert not job.replica(A).is_fenced()


def test_an_owner_that_is_gone_has_given_everybody_up(monkeypatch):
    monkeypatch.setattr(membership_module, "ANSWER_S", 0.5)
    controller = JobController()
    controller.publish([A])
    replica = StoreMembership.from_environment(controller.environment(A, planned_rank=0, planned_world=1))
    told: list[str] = []
    replica.on_fenced(told.append)
    replica.join(10.0)
    assert not replica.is_fenced()
    controller.close()
    began = time.monotonic()
    assert replica.is_fenced()
    assert time.monotonic() - began < 60.0  # not for ever
    assert told == [f"its owner at {controller.address} has not answered for 0.5 s"]
    replica.close()
    assert replica.is_fenced()


def test_a_frozen_owner_keeps_nobody_waiting(monkeypatch):
    monkeypatch.setattr(membership_module, "ANSWER_S", 0.5)
    code = """
import json, sys
from pollux.membership.controller import JobController
from pollux.membership.roster import Member
controller = JobController()
controller.publish([Member(replica_id="a", node="n1")])
env = controller.environment(Member(replica_id="a", node="n1"), planned_rank=0, planned_world=1)
print(json.dumps(env), flush=True)
sys.stdin.read()
"""
    owner = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        replica = StoreMembership.from_environment(json.loads(owner.stdout.readline()))
        replica.join(10.0)
        assert not replica.is_fenced()
        owner.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        assert replica.is_fenced()
        assert time.monotonic() - began < 60.0  # not for ever
    finally:
        owner.kill()
        owner.communicate(timeout=10)
    replica.close()
