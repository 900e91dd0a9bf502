"""What is told: one notice of a job's end or of the cluster's state, as JSON and as text."""

from __future__ import annotations

import json
import uuid
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Literal

Event = Literal["job.succeeded", "job.failed", "job.cancelled", "job.held", "cluster.alert", "cluster.resolved"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """``at``: seconds since 1970. ``owner``: "" for the operator, and for what is no job's."""

    event: Event
    at: float
    cluster: str  # the server's URL
    text: str  # why, in one line or several
    job: str = ""
    owner: str = ""
    exit_code: int | None = None
    running_s: float | None = None
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), allow_nan=False).encode()

    @property
    def subject(self) -> str:
        what = f"job {self.job} {self.event.partition('.')[2]}" if self.job else self.text.partition("\n")[0][:100]
        return " ".join(f"[pollux] {what}".split())

    @property
    def body(self) -> str:
        when = datetime.fromtimestamp(self.at, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
        facts = [f"event: {self.event}", f"time: {when}", f"cluster: {self.cluster}"]
        if self.job:
            facts += [f"job: {self.job}", f"owner: {self.owner or 'the operator'}"]
        if self.exit_code is not None:
            facts.append(f"exit code: {self.exit_code}")
        if self.running_s is not None:
            facts.append(f"ran for: {self.running_s:.0f} s")
        return "\n".join([*facts, "", self.text or "(no reason was told)", ""])
