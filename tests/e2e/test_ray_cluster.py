"""A real Ray cluster of a head and four nodes, a server on it, and everything that can happen to them.

Each node is a process tree on this machine that is killed or frozen as a whole. Every job is a ledger: whatever happens
on the way, each example was consumed exactly once an epoch.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
pytest.importorskip("torch")
psutil = pytest.importorskip("psutil")

from tests.e2e.cluster import LiveCluster  # noqa: E402
from tests.e2e.jobs import SCRIPTS  # noqa: E402
from tests.long import long  # noqa: E402
from tests.ray_cluster import RayCluster  # noqa: E402

# Long: a cluster of five Ray nodes. The conformance suite runs on Ray every time.
pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="needs fork and /proc"), long]

NODES = ("a", "b", "c", "d")  # with a slot each
EPOCHS, STEP_S = 16, 0.5  # of 20 steps: more than two minutes, unless a job is told to hurry
SLACK_S = 15.0  # for a busy machine
SEEN_S = 25.0  # a loss takes a second or two to be seen, on a machine with nothing else to do
POLLUX = [sys.executable, "-m", "pollux"]

LOOK = """
import json, sys
import ray
from ray.util.placement_group import placement_group_table
ray.init(address=sys.argv[1], namespace="pollux", log_to_driver=False, logging_level="ERROR")
actors = [row["name"] for row in ray.util.list_named_actors(all_namespaces=True)]
groups = [row["name"] for row in placement_group_table().values() if row["state"] != "REMOVED"]
print(json.dumps([actors, groups]))
"""

MEETING = """
import os, socket
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {total.item():g} at {os.environ['MASTER_ADDR']}")
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """Ray keeps its books on the disk: its head may be lost."""
    folder = tmp_path_factory.mktemp("ray")
    books = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(folder / "books")}
    with RayCluster(folder, env=books) as cluster:
        for name in NODES:
            cluster.add(name, 1)
        yield cluster


@pytest.fixture(scope="module")
def server(nodes: RayCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """A lone job gets all slots by this policy."""
    folder = tmp_path_factory.mktemp("server")
    made = make_server(folder, nodes, name="x").start()
    yield made
    made.stop()


def make_server(folder: Path, nodes: RayCluster, name: str, **options: Any) -> LiveCluster:
    return LiveCluster(folder, engine="ray", address=nodes.address, slots=None, name=name, policy="equal", **options)


@pytest.fixture
def cluster(nodes: RayCluster, server: LiveCluster) -> Iterator[LiveCluster]:
    """The server with all nodes there, and afterwards without jobs."""
    if nodes.nodes["head"].process.poll() is not None:
        nodes.start_head()
    if server.server is None or server.server.poll() is not None:
        server.start()
    for name in NODES:
        if nodes.nodes[name].process.poll() is not None:
            nodes.nodes[name].kill()
            nodes.add(name, 1)
    server.until(lambda: names_of(server) == set(NODES), "all nodes")
    yield server
    if server.server is not None and server.server.poll() is None:
        active = [job.name for job in server.client.jobs() if job.state not in ("succeeded", "failed", "cancelled")]
        for name in active:
            server.client.job(name).cancel()
        for name in active:
            server.until_over(name)


def names_of(cluster: LiveCluster) -> set[str]:
    """Nodes that can be used."""
    return {node.name for node in cluster.client.nodes() if node.health in ("ok", "suspect")}


def health_of(cluster: LiveCluster, name: str) -> tuple[str, str]:
    return next(((node.health, node.problem) for node in cluster.client.nodes() if node.name == name), ("", ""))


def submit(cluster: LiveCluster, name: str, **options: Any) -> None:
    cluster.submit_ledger(name, epochs=EPOCHS, step_s=STEP_S, **options)


def placed(cluster: LiveCluster, name: str) -> dict[str, int]:
    """Node -> pid of the member there."""
    replicas = cluster.client.job(name).describe().replicas
    return {row.node: row.pid for row in replicas if row.state == "member" and row.pid}


def until_placed(cluster: LiveCluster, name: str, *counts: int) -> dict[str, int]:
    """Until the job runs on so many nodes, and has gone on with them."""

    def look() -> dict[str, int] | None:
        found = placed(cluster, name)
        view = cluster.client.job(name).view()
        return found if view.state == "running" and len(found) in counts else None

    found: dict[str, int] = cluster.until(look, f"{name} on {counts} nodes")
    return found


def checkpoints(cluster: LiveCluster, name: str) -> set[str]:
    return {path.name for path in (cluster.data / "jobs" / name / "checkpoints").glob("step-*")}


def until_checkpoint(cluster: LiveCluster, name: str) -> int:
    """The step of a checkpoint that there is."""
    found = cluster.until(lambda: checkpoints(cluster, name), "a checkpoint")
    return max(int(path.split("-")[1]) for path in found)


def steps(cluster: LiveCluster, name: str, pid: int) -> list[int]:
    """What a replica has begun."""
    path = cluster.folder / f"{name}-trace" / str(pid)
    return [int(line.split()[1]) for line in path.read_text().splitlines() if line.count(" ") >= 5]


def until_steps(cluster: LiveCluster, name: str, pid: int, more: int = 3) -> None:
    before = len(steps(cluster, name, pid))
    cluster.until(lambda: len(steps(cluster, name, pid)) > before + more, f"more steps of {name}")


def finish(cluster: LiveCluster, *names: str) -> None:
    for name in names:
        cluster.hurry(name)
    for name in names:
        assert cluster.until_over(name) == "succeeded", cluster.story(name)
        cluster.check_ledger(name, EPOCHS)


def num_starts(cluster: LiveCluster, name: str) -> int:
    return sum(row.source == "pending" for row in cluster.client.job(name).describe().transitions)


def is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def command_of(process: Any) -> list[str]:
    try:
        found: list[str] = process.cmdline()
    except psutil.Error:
        return []
    return found


def look_into(nodes: RayCluster) -> tuple[list[str], list[str]]:
    """Named actors and placement groups that there are."""
    command = [sys.executable, "-c", LOOK, nodes.address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, env=nodes.env)
    assert done.returncode == 0, done.stderr
    actors, groups = json.loads(done.stdout.splitlines()[-1])
    return actors, groups


def pollux(*words: object, timeout_s: float = 90.0) -> subprocess.CompletedProcess[str]:
    command = [*POLLUX, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)


# --- what should happen -------------------------------------------------------------------------------------------


def test_jobs_are_resized_across_nodes_in_place_and_their_output_comes_back(cluster: LiveCluster) -> None:
    submit(cluster, "grows")
    alone = until_placed(cluster, "grows", 4)
    submit(cluster, "late")
    shared = until_placed(cluster, "grows", 2)
    other = until_placed(cluster, "late", 2)
    assert shared.items() < alone.items()  # the same processes at the same places
    assert not shared.keys() & other.keys()
    cluster.client.job("late").cancel()
    grown = until_placed(cluster, "grows", 4)
    assert shared.items() < grown.items()

    told = cluster.until(lambda: [line for line in cluster.client.job("grows").logs() if "rank 3 of 4" in line], "logs")
    assert told
    finish(cluster, "grows")
    assert cluster.client.job("grows").result().exit_code == 0
    printed = pollux("logs", "grows", "--data", cluster.data)
    assert printed.returncode == 0 and "rank 0 of 4" in printed.stdout and "saved step" in printed.stdout


def test_a_fixed_job_meets_across_nodes(cluster: LiveCluster) -> None:
    (cluster.folder / "meeting.py").write_text(MEETING)
    job = cluster.submit(cluster.folder / "meeting.py", name="meeting", kind="fixed", replicas=2)
    assert job.wait(90) == "succeeded", cluster.story("meeting")
    lines = sorted(line for line in job.logs(stream="out") if "rank" in line)
    assert len(lines) == 2 and all(": 3 at" in line for line in lines), lines
    assert all("127.0.0.1" not in line for line in lines)  # nobody else would reach that


def test_a_working_directory_travels_to_every_node(cluster: LiveCluster, tmp_path: Path) -> None:
    (tmp_path / "lib.py").write_text("WORD = 'travelled'\n")
    (tmp_path / "main.py").write_text("import lib, os\nprint(lib.WORD, os.environ['RANK'], os.getcwd())\n")
    job = cluster.client.submit(["python", "main.py"], workdir=str(tmp_path), replicas=4, name="travels")
    job.result(timeout_s=120)
    lines = sorted(line.split("] ")[-1].split()[:2] for line in job.logs(stream="out"))
    assert lines == [["travelled", str(rank)] for rank in range(4)]
    assert not any(str(tmp_path) in line for line in job.logs(stream="out"))


def test_a_job_that_needs_more_than_there_is_says_so(cluster: LiveCluster) -> None:
    submit(cluster, "giant", min_replicas=9)
    wanted = "needs 9 slots at once; the cluster has 4"  # before the first decision it only waits for slots
    cluster.until(lambda: cluster.client.job("giant").view().reason == wanted, wanted)
    assert cluster.client.job("giant").describe().state == "pending"


# --- nodes that go and come ---------------------------------------------------------------------------------------


def test_a_node_is_killed_and_comes_back(nodes: RayCluster, cluster: LiveCluster) -> None:
    submit(cluster, "wide")
    before = until_placed(cluster, "wide", 4)
    killed_at = time.monotonic()
    nodes.nodes["b"].kill()
    cluster.until(lambda: "b" not in names_of(cluster), "the loss seen", SEEN_S)
    left = until_placed(cluster, "wide", 3)
    assert time.monotonic() - killed_at < SEEN_S + 20.0
    assert left == {node: pid for node, pid in before.items() if node != "b"}
    until_steps(cluster, "wide", left["a"])
    nodes.add("b", 1)
    again = until_placed(cluster, "wide", 4)
    assert left.items() < again.items() and again["b"] != before["b"]
    finish(cluster, "wide")
    assert num_starts(cluster, "wide") == 1


def test_a_job_whose_every_replica_was_on_a_killed_node_starts_again_elsewhere(
    nodes: RayCluster, cluster: LiveCluster
) -> None:
    submit(cluster, "small", max_replicas=1)
    ((place, pid),) = until_placed(cluster, "small", 1).items()
    saved = until_checkpoint(cluster, "small")
    nodes.nodes[place].kill()
    cluster.until(lambda: placed(cluster, "small") and place not in placed(cluster, "small"), "it runs elsewhere")
    ((other, heir),) = until_placed(cluster, "small", 1).items()
    assert other != place and heir != pid
    until_steps(cluster, "small", heir)
    assert steps(cluster, "small", heir)[0] >= saved
    told = cluster.client.job("small").describe().transitions
    assert any(f"node {place} is lost" in row.reason for row in told), told
    finish(cluster, "small")


def test_a_frozen_node_is_given_up_and_can_do_no_harm_when_it_wakes(nodes: RayCluster, cluster: LiveCluster) -> None:
    submit(cluster, "cold")
    before = until_placed(cluster, "cold", 4)
    until_checkpoint(cluster, "cold")
    first = next(row for row in cluster.client.job("cold").describe().replicas if row.rank == 0)
    frozen, pid = first.node, first.pid  # who writes the checkpoints
    nodes.nodes[frozen].freeze()
    cluster.until(lambda: frozen not in names_of(cluster), "the loss seen", SEEN_S)
    left = until_placed(cluster, "cold", 3)
    assert left == {node: pid for node, pid in before.items() if node != frozen}
    until_steps(cluster, "cold", next(iter(left.values())))
    old = {name for name in checkpoints(cluster, "cold") if name.endswith("-1")}
    done, told_at = steps(cluster, "cold", pid), cluster.client.status().now

    nodes.nodes[frozen].thaw()
    cluster.until(lambda: not is_alive(pid), "the woken replica ends", 30.0)
    until_steps(cluster, "cold", next(iter(left.values())))
    assert {name for name in checkpoints(cluster, "cold") if name.endswith("-1")} <= old
    assert len(steps(cluster, "cold", pid)) <= len(done) + 1  # one that it had begun
    late = [row for row in cluster.client.job("cold").reports() if row.at > told_at]
    assert all(row.num_replicas == 3 for row in late)
    finish(cluster, "cold")


def test_a_node_whose_agent_is_silent_is_given_up_and_comes_back_by_itself(
    nodes: RayCluster, cluster: LiveCluster
) -> None:
    """Ray sees nothing wrong with it: a wrong alarm costs a restart of its replicas, not the node."""
    submit(cluster, "silent")
    before = until_placed(cluster, "silent", 4)
    agent = next(one for one in nodes.nodes["b"].tree() if "ray::NodeAgent" in " ".join(command_of(one)))
    agent.suspend()
    cluster.until(lambda: "b" not in names_of(cluster), "the loss seen", SEEN_S)
    left = until_placed(cluster, "silent", 3)
    assert left == {node: pid for node, pid in before.items() if node != "b"}
    cluster.until(lambda: not is_alive(before["b"]), "the replica of the silent agent ends", 30.0)
    after = until_placed(cluster, "silent", 4)
    assert {node: pid for node, pid in after.items() if node != "b"} == left and nodes.nodes["b"].process.poll() is None
    finish(cluster, "silent")


def test_a_node_that_only_answers_late_is_kept(nodes: RayCluster, cluster: LiveCluster) -> None:
    """As one with too little CPU does: in the end later than what is the end of a node that was always in time."""
    submit(cluster, "starved")
    before = until_placed(cluster, "starved", 4)
    agent = next(one for one in nodes.nodes["b"].tree() if "ray::NodeAgent" in " ".join(command_of(one)))
    for seconds in (1.0, 1.4, 1.9, 2.5, 2.5):
        agent.suspend()
        time.sleep(seconds)
        agent.resume()
        time.sleep(1.0)
    until_steps(cluster, "starved", before["b"])
    assert placed(cluster, "starved") == before and num_starts(cluster, "starved") == 1
    finish(cluster, "starved")


def test_a_drained_node_is_left_before_it_goes(nodes: RayCluster, cluster: LiveCluster) -> None:
    submit(cluster, "moves")
    before = until_placed(cluster, "moves", 4)
    cluster.client.drain("c")
    left = until_placed(cluster, "moves", 3)
    assert left == {node: pid for node, pid in before.items() if node != "c"}
    cluster.until(lambda: not is_alive(before["c"]), "nobody on it")
    nodes.nodes["c"].kill()
    cluster.until(lambda: "c" not in names_of(cluster), "it is gone", SEEN_S)
    until_steps(cluster, "moves", left["a"])
    assert placed(cluster, "moves") == left
    assert cluster.client.job("moves").view().num_crashes == 0
    nodes.add("c", 1)
    cluster.until(lambda: "c" in names_of(cluster), "it is back")
    cluster.client.undrain("c")
    assert left.items() < until_placed(cluster, "moves", 4).items()
    finish(cluster, "moves")


def test_labels_are_rays_and_a_node_with_notice_is_left_before_it_goes(nodes: RayCluster, cluster: LiveCluster) -> None:
    notice = cluster.folder / "notice"
    spot = ["--labels", "zone=east,ray.io/market-type=spot"]
    nodes.add("spot", 2, *spot, prefix=["env", f"POLLUX_NOTICE_FILE={notice}"])
    try:
        cluster.until(lambda: "spot" in names_of(cluster), "it is there")
        node = next(one for one in cluster.client.nodes() if one.name == "spot")
        assert (node.labels["zone"], node.labels["market"], node.cpus) == ("east", "spot", 2.0)
        submit(cluster, "east", constraints=["zone=east"])
        submit(cluster, "elsewhere", constraints=["zone!=east"])
        submit(cluster, "nowhere", constraints=["zone=west"])
        assert until_placed(cluster, "east", 1).keys() == {"spot"}
        assert "spot" not in until_placed(cluster, "elsewhere", 4)
        assert cluster.client.job("nowhere").view().reason == "no node has zone=west; zone here: east"
        cluster.client.job("nowhere").cancel()
        for name in ("east", "elsewhere"):
            cluster.client.job(name).cancel()
            assert cluster.client.job(name).wait(60) == "cancelled"
        submit(cluster, "anywhere")
        cluster.until(lambda: "spot" in placed(cluster, "anywhere"), "it is used")
        notice.write_text("terminate at 12:00")
        told_at = time.monotonic()
        cluster.until(lambda: "spot" not in placed(cluster, "anywhere"), "it is left")
        assert time.monotonic() - told_at < 20.0  # clouds give 30 s to 2 min
        assert "terminate at 12:00" in next(one for one in cluster.client.nodes() if one.name == "spot").problem
        nodes.nodes["spot"].kill()
        assert cluster.client.job("anywhere").view().num_crashes == 0
        finish(cluster, "anywhere")
    finally:
        nodes.nodes.pop("spot").kill()


def test_a_node_without_the_storage_is_not_used(nodes: RayCluster, cluster: LiveCluster) -> None:
    """It sees an empty folder in the place of the one that the others share."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("hiding a folder from a process needs root")
    hide = f'mount -t tmpfs none "{cluster.data}/jobs" && exec "$@"'
    if subprocess.run(["unshare", "-m", "sh", "-c", hide, "sh", "true"], capture_output=True).returncode:
        pytest.skip("mounts cannot be hidden here")
    nodes.add("blind", 1, prefix=["unshare", "-m", "sh", "-c", hide, "sh"])
    try:
        submit(cluster, "seeing")
        until_placed(cluster, "seeing", 4)
        cluster.until(lambda: health_of(cluster, "blind")[0] == "unusable", "it is shown")
        assert "does not see the storage" in health_of(cluster, "blind")[1]
        assert names_of(cluster) == set(NODES)
        finish(cluster, "seeing")
    finally:
        nodes.nodes.pop("blind").kill()


def test_a_node_without_the_script_fails_no_job(nodes: RayCluster, cluster: LiveCluster) -> None:
    """A job that grows onto it goes on at its old size, a job that starts there starts elsewhere."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("hiding a folder from a process needs root")
    hide = f'mount -t tmpfs none "{SCRIPTS}" && exec "$@"'
    if subprocess.run(["unshare", "-m", "sh", "-c", hide, "sh", "true"], capture_output=True).returncode:
        pytest.skip("mounts cannot be hidden here")
    submit(cluster, "healthy")
    before = until_placed(cluster, "healthy", 4)
    nodes.add("bad", 2, prefix=["unshare", "-m", "sh", "-c", hide, "sh"])
    try:
        cluster.until(lambda: health_of(cluster, "bad")[0] == "suspect", "the node is named")
        assert "No such file or directory" in health_of(cluster, "bad")[1]
        assert until_placed(cluster, "healthy", 4) == before  # the same replicas train on
        told = [row.reason for row in cluster.client.job("healthy").describe().transitions]
        assert any("replicas fail on bad" in reason for reason in told), told
        script = str(SCRIPTS / "ledger.py")
        names = [f"fixed-{number}" for number in range(3)]
        for name in names:
            cluster.submit("-c", f"open({script!r}).close()", name=name, kind="fixed")
        for name in names:
            assert cluster.until_over(name) == "succeeded", cluster.story(name)
        finish(cluster, "healthy")
    finally:
        nodes.nodes.pop("bad").kill()


# --- what carries it ----------------------------------------------------------------------------------------------


def test_a_killed_server_and_a_killed_proxy_change_nothing_for_the_jobs(cluster: LiveCluster) -> None:
    submit(cluster, "calm")
    before = until_placed(cluster, "calm", 4)
    cluster.kill_server()
    until_steps(cluster, "calm", before["a"])
    cluster.start()
    assert until_placed(cluster, "calm", 4) == before
    assert cluster.server is not None
    server = psutil.Process(cluster.server.pid)
    old = {process.pid for process in proxies(server)}
    assert len(old) == 1
    os.kill(next(iter(old)), signal.SIGKILL)
    cluster.until(lambda: {process.pid for process in proxies(server)} - old, "another proxy")
    until_steps(cluster, "calm", before["a"])
    assert until_placed(cluster, "calm", 4) == before
    finish(cluster, "calm")
    assert num_starts(cluster, "calm") == 1
    assert cluster.client.job("calm").view().num_crashes == 0


def errors_of_workers(nodes: RayCluster) -> str:
    """What Ray's workers wrote, the supervisor among them; files come and go."""
    texts = []
    for path in (nodes.temporary / "session_latest" / "logs").glob("worker-*.err"):
        with contextlib.suppress(FileNotFoundError):
            texts.append(path.read_text())
    return "\n".join(texts)


def proxies(server: Any) -> list[Any]:
    return [child for child in server.children() if "pollux.engines.ray.proxy" in command_of(child)]


def test_a_killed_supervisor_is_replaced_and_jobs_go_on_from_their_checkpoints(
    nodes: RayCluster, cluster: LiveCluster
) -> None:
    submit(cluster, "kept")
    before = set(until_placed(cluster, "kept", 4).values())
    saved = until_checkpoint(cluster, "kept")
    (supervisor,) = (process for process in nodes.nodes["head"].tree() if "Supervisor" in " ".join(process.cmdline()))
    supervisor.kill()
    cluster.until(lambda: not any(is_alive(pid) for pid in before), "replicas that end with it")
    cluster.until(lambda: cluster.client.job("kept").view().num_crashes == 1, "the loss seen")
    after = until_placed(cluster, "kept", 4)
    assert not before & set(after.values())
    until_steps(cluster, "kept", after["a"])
    assert steps(cluster, "kept", after["a"])[0] >= saved
    finish(cluster, "kept")


def test_the_head_is_lost_and_comes_back(nodes: RayCluster, cluster: LiveCluster) -> None:
    submit(cluster, "headless")
    before = set(until_placed(cluster, "headless", 4).values())
    saved = until_checkpoint(cluster, "headless")
    nodes.nodes["head"].kill()
    killed_at = time.monotonic()
    cluster.until(lambda: not cluster.client.is_ready(), "the server says that it is not ready")
    assert time.monotonic() - killed_at < 5.0 + SLACK_S

    def told() -> str:
        note = cluster.client.job("headless").view().note
        return note if "no Ray answers" in note else ""

    note = cluster.until(told, "what is wrong, told", 60.0)
    assert "paused: " in note and "no Ray answers at " in note and f":{nodes.port} (" in note, note
    assert "see that the head runs" in note
    nodes.start_head()
    cluster.until(lambda: cluster.client.job("headless").view().num_crashes == 1, "a new supervisor")
    after = until_placed(cluster, "headless", 4)
    assert all(nodes.nodes[name].process.poll() is None for name in NODES)  # they were not started again
    assert not before & set(after.values())
    assert cluster.client.job("headless").view().note == ""
    until_steps(cluster, "headless", after["a"])
    assert steps(cluster, "headless", after["a"])[0] >= saved
    finish(cluster, "headless")


# --- not alone ----------------------------------------------------------------------------------------------------


def test_a_name_that_is_taken_and_another_that_is_not(nodes: RayCluster, cluster: LiveCluster, tmp_path: Path) -> None:
    submit(cluster, "mine", max_replicas=2)
    before = until_placed(cluster, "mine", 2)
    options = ("--engine", "ray", "--address", nodes.address, "--port", 0, "--data", tmp_path / "data")
    refused = pollux("up", *options, "--name", "x")
    assert refused.returncode == 2, refused.stderr
    assert "another Pollux on this Ray cluster is called 'x'" in refused.stderr
    assert "give this one another name with --name" in refused.stderr and "Traceback" not in refused.stderr

    up = pollux("up", *options, "--name", "y", "--policy", "equal", "--detach")
    assert up.returncode == 0, up.stderr
    try:
        # What "mine" has is not on offer here.
        script = tmp_path / "long.py"
        script.write_text("import time\ntime.sleep(600)\n")
        done = pollux("submit", "--data", tmp_path / "data", "--name", "theirs", "--", sys.executable, script)
        assert done.returncode == 0, done.stderr
        cluster.until(lambda: any("pollux:y:" in name for name in look_into(nodes)[1]), "a place for theirs")
    finally:
        down = pollux("down", "--data", tmp_path / "data")
    assert down.returncode == 0, down.stderr
    actors, groups = look_into(nodes)
    assert not [name for name in (*actors, *groups) if name.startswith("pollux:y:")]
    assert "pollux:x:supervisor" in actors
    left = [process for process in psutil.process_iter() if str(tmp_path) in " ".join(command_of(process))]
    assert left == []
    assert placed(cluster, "mine") == before
    finish(cluster, "mine")
