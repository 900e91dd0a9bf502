"""Several hosts with addresses of their own, as network namespaces on a bridge: nothing may rely on 127.0.0.1.

Each host has its own loopback, which leads nowhere else. A cut cable is a link that is down: whoever is behind it runs
on, and is heard by nobody.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray")
pytest.importorskip("torch")
psutil = pytest.importorskip("psutil")

from tests.e2e.cluster import LiveCluster  # noqa: E402
from tests.long import long  # noqa: E402
from tests.ray_hosts import IP, Hosts, Network, why_not  # noqa: E402

EPOCHS = 40
STEP_S = 0.2  # the job lasts for longer than the story, unless it is told to hurry
SUMS = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
x = torch.tensor([1.0 + dist.get_rank()])
dist.all_reduce(x)
assert int(x) == 6
names = "MASTER_ADDR", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "POLLUX_URL"
print("found", os.uname().nodename, *(os.environ[name] for name in names), flush=True)
dist.destroy_process_group()
"""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    if reason := why_not():
        pytest.skip(reason)
    with contextlib.ExitStack() as stack:
        hosts = Hosts(tmp_path, Network(stack, ("north", "south", "east")))
        stack.callback(hosts.close)
        for host in hosts.network.addresses:
            hosts.add(host)
        yield hosts


def connections(network: Network, host: str, pid: int) -> list[tuple[str, str]]:
    """Of a process, established: its own address and the other's, without ports."""
    listing = [IP, "netns", "exec", network.namespace(host), "ss", "-Htnp", "state", "established"]
    printed = subprocess.run(listing, capture_output=True, text=True, timeout=20, check=True).stdout
    found = []
    for line in printed.splitlines():
        if f"pid={pid}," in line:
            ends = (word.rpartition(":")[0].strip("[]").removeprefix("::ffff:") for word in line.split()[2:4])
            found.append((next(ends), next(ends)))
    return found


def replicas_by_node(live: LiveCluster, name: str) -> dict[str, int]:
    """Where the members are -> their pids."""
    replicas = live.client.job(name).describe().replicas
    return {replica.node: replica.pid for replica in replicas if replica.state == "member"}


def check_fixed_job(live: LiveCluster, network: Network) -> None:
    """torchrun's variables lead every replica to the first one's host; the interface is that of its own node."""
    (live.folder / "sums.py").write_text(SUMS)
    job = live.submit(live.folder / "sums.py", name="sums", replicas=3)
    assert job.wait(90.0) == "succeeded", live.story("sums")
    live.until(lambda: len(found_in(live)) == 3, "what the replicas found")
    assert {row[0] for row in found_in(live)} == set(network.addresses)
    masters = {row[1] for row in found_in(live)}
    assert len(masters) == 1
    assert masters <= set(network.addresses.values())
    for host, _, gloo, nccl, url in found_in(live):
        assert gloo == nccl == f"net-{host}"
        assert url.startswith(f"http://{network.addresses['north']}:")


def found_in(live: LiveCluster) -> list[list[str]]:
    """Logs of all hosts are in the data directory."""
    lines = [line for path in live.data.glob("jobs/sums/logs/*/*.out") for line in path.read_text().splitlines()]
    return [line.split()[1:] for line in lines if line.startswith("found ")]


def check_connections(live: LiveCluster, network: Network, name: str) -> None:
    """Each replica is connected with all others, from its host's address to theirs and to nobody else."""
    addresses = set(network.addresses.values())

    def are_complete() -> bool:
        by_node = replicas_by_node(live, name)
        others_of = {}
        for host, pid in by_node.items():
            seen = connections(network, host, pid)
            assert all(mine == network.addresses[host] and other in addresses for mine, other in seen), (
                f"{host}: {seen}"
            )
            others_of[host] = {other for _, other in seen}
        return len(by_node) == 3 and all(
            addresses - {network.addresses[host]} <= others for host, others in others_of.items()
        )

    live.until(are_complete, "connections between all hosts")


def stale_checkpoints(live: LiveCluster, name: str, generation: int, since: float) -> list[str]:
    """Those that an earlier generation has saved after that time."""
    found = []
    for path in live.data.glob(f"jobs/{name}/checkpoints/step-*/manifest.json"):
        with contextlib.suppress(OSError):  # old ones are removed
            info = json.loads(path.read_text())["info"]
            if info["created_s"] > since and info["generation"] < generation:
                found.append(path.parent.name)
    return found


@long
def test_hosts_talk_by_their_addresses_and_a_cut_one_is_lost(hosts: Hosts, tmp_path: Path) -> None:
    network = hosts.network
    with network.inside("north"):
        # As somebody types it who sits at the head: its nodes and replicas must hear of an address all the same.
        address = f"127.0.0.1:{hosts.port}"
        live = LiveCluster(tmp_path, engine="ray", address=address, slots=None, policy="equal")
        try:
            live.start()
            check_fixed_job(live, network)
            job = live.submit_ledger("wide", epochs=EPOCHS, step_s=STEP_S)
            live.until(lambda: len(live.pids("wide")) == 3, "a replica on each host")
            check_connections(live, network, "wide")
            before = replicas_by_node(live, "wide")
            cut_at = check_cut_host(live, network, before)
            check_return(live, hosts, before, cut_at)
            live.hurry("wide")
            assert job.wait(90.0) == "succeeded", live.story("wide")
            live.check_ledger("wide", epochs=EPOCHS)
        finally:
            live.stop()


def check_cut_host(live: LiveCluster, network: Network, before: dict[str, int]) -> float:
    """The others go on, in place; when they did."""
    network.cut("east")
    live.until(
        lambda: {node.name for node in live.client.nodes() if node.health == "ok"} == {"north", "south"},
        "the loss is seen",
    )
    live.until(lambda: set(replicas_by_node(live, "wide")) == {"north", "south"}, "two members")
    now = time.time()
    trace = trace_of(live, before["north"])
    live.until(lambda: float(last_line(trace)[0]) > now, "a step without the lost one")
    after = replicas_by_node(live, "wide")
    assert after == {host: before[host] for host in ("north", "south")}
    return now


def check_return(live: LiveCluster, hosts: Hosts, before: dict[str, int], cut_at: float) -> None:
    """Who was given up steps, saves and reports no more, and ends; the host is used again, as a new node."""
    generation = int(last_line(trace_of(live, before["north"]))[2])
    hosts.network.mend("east")
    stale: list[str] = []

    def is_gone() -> bool:
        stale.extend(stale_checkpoints(live, "wide", generation, cut_at))
        return not psutil.pid_exists(before["east"])

    live.until(is_gone, "the end of the replica that was given up")
    assert not stale
    assert float(last_line(trace_of(live, before["east"]))[0]) < cut_at
    hosts.nodes["east"].kill()
    hosts.add("east")
    live.until(lambda: len(replicas_by_node(live, "wide")) == 3, "the host is used again")
    check_connections(live, hosts.network, "wide")
    now = replicas_by_node(live, "wide")
    assert {host: now[host] for host in ("north", "south")} == {host: before[host] for host in ("north", "south")}


def trace_of(live: LiveCluster, pid: int) -> Path:
    return live.folder / "wide-trace" / str(pid)


def last_line(path: Path) -> list[str]:
    """Of a trace: the time, the step, the generation and more."""
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")][-1].split()
