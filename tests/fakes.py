"""An engine that takes its time, and a clock set by hand: for testing the loop without a simulator."""

from __future__ import annotations

from collections.abc import Sequence

from pollux.scheduler.lifecycle import JobState
from pollux.scheduler.ports import (
    Command,
    Event,
    JobEnded,
    JobLost,
    JobRuns,
    JobStopped,
    NodesChanged,
    ResizeJob,
    StartJob,
    StopJob,
)
from pollux.types import Allocation, Node, slots_in_use


class HandClock:
    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def wait_until(self, deadline: float) -> None:
        self.time = max(self.time, deadline)


class SlowEngine:
    """Commands are under way until :meth:`finish` is called; slots are really taken and really given back."""

    applies_at_once = False

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.node_list = list(nodes)
        self.held: dict[str, list[Allocation]] = {}  # what a job occupies: old and new while it resizes
        self.commands: list[Command] = []
        self.under_way: list[Command] = []
        self.events: list[Event] = []

    def nodes(self) -> Sequence[Node]:
        return list(self.node_list)

    def apply(self, commands: Sequence[Command]) -> None:
        self.commands.extend(commands)
        for command in commands:
            if isinstance(command, StartJob):
                assert command.job not in self.held
                self.held[command.job] = [command.allocation]
            elif isinstance(command, ResizeJob):
                self.held[command.job].append(command.allocation)
            elif not isinstance(command, StopJob):
                continue
            self.under_way.append(command)
        self.check_capacity()

    def check_capacity(self) -> None:
        """Nobody may be sent to slots that somebody else has not left yet."""
        occupied: dict[str, int] = {}
        for allocations in self.held.values():
            for node in {node for allocation in allocations for node, _ in allocation.shares}:
                most = max(slots_in_use([allocation]).get(node, 0) for allocation in allocations)
                occupied[node] = occupied.get(node, 0) + most
        for known in self.node_list:
            assert occupied.get(known.name, 0) <= known.num_slots, f"{known.name} is over-committed: {occupied}"

    def finish(self) -> None:
        """Everything under way gets done."""
        done, self.under_way = self.under_way, []
        for command in done:
            if isinstance(command, StopJob):
                del self.held[command.job]
                self.events.append(JobStopped(job=command.job))
            elif isinstance(command, StartJob | ResizeJob):
                self.held[command.job] = self.held[command.job][-1:]
                self.events.append(JobRuns(job=command.job, generation=command.generation))

    def end(self, job: str, at: float, state: JobState = JobState.SUCCEEDED) -> None:
        del self.held[job]
        self.under_way = [command for command in self.under_way if command.job != job]
        self.events.append(JobEnded(job=job, state=state, at=at))

    def lose(self, *names: str) -> None:
        """Nodes are gone: their jobs go on with the replicas they have elsewhere, or are lost."""
        self.node_list = [node for node in self.node_list if node.name not in names]
        self.events.append(NodesChanged())
        for job, allocations in list(self.held.items()):
            left = [
                Allocation(tuple(share for share in allocation.shares if share.node not in names))
                for allocation in allocations
            ]
            if left[-1]:
                self.held[job] = left
            else:
                del self.held[job]
                self.under_way = [command for command in self.under_way if command.job != job]
                self.events.append(JobLost(job=job, reason=f"lost with {', '.join(names)}"))

    def poll(self) -> Sequence[Event]:
        events, self.events = self.events, []
        return events
