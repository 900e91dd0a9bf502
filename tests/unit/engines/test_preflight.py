"""What is found on a node, here and compared with others."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

pytest.importorskip("psutil")

from pollux.api.cluster import CheckedNode, NodeFinding
from pollux.engines import preflight as module
from pollux.engines.preflight import CheckRequest, check_here, clock_finding, clock_problem, concluded, silent
from pollux.engines.ray.storage_probe import write_probe


def problems(asked: CheckRequest, probe: str | None = None) -> dict[str, str]:
    return {one.subject: one.found for one in check_here(asked, probe) if one.state == "problem"}


def test_a_node_that_has_everything_has_no_problem(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        asked = CheckRequest(script=str(script), packages=("numpy",), server=url)
        found = check_here(asked, write_probe(str(tmp_path / "storage"), "x"))
    assert {one.state for one in found} == {"fine"}, found
    subjects = {"python", "pollux", "package numpy", "script", "storage", "GPUs", "disk", "server", "clock"}
    assert subjects <= {one.subject for one in found}


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_FREE_BYTES", 1 << 60)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        closed = f"http://127.0.0.1:{listener.getsockname()[1]}"
    asked = CheckRequest(script="/no/such.py", packages=("no-such-package",), server=closed, needs_gpu=True)
    found = problems(asked, str(tmp_path / "none" / ".pollux-x"))
    assert set(found) >= {"script", "package no-such-package", "storage", "disk", "server"}
    assert "/no/such.py" in found["script"] and "does not see the storage" in found["storage"]
    assert "cannot be reached" in found["server"]


@pytest.mark.parametrize(
    ("node_s", "state", "says"), [(101.0, "fine", ""), (90.0, "problem", "10.0 s behind"), (109.0, "problem", "ahead")]
)
def test_a_skewed_clock_is_seen_through_the_time_of_the_answer(node_s: float, state: str, says: str) -> None:
    found = clock_finding(node_s, asked_s=100.0, answered_s=102.0)
    assert found.state == state and says in found.found


def node(name: str, **versions: str) -> CheckedNode:
    rows = [NodeFinding(subject=f"package {package}", state="fine", found=text) for package, text in versions.items()]
    return CheckedNode(name=name, findings=(NodeFinding(subject="python", state="fine", found="3.11, /bin/p"), *rows))


def test_what_differs_from_most_nodes_is_a_problem() -> None:
    given = [
        node("a", torch="2.1"),
        node("b", torch="2.1"),
        node("c", torch="2.0"),
        node("d"),
        silent("e", "no answer"),
    ]
    found = {one.name: [row.found for row in one.findings if row.state == "problem"] for one in concluded(given)}
    assert found["a"] == found["b"] == []
    assert found["c"] == ["2.0; most nodes have 2.1"]
    assert found["d"] == ["not installed; most nodes have 2.1"]
    assert found["e"] == ["no answer"]


@pytest.mark.parametrize(
    ("node_s", "says"),
    [(101.0, ""), (150.0, ""), (50.0, ""), (402.0, "its clock is 300 s ahead"), (20.0, "its clock is 80 s behind")],
)
def test_a_node_whose_clock_is_far_off_gets_no_work(node_s: float, says: str) -> None:
    found = clock_problem(node_s, asked_s=100.0, answered_s=102.0)
    assert found.startswith(says) and bool(found) == bool(says)
