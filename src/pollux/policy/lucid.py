"""Lucid: packing by share scores and a priority that can be read (Hu et al., ASPLOS'23).

Rules taken from the paper and its artifact: jobs get the GPUs they ask for and are never preempted, moved or resized.
Waiting jobs go in order of estimated GPU time (duration times GPUs), the least first, and any that fits may start.
While the queue is long, a job first looks for a mate: a running job that is alone, uses as many GPUs (no more than a
server's 8), and whose share score (tiny 0, medium 1, jumbo 2) adds up to 2 at most with its own. A job that is
estimated at more than twice the mate's GPU time is not packed. While the queue is short nothing is packed, and
no job overtakes another.

Simplifications: the stage in which jobs are profiled on a few GPUs is left out; the oracle or the fitted model says
how busy a job keeps its GPUs. Share scores are steps of that load instead of a decision tree over GPU counters, GPU
time is the mean of what earlier jobs of the same application took instead of an additive model, and the length of
the queue replaces a forecast of the cluster's load.
"""

from __future__ import annotations

from statistics import median

from pollux.policy.base import Policy, PolicySettings
from pollux.policy.floor import Floor
from pollux.policy.gangs import demand
from pollux.types import JobView, Plan, Snapshot

# Loads below which a job is tiny, medium. On the OSDI'21 workloads 6 and 1, average JCTs are 4 % higher with 0.5 for
# medium, 2 % with 0.9, and about the same with 0.2 or 0.5 for tiny.
TINY, MEDIUM = 0.35, 0.7
MAX_SCORE = 2  # of two jobs together, as in the artifact
MAX_PACKED = 8  # replicas of a packed job, as in the artifact: a server's GPUs
# Waiting jobs up to which nothing is packed, in place of the paper's load forecast; chosen by hand. Packing always
# would lower the average JCT of the OSDI'21 workloads by 8 %, packing from 8 on by 1 %.
SHORT_QUEUE = 3
MATE_FACTOR = 2.0  # how many times its mate's GPU time a packed job may take, as in the artifact
MAX_KNOWN = 2048  # applications that are remembered, the latest; bounds memory


class LucidPolicy(Policy):
    name = "lucid"
    settings_read = frozenset()
    adapts_batch = False
    shares_slots = True

    def __init__(self, settings: PolicySettings) -> None:
        self.reset()

    def reset(self) -> None:
        self._seen: dict[str, tuple[str, float]] = {}  # by job: family, GPU-seconds so far
        self._finished: dict[str, tuple[int, float]] = {}  # by family: jobs, GPU-seconds of all; latest last
        self._means: dict[str, float] = {}  # by family: GPU-seconds of a job
        self._usual = 0.0  # of an application that is new

    def decide(self, snapshot: Snapshot) -> Plan:
        self._learn(snapshot)
        floor = Floor(snapshot, rank=score)
        queue = sorted(floor.waiting, key=self._estimate)  # stable: ties by submission
        packs = len(queue) > SHORT_QUEUE
        while True:  # a job that started in one pass may be a mate in the next
            started = set()
            for job in queue:
                mate = self._mate(floor, job) if packs else None
                if mate is not None:
                    floor.join(job.name, mate, demand(job))
                elif not floor.place(job, demand(job)):
                    if packs:
                        continue
                    break
                started.add(job.name)
            queue = [job for job in queue if job.name not in started]
            if not started or not packs:
                return floor.plan()

    def _mate(self, floor: Floor, job: JobView) -> str | None:
        count, estimate = demand(job), self._estimate(job)
        if count > MAX_PACKED:
            return None
        hosts = floor.hosts_for(job, count, _may_share, of_same_size=True)
        return next((name for name in hosts if estimate <= MATE_FACTOR * self._estimate(floor.jobs[name])), None)

    def _learn(self, snapshot: Snapshot) -> None:
        """Jobs that are gone have ended, with about the GPU time that was seen last."""
        there = {job.name: job for job in snapshot.jobs}
        for name, (application, gpu_s) in self._seen.items():
            if name not in there:
                number, total = self._finished.pop(application, (0, 0.0))
                self._finished[application] = (number + 1, total + gpu_s)
        while len(self._finished) > MAX_KNOWN:
            del self._finished[next(iter(self._finished))]
        self._means = {application: total / number for application, (number, total) in self._finished.items()}
        self._usual = median(self._means.values()) if self._means else 0.0
        self._seen = {
            name: (job.spec.family, job.attained_s * demand(job)) for name, job in there.items() if job.attained_s > 0
        }

    def _estimate(self, job: JobView) -> float:
        """GPU-seconds that a job takes; the median of the applications if its own is new, 0 if all are."""
        return self._means.get(job.spec.family, self._usual)


def score(load: float) -> int:
    """How much of a GPU a job takes up: 0 tiny, 1 medium, 2 jumbo."""
    return 0 if load < TINY else 1 if load < MEDIUM else 2


def _may_share(load: float, other: float) -> bool:
    return score(load) + score(other) <= MAX_SCORE
