"""Which node agents have been silent for too long. :class:`~pollux.engines.ray.nodes.NodeAgents` asks.

Ray's own health checks end a node for good when they are wrong, so they have to be patient. An agent answers twice a
second (it is asked for its events, and answers after ``BEAT_S`` if there are none), so its silence tells sooner that a
node is frozen or cut off, and a wrong alarm costs a restart of its replicas alone. Time that the caller itself was
stalled for does not count. Pure: time arrives as ``now``.
"""

from __future__ import annotations

BEAT_S = 0.5
LOST_AFTER_S = 2.0
STALL_S = 0.5  # between two looks; they are some 0.05 s apart


class Heartbeats:
    def __init__(self, lost_after_s: float = LOST_AFTER_S) -> None:
        self.lost_after_s = lost_after_s
        self._heard: dict[str, float] = {}  # by Ray's id of the node
        self._looked_at: float | None = None

    def hear(self, node_id: str, now: float) -> float:
        """Its first word, or another one. For how long it had been silent."""
        silent_s = now - self._heard.get(node_id, now)
        self._heard[node_id] = now
        return silent_s

    def forget(self, node_id: str) -> None:
        self._heard.pop(node_id, None)

    def silent(self, now: float) -> list[str]:
        """Nodes to be given up. Ask often."""
        before, self._looked_at = self._looked_at, now
        if before is not None and now - before > STALL_S:
            self._heard = {node_id: min(at + now - before, now) for node_id, at in self._heard.items()}
        return [node_id for node_id, at in self._heard.items() if now - at > self.lost_after_s]
