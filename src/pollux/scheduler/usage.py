"""What users have used lately, and the shares that come of it: :mod:`pollux.scheduler.quotas` asks for them.

Shares make the weights: slots are divided by team, then by user, then by job. A team or user that has used much lately
counts for less (2^(-usage/entitlement), as Slurm's fair-share factor); usage decays with a half-life.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from pollux.scheduler.shares import Entitlements, Quota
from pollux.types import JobView

HALF_LIFE_S = 7 * 86400.0
_SHARE_STEP = 0.1  # of the logarithm: smaller changes of a share are no reason to decide anew
_LEAST_FACTOR = 2.0**-4  # of heavy use: nothing starves for what its team did last week


class Usage:
    """Slot-seconds by user, which halve with every half-life."""

    def __init__(self, half_life_s: float = HALF_LIFE_S) -> None:
        self._half_life_s, self._at = half_life_s, 0.0
        self._by_user: dict[str, float] = {}

    def recall(self, used: Iterable[tuple[str, float, float]], now: float) -> None:
        """From what was recorded: owner, slot-seconds, and when."""
        self._at, self._by_user = now, {}
        for owner, slot_s, at in used:
            kept = slot_s * self._kept(max(now - at, 0.0))
            self._by_user[owner] = self._by_user.get(owner, 0.0) + kept

    def account(self, now: float, held: Iterable[tuple[str, int]]) -> None:
        """``held``: owner and slots of each job since the last call."""
        elapsed_s, self._at = max(now - self._at, 0.0), now
        if elapsed_s == 0:
            return
        kept = self._kept(elapsed_s)
        for owner in self._by_user:
            self._by_user[owner] *= kept
        for owner, num_slots in held:
            self._by_user[owner] = self._by_user.get(owner, 0.0) + num_slots * elapsed_s

    def of(self, owner: str) -> float:
        return self._by_user.get(owner, 0.0)

    def _kept(self, elapsed_s: float) -> float:
        return float(2.0 ** (-elapsed_s / self._half_life_s))


def with_shares(jobs: tuple[JobView, ...], entitled: Entitlements, usage: Usage) -> tuple[JobView, ...]:
    """Jobs with what their owner is entitled to: of all slots, by team, then by user, in equal shares of all jobs."""
    if not entitled.teams:
        return jobs
    owners = dict.fromkeys(job.spec.owner for job in jobs)
    teams: dict[str, list[str]] = {}
    for owner in owners:
        teams.setdefault(entitled.team_of(owner), []).append(owner)
    by_team = _divided(
        {name: entitled.teams.get(name, Quota()).weight for name in teams},
        {name: sum(usage.of(owner) for owner in members) for name, members in teams.items()},
    )
    share: dict[str, float] = {}
    for name, members in teams.items():
        quotas = {one: entitled.users[one].quota if one in entitled.users else Quota() for one in members}
        inside = _divided({one: quota.weight for one, quota in quotas.items()}, {one: usage.of(one) for one in members})
        for owner, part in inside.items():
            exact = len(jobs) * by_team[name] * part
            share[owner] = math.exp(round(math.log(max(exact, 1e-9)) / _SHARE_STEP) * _SHARE_STEP)
    return tuple(replace(job, share=share[job.spec.owner]) for job in jobs)


def _divided(weights: Mapping[str, float], used: Mapping[str, float]) -> dict[str, float]:
    """Shares that add up to 1, by weight, less for those that have used more than their part."""
    total, total_used = sum(weights.values()), sum(used.values())
    worth = {}
    for name, weight in weights.items():
        over = used[name] / total_used / (weight / total) if total_used > 0 else 0.0
        worth[name] = weight * max(2.0**-over, _LEAST_FACTOR)
    whole = sum(worth.values())
    return {name: value / whole for name, value in worth.items()}
