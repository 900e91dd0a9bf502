"""The stream of changes: looks at the cluster once for all listeners, and tells each what is new to it.

:mod:`pollux.server.http.cluster_routes` streams its messages. Every row (a job, a node, a round, a sample) is kept,
also as JSON text, with the version in which it changed last; a listener says which version it has, and gets the rows
that are newer. Nothing is looked at without a listener, and at most every ``LOOK_EVERY_S``.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

from pollux.api.cluster import ClusterSample, ClusterSummary, NodeSummary
from pollux.api.job import JobRow
from pollux.api.round import RoundSummary
from pollux.server.http.errors import to_json

LOOK_EVERY_S = 0.5
NUM_ENDED, NUM_ROUNDS, NUM_SAMPLES = 100, 50, 360
SUMMARY_EVERY_S = 10.0  # for what grows all the time: hours, cost, share of time lost
NUM_REMEMBERED = 1000  # rows that are gone; a listener who missed more gets everything again


class Watched(Protocol):
    """What is asked of :class:`pollux.server.present.queries.Queries`."""

    def summary(self) -> ClusterSummary: ...
    def nodes(self) -> list[NodeSummary]: ...
    def rounds(self, since: int | None, limit: int) -> list[RoundSummary]: ...
    def active_rows(self) -> dict[str, JobRow]: ...
    def row(self, name: str) -> JobRow: ...
    def last_ended(self, limit: int) -> list[str]: ...
    def samples_after(self, id_: int) -> list[tuple[int, ClusterSample]]: ...
    def last_sample_id(self) -> int: ...


Row = JobRow | NodeSummary


class Rows:
    """By name, each with the version in which it came to be what it is, and as text."""

    def __init__(self) -> None:
        self._rows: dict[str, tuple[int, Row, str]] = {}
        self._gone: deque[tuple[int, str]] = deque(maxlen=NUM_REMEMBERED)

    def put(self, version: int, rows: Mapping[str, Row]) -> bool:
        """Take all of ``rows``, and nothing else; whether that changed anything."""
        changed = False
        for name, row in rows.items():
            known = self._rows.get(name)
            if known is None or known[1] != row:
                self._rows[name] = version, row, to_json(row)
                changed = True
        for name in [name for name in self._rows if name not in rows]:
            del self._rows[name]
            self._gone.append((version, name))
            changed = True
        return changed

    def since(self, version: int) -> str:
        """As a JSON list."""
        return f"[{','.join(text for changed, _, text in self._rows.values() if changed > version)}]"

    def gone_since(self, version: int) -> list[str]:
        names = {name for went, name in self._gone if went > version}
        return sorted(name for name in names if name not in self._rows)

    @property
    def forgot(self) -> int:
        """Up to which version it is not known any more what went."""
        return self._gone[0][0] if len(self._gone) == NUM_REMEMBERED else 0


class Tail:
    """The newest of what only comes, each with its id, as text, and the version in which it came."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._entries: deque[tuple[int, int, str]] = deque()
        self.forgot = 0  # up to which version something came that is not here any more

    @property
    def last_id(self) -> int | None:
        return self._entries[-1][1] if self._entries else None

    def add(self, version: int, id_: int, text: str) -> None:
        self._entries.append((version, id_, text))
        if len(self._entries) > self._length:
            self.forgot = max(self.forgot, self._entries.popleft()[0])

    def since(self, version: int) -> str:
        """As a JSON list."""
        return f"[{','.join(text for came, _, text in self._entries if came > version and text)}]"


class Feed:
    """Any thread may ask."""

    def __init__(self, cluster: Watched, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._cluster, self._monotonic = cluster, monotonic
        self._turn = threading.Lock()
        self._version = 0
        self._looked_at = -LOOK_EVERY_S
        self._at = 0.0
        self._jobs, self._nodes = Rows(), Rows()
        self._ended: dict[str, JobRow] = {}  # rows of jobs that are over: they do not change
        self._rounds, self._samples = Tail(NUM_ROUNDS), Tail(NUM_SAMPLES)
        self._summary: tuple[int, str] = 0, "null"
        self._seen: ClusterSummary | None = None  # of the summary what does not change by itself
        self._summed_at = -SUMMARY_EVERY_S
        self._told: dict[int, str] = {}  # the message for those who have this version; most have the same

    def message(self, version: int) -> tuple[int, str | None]:
        """What is new to a listener that has ``version`` (0: none yet), and the version it has then; None: nothing."""
        with self._turn:
            if self._monotonic() - self._looked_at >= LOOK_EVERY_S:
                self._look()
            if version == self._version and version > 0:
                return version, None
            if version not in self._told:
                self._told[version] = self._difference(version)
            return self._version, self._told[version]

    def _look(self) -> None:
        now, version = self._monotonic(), self._version + 1
        summary = self._cluster.summary()
        active = self._cluster.active_rows()
        changes = [
            self._jobs.put(version, {**self._ended_rows(active), **active}),
            self._nodes.put(version, {node.name: node for node in self._cluster.nodes()}),
            self._add_rounds(version),
            self._add_samples(version),
        ]
        sizing = dataclasses.replace(summary.sizing, node_hours={}, cost=None, utility=None)
        seen = dataclasses.replace(summary, now=0.0, lost_share=None, sizing=sizing)
        if seen != self._seen or now - self._summed_at >= SUMMARY_EVERY_S:
            self._seen, self._summed_at = seen, now
            self._summary = version, to_json(summary)
            changes.append(True)
        self._looked_at, self._at = now, summary.now
        if any(changes):
            self._version, self._told = version, {}

    def _ended_rows(self, active: Mapping[str, JobRow]) -> dict[str, JobRow]:
        names = [name for name in self._cluster.last_ended(NUM_ENDED) if name not in active]
        self._ended = {name: self._ended.get(name) or self._cluster.row(name) for name in names}
        return self._ended

    def _add_rounds(self, version: int) -> bool:
        since = self._rounds.last_id
        rounds = self._cluster.rounds(since, NUM_ROUNDS)
        if len(rounds) == NUM_ROUNDS and since is not None:  # the last look was long ago: the newest are wanted
            first, rounds = rounds[0].id, self._cluster.rounds(None, NUM_ROUNDS)
            if rounds[0].id != first:
                self._rounds.forgot = version
        for round_ in rounds:
            self._rounds.add(version, round_.id, to_json(round_))
        return bool(rounds)

    def _add_samples(self, version: int) -> bool:
        if self._version == 0:  # those of before are asked for apart
            self._samples.add(version, self._cluster.last_sample_id(), "")
            return True
        samples = self._cluster.samples_after(self._samples.last_id or 0)
        for id_, sample in samples:
            self._samples.add(version, id_, to_json(sample))
        return bool(samples)

    def _difference(self, version: int) -> str:
        forgot = max(kept.forgot for kept in (self._jobs, self._nodes, self._rounds, self._samples))
        is_full = version == 0 or version > self._version or version < forgot
        version = 0 if is_full else version
        parts = {
            "at": to_json(self._at),
            "is_full": to_json(is_full),
            "cluster": self._summary[1] if self._summary[0] > version else "null",
            "jobs": self._jobs.since(version),
            "gone_jobs": to_json([] if is_full else self._jobs.gone_since(version)),
            "nodes": self._nodes.since(version),
            "gone_nodes": to_json([] if is_full else self._nodes.gone_since(version)),
            "rounds": self._rounds.since(version),
            "samples": self._samples.since(self._version if is_full else version),
        }
        return "{" + ",".join(f'"{name}":{text}' for name, text in parts.items()) + "}"
