"""Counts the energy that jobs' GPUs take, and finds GPUs that a job holds and does not use.

The scheduler thread calls it every few seconds. Both need to know which slot a replica sits in: on Ray, where Ray picks
the GPU, jobs have no energy and no idle GPUs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pollux.api.cluster import SlotReading
from pollux.engines.live import LiveEngine
from pollux.reports import numbers
from pollux.scheduler.lifecycle import JobState
from pollux.scheduler.record import JobRecord
from pollux.server.live.job_table import JobTable

IDLE_S = 120.0  # a GPU that did nothing for so long is told of: a long evaluation on the CPU takes less, mostly
IDLE_UTILISATION = 0.02  # NVML counts whole per cents; a context alone has 0
LONGEST_LOOK_S = 30.0  # that counts: a reading of a machine that slept is not that of the time between


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleNote:
    """A job whose GPUs have become idle, in words for its history."""

    job: str
    text: str


class DeviceWatch:
    """Only the scheduler thread calls it."""

    def __init__(self, jobs: JobTable, engine: LiveEngine) -> None:
        self._jobs, self._engine = jobs, engine
        self._looked_at: float | None = None
        self._energy_j: dict[str, float] = {}  # by job, not taken yet
        self._idle_s: dict[tuple[str, str, int], float] = {}  # by job, node and slot

    def look(self, records: Iterable[JobRecord], now: float) -> list[IdleNote]:
        """Count the time since the last look; jobs whose GPUs have just become idle."""
        passed_s = 0.0 if self._looked_at is None else min(max(now - self._looked_at, 0.0), LONGEST_LOOK_S)
        self._looked_at, before, self._idle_s = now, self._idle_s, {}
        readings = {
            (node, slot.slot): slot for node, reading in self._engine.readings.items() for slot in reading.slots
        }
        notes = []
        for record in records:
            held = {
                (replica.node, replica.slot): readings[replica.node, replica.slot]
                for replica in (self._engine.replicas(record.name) if record.allocation and readings else ())
                if (replica.node, replica.slot) in readings
            }
            power_w = [slot.power_w for slot in held.values() if slot.power_w is not None]
            if power_w:
                self._energy_j[record.name] = self._energy_j.get(record.name, 0.0) + sum(power_w) * passed_s
            notes += self._see_idle(record, held, before, passed_s)
        return notes

    def _see_idle(
        self,
        record: JobRecord,
        held: Mapping[tuple[str, int], SlotReading],
        before: Mapping[tuple[str, str, int], float],
        passed_s: float,
    ) -> list[IdleNote]:
        job = self._jobs.get(record.name)
        if job is None:
            return []
        if record.state is not JobState.RUNNING:
            job.idle = ""
            return []
        idle: list[tuple[str, float]] = []
        for (node, slot), reading in held.items():
            if reading.utilisation is not None and reading.utilisation < IDLE_UTILISATION:
                place = record.name, node, slot
                self._idle_s[place] = before.get(place, 0.0) + passed_s
                if self._idle_s[place] >= IDLE_S:
                    idle.append((f"GPU {slot} of {node}", self._idle_s[place]))
        has_been = bool(job.idle)
        job.idle = "; ".join(f"{name} has done nothing for {numbers.duration(idle_s)}" for name, idle_s in idle)
        return [IdleNote(job=record.name, text=f"idle: {job.idle}")] if idle and not has_been else []

    def take_energy(self) -> dict[str, float]:
        """Joules since this was asked last, by job."""
        taken, self._energy_j = self._energy_j, {}
        return taken

    def put_back(self, energy_j: Mapping[str, float]) -> None:
        """They could not be saved."""
        for job, joules in energy_j.items():
            self._energy_j[job] = self._energy_j.get(job, 0.0) + joules
