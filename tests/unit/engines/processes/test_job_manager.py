"""The job manager with fake processes: which replica is in which slot, and which job waits for which."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("psutil")

from pollux.engines.launch import Launch
from pollux.engines.messages import PROTOCOL_VERSION
from pollux.engines.processes.devices import Device
from pollux.engines.processes.job_manager import JobManager
from pollux.engines.processes.layout import detect_nodes
from pollux.engines.processes.replica_job import JobOrder, NodeFailure
from pollux.engines.processes.request_handler import RequestHandler
from pollux.engines.processes.slots import Phase, ReplicaView, Slot
from pollux.engines.processes.space import SpaceWatch
from pollux.engines.transport import Message


class FakeProcesses:
    """Replicas that come at once and leave when they are told to."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.target = list(slots)
        self.members: list[Slot] = []
        self.leaving: list[Slot] = []
        self.result: int | None = None
        self.failure = ""
        self.crashes: list[str] = []
        self.blame: NodeFailure | None = None
        self.given_up: list[NodeFailure] = []
        self.is_stopping = False
        self.saves: bool | None = None  # as it was told when it was to leave
        self.waited_s: float | None = None  # for its processes to end

    @property
    def is_settled(self) -> bool:
        return self.members == self.target

    @property
    def replicas(self) -> tuple[ReplicaView, ...]:
        members = [ReplicaView(f"m{slot.number}", rank, slot, 1, "member") for rank, slot in enumerate(self.members)]
        return (*members, *(ReplicaView(f"l{slot.number}", None, slot, 1, "leaving") for slot in self.leaving))

    @property
    def phase(self) -> Phase:
        return Phase() if self.is_settled else Phase("new replicas start", f"{len(self.members)} of {len(self.target)}")

    def start(self) -> None:
        self.members = list(self.target)

    def place(self, slots: Sequence[Slot]) -> None:
        assert not set(slots) & set(self.leaving), "a new replica would sit beside the old one"
        self.leaving += [slot for slot in self.members if slot not in slots]
        self.members = self.target = list(slots)

    def pump(self) -> int | None:
        if self.is_stopping and not self.leaving:
            self.result = 143
        return self.result

    def request_stop(self, grace_s: float = 0.0, saves: bool = True) -> None:
        self.is_stopping, self.saves = True, saves
        self.leaving, self.members = self.leaving + self.members, []

    def dump_stacks(self) -> None: ...
    def hold(self) -> None: ...
    def release(self) -> None: ...
    def close(self, wait_s: float = 10.0) -> None:
        self.waited_s = wait_s


class FakeFactory:
    def make(self, order: JobOrder) -> FakeProcesses:
        return FakeProcesses(order.slots)

    def poll(self) -> None: ...
    def close(self) -> None: ...
    def warm_up(self) -> None: ...


class Cluster:
    def __init__(self, directory: Path) -> None:
        self.told: list[Message] = []
        self.manager = JobManager(directory, SpaceWatch(0), self.told.append)
        self.manager._factory = FakeFactory()
        self.directory = directory
        self.use(*detect_nodes(nodes="2x3", slots=6)[1])

    def use(self, *devices: Device) -> None:
        self.manager.use(devices)

    def start(self, job: str, generation: int, *shares: tuple[str, int]) -> None:
        place = str(self.directory)
        launch = Launch(command=("x",), kind="elastic", directory=place, checkpoint_dir=place, cwd="/", env={})
        self.manager.start(
            {"job": job, "generation": generation, "allocation": list(shares), "launch": launch.to_dict()}
        )
        self.manager.turn()

    def resize(self, job: str, generation: int, *shares: tuple[str, int]) -> None:
        self.manager.resize({"job": job, "generation": generation, "allocation": list(shares)})
        self.manager.turn()

    def stop(self, job: str) -> None:
        self.manager.stop({"job": job, "grace_s": 1.0, "saves": True, "reason": "test"})
        self.manager.turn()

    def processes(self, job: str) -> FakeProcesses:
        return self.manager._entries[job].processes  # type: ignore[return-value]

    def numbers(self, job: str) -> list[int]:
        return [slot.number for slot in self.processes(job).members]

    def leave(self, job: str) -> None:
        self.processes(job).leaving = []
        self.manager.turn()

    def drain(self) -> list[tuple[str, str, int]]:
        """What was told of jobs, without their replicas and notes."""
        told = [message for message in self.told if message["event"] not in ("replicas", "note")]
        self.told.clear()
        return [(message["event"], message["job"], message["generation"]) for message in told]

    def check(self) -> None:
        """No device holds two replicas."""
        taken = [
            view.slot.number
            for entry in self.manager._entries.values()
            if entry.processes is not None
            for view in entry.processes.replicas
        ]
        assert len(set(taken)) == len(taken), f"shared: {taken}"


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


@pytest.mark.parametrize(("said", "saves"), [({}, True), ({"saves": True}, True), ({"saves": False}, False)])
def test_a_stop_from_a_server_of_the_version_before_ends_the_job_which_saves(cluster, said, saves):
    """It says nothing of ``saves``."""
    cluster.start("a", 1, ("node-0", 1))
    processes = cluster.processes("a")
    handler = RequestHandler(cluster.manager, cluster.told.append, where="here")
    handler.obey({"op": "hello", "version": PROTOCOL_VERSION, "oldest": PROTOCOL_VERSION - 1, "devices": None})
    handler.obey({"op": "stop", "job": "a", "grace_s": 30.0, "reason": "cancelled", **said})
    assert (processes.is_stopping, processes.saves) == (True, saves)
    cluster.leave("a")
    assert ("stopped", "a", 1) in [(one["event"], one.get("job"), one.get("generation")) for one in cluster.told]


def test_the_lowest_free_slots_and_those_it_has(cluster):
    cluster.start("a", 1, ("node-1", 1), ("node-0", 2))
    assert cluster.numbers("a") == [3, 0, 1]
    cluster.start("b", 1, ("node-0", 1), ("node-1", 1))
    assert cluster.numbers("b") == [2, 4]
    cluster.resize("a", 2, ("node-1", 2))
    assert cluster.numbers("a") == [3, 5]
    assert cluster.drain() == [("runs", "a", 1), ("runs", "b", 1), ("runs", "a", 2)]


def test_slots_of_leavers_are_waited_for(cluster):
    cluster.start("a", 1, ("node-0", 3))
    cluster.resize("a", 2, ("node-0", 1))
    cluster.start("b", 1, ("node-0", 2))
    assert cluster.drain() == [("runs", "a", 1), ("runs", "a", 2)]
    assert (
        cluster.manager.state()[1]["note"]
        == "waits for slots: other replicas have not left them yet, or its node has fewer slots now"
    )
    cluster.leave("a")
    assert cluster.numbers("b") == [1, 2]
    assert cluster.drain() == [("runs", "b", 1)]


def test_what_a_resize_waits_for_is_told_with_its_begin(cluster):
    def told() -> list[tuple[str, bool]]:
        notes = [message for message in cluster.told if message["event"] == "note"]
        cluster.told.clear()
        return [(note["phase"], note["since"] > begun) for note in notes]

    begun = time.time()
    cluster.start("a", 1, ("node-0", 3))
    cluster.processes("a").members.pop()
    cluster.manager.turn()
    assert told() == [("new replicas start: 2 of 3", True)]
    begun = time.time()
    cluster.processes("a").members.pop()
    cluster.manager.turn()
    assert told() == [("new replicas start: 1 of 3", False)]  # another number, but the same phase
    assert cluster.manager.state()[0]["phase"] == "new replicas start: 1 of 3"
    cluster.start("b", 1, ("node-0", 1))
    assert told() == [("waits for slots", True)]
    cluster.processes("a").members = list(cluster.processes("a").target)
    cluster.manager.turn()
    assert told() == [("", True)]


def test_its_own_leavers_are_waited_for_too(cluster):
    cluster.start("a", 1, ("node-0", 3))
    cluster.resize("a", 2, ("node-0", 2))
    cluster.resize("a", 3, ("node-0", 3))
    assert cluster.drain() == [("runs", "a", 1), ("runs", "a", 2)]
    cluster.leave("a")
    assert cluster.numbers("a") == [0, 1, 2]
    assert cluster.drain() == [("runs", "a", 3)]


def test_a_start_that_comes_while_it_stops_waits_for_that(cluster):
    cluster.start("a", 1, ("node-0", 1))
    cluster.stop("a")
    cluster.start("a", 2, ("node-1", 1))
    assert cluster.drain() == [("runs", "a", 1)]
    cluster.leave("a")
    cluster.manager.turn()
    assert cluster.numbers("a") == [3]
    assert cluster.drain() == [("runs", "a", 2)]


def test_repeated_commands_change_nothing(cluster):
    cluster.start("a", 1, ("node-0", 1))
    before = cluster.processes("a")
    cluster.start("a", 1, ("node-0", 1))
    cluster.resize("a", 1, ("node-0", 1))
    assert cluster.processes("a") is before
    assert cluster.drain() == [("runs", "a", 1)]
    cluster.stop("a")
    cluster.stop("a")
    cluster.leave("a")
    assert cluster.drain() == [("stopped", "a", 1)]
    cluster.stop("a")
    cluster.resize("a", 2, ("node-0", 1))
    assert cluster.drain() == [("stopped", "a", 1)] * 2  # told again to who asks


def test_nodes_that_are_cut_anew(cluster):
    """A job stays where it is, on a node that is no more, until it is moved; devices are still not shared."""
    cluster.start("a", 1, ("node-0", 3))
    cluster.start("b", 1, ("node-1", 1))
    cluster.use(*(Device(node="host", number=number) for number in range(6)))
    cluster.manager.turn()
    assert cluster.numbers("a") == [0, 1, 2]
    cluster.start("c", 1, ("host", 3))
    assert cluster.processes("c") is None  # five are free in the new cut, two really
    cluster.resize("b", 2, ("host", 1))
    assert cluster.numbers("b") == [4]
    cluster.leave("b")
    cluster.stop("c")
    cluster.resize("a", 2, ("host", 3))
    assert sorted(cluster.numbers("a")) == [0, 3, 5]  # the free ones first, then what it has by another name


@pytest.mark.parametrize("seed", range(12))
def test_slots_are_never_shared(cluster, seed):
    """Commands at random, also such as no scheduler would give."""
    chance = random.Random(seed)
    generation = 0
    for _ in range(200):
        job, generation = chance.choice("abcd"), generation + 1
        shares = [(f"node-{node}", count) for node in range(2) if (count := chance.randint(0, 3))] or [("node-0", 1)]
        known = cluster.manager._entries.get(job)
        if known is None or known.end is not None:
            cluster.start(job, generation, *shares)
        elif chance.random() < 0.2:
            cluster.stop(job)
        elif chance.random() < 0.5 and known.processes is not None:
            cluster.leave(job)
        else:
            cluster.resize(job, generation, *shares)
        cluster.check()


def test_ends_are_kept_for_the_next_supervisor_until_they_are_forgotten(cluster, tmp_path):
    for job in "ab":
        cluster.start(job, 1, ("node-0", 1))
        cluster.stop(job)
        cluster.leave(job)
    cluster.manager.forget({"job": "a", "generation": 7})
    cluster.manager.forget({"job": "b", "generation": 1})
    again = JobManager(tmp_path, SpaceWatch(0), [].append)
    assert [(row["job"], row["end"]["event"]) for row in again.state()] == [("a", "stopped")]
    (tmp_path / "supervisor-ends.json").write_text("{ damaged")
    assert JobManager(tmp_path, SpaceWatch(0), [].append).state() == []


def test_trouble_with_one_job_is_its_own(cluster):
    cluster.start("a", 1, ("node-0", 1))
    cluster.start("b", 1, ("node-0", 1))
    cluster.drain()
    cluster.processes("a").pump = lambda: 1 // 0  # type: ignore[method-assign]
    cluster.manager.turn()
    assert cluster.drain() == [("ended", "a", 1)]
    assert "cannot be looked after: ZeroDivisionError" in cluster.manager.state()[0]["end"]["reason"]
    assert cluster.numbers("b") == [1]


# --- nodes that are lost ------------------------------------------------------------------------------------------


def lose(cluster: Cluster, *nodes: str) -> None:
    """As a supervisor of many machines does: the starter knows first, so that no replica is waited for there."""
    for entry in cluster.manager._entries.values():
        processes = cluster.processes(entry.job)
        if processes is not None:
            processes.members = [slot for slot in processes.members if slot.node not in nodes]
    cluster.manager.lose(nodes, f"node {nodes[0]} is lost")
    cluster.manager.turn()


def test_survivors_of_a_lost_node_go_on_and_others_do_not_notice(cluster):
    cluster.start("a", 1, ("node-0", 2), ("node-1", 1))
    cluster.start("b", 1, ("node-0", 1))
    before = cluster.processes("a")
    cluster.drain()
    lose(cluster, "node-1")
    assert cluster.processes("a") is before and cluster.numbers("a") == [0, 1]
    assert cluster.numbers("b") == [2]
    assert cluster.drain() == []  # the generation that was asked for runs; who is left is told with the replicas
    cluster.resize("a", 2, ("node-0", 2))
    assert cluster.drain() == [("runs", "a", 2)]
    assert cluster.manager.nodes_in_use == {"node-0"}


def test_a_job_of_which_nobody_is_left_is_lost(cluster):
    cluster.start("a", 1, ("node-0", 1))
    cluster.start("b", 1, ("node-1", 3))
    cluster.drain()
    lose(cluster, "node-1")
    assert cluster.drain() == [("lost", "b", 1)]
    assert cluster.manager.state()[1]["end"]["reason"] == "node node-1 is lost"
    cluster.manager.forget({"job": "b", "generation": 1})
    cluster.start("b", 2, ("node-0", 2))
    assert cluster.numbers("b") == [1, 2]


def test_other_jobs_do_not_wait_for_the_rest_of_a_lost_job(cluster):
    """It may be on a node that is silent, too."""
    cluster.start("a", 1, ("node-1", 3))
    processes = cluster.processes("a")
    lose(cluster, "node-1")
    assert processes.waited_s == 0.0


def test_a_fixed_job_is_lost_with_any_of_its_nodes(cluster):
    cluster.start("a", 1, ("node-0", 1), ("node-1", 1))
    entry = cluster.manager._entries["a"]
    entry.launch = dataclasses.replace(entry.launch, kind="fixed")
    cluster.drain()
    lose(cluster, "node-1")
    assert cluster.drain() == [("lost", "a", 1)]


def test_a_job_that_was_moving_to_a_lost_node_stays_where_it_was(cluster):
    cluster.start("a", 1, ("node-0", 2))
    cluster.drain()
    processes = cluster.processes("a")
    before = list(processes.members)

    def begin_to_move(slots: Sequence[Slot]) -> None:
        processes.target = list(slots)  # newcomers start; who trains is still on the other node

    processes.place = begin_to_move  # type: ignore[method-assign]
    cluster.resize("a", 2, ("node-1", 2))
    assert processes.target != processes.members == before
    cluster.manager.lose(["node-1"], "node node-1 is lost")
    cluster.manager.turn()
    assert cluster.processes("a") is processes and processes.target == before
    assert cluster.manager.state()[0]["allocation"] == [["node-0", 2]]
    cluster.resize("a", 3, ("node-0", 2))
    assert cluster.drain()[-1] == ("runs", "a", 3)


def test_a_start_that_was_to_follow_a_stop_does_not_keep_a_closing_supervisor(cluster):
    cluster.start("a", 1, ("node-0", 1))
    cluster.stop("a")
    cluster.start("a", 2, ("node-0", 1))
    cluster.manager.shut_down(1.0)
    cluster.leave("a")
    cluster.manager.turn()
    assert cluster.manager.num_living == 0


def test_a_job_that_waits_or_stops_is_not_lost(cluster):
    cluster.start("a", 1, ("node-1", 3))
    cluster.start("waits", 1, ("node-1", 1))
    cluster.stop("a")
    cluster.drain()
    lose(cluster, "node-1")
    cluster.leave("a")
    assert cluster.drain() == [("stopped", "a", 1)]
    cluster.resize("waits", 2, ("node-0", 1))
    assert cluster.drain() == [("runs", "waits", 2)]


def test_nobody_is_placed_on_a_lost_node_until_it_is_back(cluster):
    cluster.start("a", 1, ("node-0", 1))
    lose(cluster, "node-1")
    cluster.drain()
    cluster.resize("a", 2, ("node-0", 1), ("node-1", 1))
    assert cluster.drain() == [] and cluster.numbers("a") == [0]
    cluster.use(*detect_nodes(nodes="2x3", slots=6)[1])
    cluster.manager.turn()
    assert cluster.numbers("a") == [0, 3] and cluster.drain() == [("runs", "a", 2)]


def test_a_change_that_is_given_up_is_told_with_its_node_and_the_job_keeps_its_members(cluster):
    cluster.start("a", 1, ("node-0", 1))
    cluster.resize("a", 2, ("node-0", 1), ("node-1", 2))
    processes = cluster.processes("a")
    processes.members = processes.target = processes.members[:1]
    processes.given_up.append(NodeFailure("node-1", "ModuleNotFoundError: No module named 'x'"))
    cluster.manager.turn()
    (told,) = (message for message in cluster.told if message["event"] == "gave_up")
    assert (told["node"], told["allocation"], told["generation"]) == ("node-1", [["node-0", 1]], 2)
    cluster.start("b", 1, ("node-1", 3))
    assert len(cluster.numbers("b")) == 3  # the slots are free again


def test_an_end_says_which_node_may_be_its_cause(cluster):
    cluster.start("a", 1, ("node-0", 1))
    processes = cluster.processes("a")
    processes.result, processes.members = 1, []
    processes.blame = NodeFailure("node-0", "no script")
    cluster.manager.turn()
    (told,) = (message for message in cluster.told if message["event"] == "ended")
    assert (told["state"], told["node"], told["cause"]) == ("failed", "node-0", "no script")


def test_a_crash_that_ends_the_job_is_told_before_its_end(cluster):
    cluster.start("a", 1, ("node-0", 1))
    processes = cluster.processes("a")
    processes.crashes.append("a-0 exited with 1")
    processes.result, processes.members = 1, []
    cluster.told.clear()
    cluster.manager.turn()
    told = [message["event"] for message in cluster.told if message["event"] in ("crashed", "ended")]
    assert told == ["crashed", "ended"]
