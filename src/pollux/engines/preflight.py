"""Looks at a node before jobs do: interpreter, packages, script, storage, GPUs, clock, disk, way to the server.

``pollux nodes --check`` asks for it. The local engine runs :func:`preflight` itself, the agents of a Ray cluster run it
on their nodes; :func:`concluded` compares what they say.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import shutil
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from pollux.api.cluster import CheckedNode, NodeFinding
from pollux.engines.processes.gpus import find_gpus
from pollux.engines.ray.storage_probe import storage_problem
from pollux.engines.transport import Message
from pollux.version import __version__

LEAST_FREE_BYTES = 1 << 30
MOST_SKEW_S = 2.0
WORST_SKEW_S = 60.0  # above it a node gets no work: its replicas would take others' files for old ones
CONNECT_S = 3.0
ALWAYS = ("pollux-scheduler", "torch", "numpy")  # packages
COMPARED = ("python", "pollux", "package ")  # subjects that begin so must be alike on all nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRequest:
    """What is looked for besides the usual. ``server``: the URL that jobs report to."""

    script: str = ""
    packages: tuple[str, ...] = ()
    server: str = ""
    needs_gpu: bool = False

    def to_message(self) -> Message:
        return {**dataclasses.asdict(self), "packages": list(self.packages)}

    @classmethod
    def of(cls, message: Message) -> CheckRequest:
        return cls(**{**message, "packages": tuple(message["packages"])})


def preflight(asked: CheckRequest, probe: str | None) -> list[Message]:
    """What is found on this node, as rows of :class:`NodeFinding`. Takes seconds at most."""
    return [dataclasses.asdict(one) for one in _look(asked, probe)]


def _look(asked: CheckRequest, probe: str | None) -> Iterator[NodeFinding]:
    yield _fine("python", f"{platform.python_version()}, {sys.executable}")
    yield _fine("pollux", __version__)
    for package in dict.fromkeys((*ALWAYS, *asked.packages)):
        version = _version(package)
        if version is not None:
            yield _fine(f"package {package}", version)
        elif package in asked.packages:
            yield _problem(f"package {package}", "not installed")
    if asked.script:
        is_there = os.path.isfile(asked.script) and os.access(asked.script, os.R_OK)
        yield (_fine if is_there else _problem)("script", asked.script if is_there else f"{asked.script} is not there")
    if probe is not None:
        trouble = storage_problem(probe)
        yield _problem("storage", trouble) if trouble else _fine("storage", "can be read and written")
    gpus = [gpu.name for gpu in find_gpus()]
    counted = ", ".join(f"{number} {name}" for name, number in Counter(gpus).items())
    has_enough = bool(gpus) or not asked.needs_gpu
    yield (_fine if has_enough else _problem)("GPUs", counted or "none")
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    yield (_fine if free >= LEAST_FREE_BYTES else _problem)("disk", f"{free / 2**30:.1f} GiB free in {folder}")
    if asked.server:
        yield _way_to(asked.server)


def _way_to(url: str) -> NodeFinding:
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), timeout=CONNECT_S).close()
    except OSError as error:
        return _problem("server", f"{url} cannot be reached from here: {error.strerror or error}")
    return _fine("server", f"{url} can be reached")


def clock_finding(node_s: float, asked_s: float, answered_s: float) -> NodeFinding:
    """How far a node's clock is from ours; all in seconds since 1970. The way there and back is not counted."""
    told = _skew(node_s, asked_s, answered_s, MOST_SKEW_S)
    return _problem("clock", told) if told else _fine("clock", f"within {MOST_SKEW_S:g} s")


def clock_problem(node_s: float, asked_s: float, answered_s: float) -> str:
    """Why a node whose clock is far from ours gets no work; "" if it gets some."""
    told = _skew(node_s, asked_s, answered_s, WORST_SKEW_S, digits=0)
    return told and f"its clock is {told}"


def _skew(node_s: float, asked_s: float, answered_s: float, most_s: float, digits: int = 1) -> str:
    early, late = node_s - answered_s, asked_s - node_s
    skew = max(early, late, 0.0)
    side = "ahead" if early > late else "behind"
    return f"{skew:.{digits}f} s {side}: set it (chrony, ntpd)" if skew > most_s else ""


def concluded(found: Sequence[CheckedNode]) -> list[CheckedNode]:
    """The same, with what differs from most nodes marked as a problem."""
    seen: dict[str, Counter[str]] = {}
    for node in found:
        for one in node.findings:
            if one.subject.startswith(COMPARED) and one.state == "fine":
                seen.setdefault(one.subject, Counter())[one.found.partition(",")[0]] += 1
    usual = {subject: versions.most_common(1)[0][0] for subject, versions in seen.items()}

    def judged(one: NodeFinding) -> NodeFinding:
        most = usual.get(one.subject)
        if most is None or one.state == "problem" or one.found.partition(",")[0] == most:
            return one
        return _problem(one.subject, f"{one.found}; most nodes have {most}")

    nodes = []
    for node in found:
        told = {one.subject for one in node.findings}
        missing = [subject for subject in usual if subject not in told]
        has_answered = "python" in told
        lacks = [_problem(subject, f"not installed; most nodes have {usual[subject]}") for subject in missing]
        findings = (*map(judged, node.findings), *(lacks if has_answered else ()))
        nodes.append(dataclasses.replace(node, findings=findings))
    return nodes


def check_here(asked: CheckRequest, probe: str | None) -> tuple[NodeFinding, ...]:
    """Of this machine, whose clock is ours."""
    now = time.time()
    rows = preflight(asked, probe)
    return (*(NodeFinding(**row) for row in rows), clock_finding(now, now, now))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except (importlib.metadata.PackageNotFoundError, ValueError):  # also a name that can be none
        return None


def _fine(subject: str, found: str) -> NodeFinding:
    return NodeFinding(subject=subject, state="fine", found=found)


def _problem(subject: str, found: str) -> NodeFinding:
    return NodeFinding(subject=subject, state="problem", found=found)


def silent(name: str, why: str) -> CheckedNode:
    """A node that did not answer."""
    return CheckedNode(name=name, findings=(_problem("agent", why),))
