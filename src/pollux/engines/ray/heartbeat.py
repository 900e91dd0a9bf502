"""Which node agents have been silent for too long. :class:`~pollux.engines.ray.nodes.NodeAgents` asks.

Ray's own health checks end a node for good when they are wrong, so they have to be patient. An agent answers twice a
second (it is asked for its events, and answers after ``BEAT_S`` if there are none), so its silence tells sooner that a
node is frozen or cut off, and a wrong alarm costs a restart of its replicas alone.

A node may also just have too little CPU, or the caller may. Three things keep these from being taken for lost. Silence
counts from the question, not from the last answer. Of the time between two looks of the caller only ``LOOK_S`` count:
in the rest the caller did not run. And a node that answered late within the last ``LATE_FOR_S`` seconds is given more
time, ``PATIENCE`` times as long as it was late, and ``MOST_MORE`` of ``lost_after_s`` at most: too little CPU begins
with late answers, a loss does not. Pure: time arrives as ``now``.
"""

from __future__ import annotations

import math

BEAT_S = 0.5
LOST_AFTER_S = 2.0
LOOK_S = 0.25  # two looks are some 0.05 s apart
LATE_S = 0.25  # an answer that takes BEAT_S and no more than this is on time
LATE_FOR_S = 30.0
PATIENCE, MOST_MORE = 3.0, 0.75


class Heartbeats:
    def __init__(self, lost_after_s: float = LOST_AFTER_S) -> None:
        self.lost_after_s = lost_after_s
        self._asked: dict[str, float] = {}  # by Ray's id of the node: since when there is no answer
        self._late: dict[str, tuple[float, float]] = {}  # the latest answer of late, and until when it counts
        self._looked_at: float | None = None

    def ask(self, node_id: str, now: float) -> None:
        """An answer is due from now on, if it was not before."""
        self._asked.setdefault(node_id, now)

    def hear(self, node_id: str, now: float) -> float:
        """An answer. How long it took."""
        silent_s = now - self._asked.pop(node_id, now)
        late_s = silent_s - BEAT_S - LATE_S
        before_s, ends_at = self._late.get(node_id, (0.0, -math.inf))
        if late_s > 0.0 and (late_s >= before_s or now > ends_at):
            self._late[node_id] = late_s, now + LATE_FOR_S
        return silent_s

    def forget(self, node_id: str) -> None:
        self._asked.pop(node_id, None)
        self._late.pop(node_id, None)

    def silent(self, now: float) -> list[str]:
        """Nodes to be given up. Ask often, and hear before what has been answered."""
        before, self._looked_at = self._looked_at, now
        if before is not None and (stalled_s := now - before - LOOK_S) > 0.0:
            self._asked = {node_id: min(at + stalled_s, now) for node_id, at in self._asked.items()}
        return [node_id for node_id, at in self._asked.items() if now - at > self._patience_s(node_id, now)]

    def _patience_s(self, node_id: str, now: float) -> float:
        late_s, ends_at = self._late.get(node_id, (0.0, -math.inf))
        more_s = PATIENCE * late_s if now < ends_at else 0.0
        return self.lost_after_s + min(more_s, MOST_MORE * self.lost_after_s)
