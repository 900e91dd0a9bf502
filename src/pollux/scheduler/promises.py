"""Slots that are promised to teams and users, beside jobs that must not be moved: :mod:`.quotas` asks it.

A job that must not be moved gives nothing back. It may start only where all guarantees can still be met afterwards:
those of other teams, and those of its owner's colleagues.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pollux.scheduler.shares import ANY_TYPE, Entitlements, Quota

Counts = dict[str, int]  # slots by accelerator type
_NONE = Quota()


class Promises:
    """What is held for good, and whether more fits beside the guarantees and under the limits.

    A group needs what it holds for good, or what it is guaranteed, whichever is more. The needs of all teams together
    may not exceed the cluster. Those that do already, as the cluster has shrunk, may not grow.
    """

    def __init__(self, entitled: Entitlements, slots: Mapping[str, int]) -> None:
        """``slots``: of the cluster, by accelerator type."""
        self._entitled, self._slots = entitled, slots
        self._members: dict[str, list[str]] = {team: [] for team in entitled.teams}
        for user, member in entitled.users.items():
            self._members.setdefault(member.team, []).append(user)
        self._held: dict[str, Counts] = {}  # by user
        self._needs = {team: self._need_of_team(team, {}) for team in entitled.teams}
        self._totals = _sum(self._needs.values())
        self._known: dict[tuple[str, str, int], str] = {}

    def add(self, owner: str, kind: str, count: int) -> None:
        """A job of ``owner`` holds ``count`` slots of this type and cannot be moved."""
        self._held[owner] = _sum([self._held.get(owner, {}), {kind: count}])
        team = self._entitled.team_of(owner)
        if owner not in (members := self._members.setdefault(team, [])):
            members.append(owner)
        self._needs[team] = self._need_of_team(team, {})
        self._totals = _sum(self._needs.values())
        self._known.clear()

    def why_not(self, owner: str, kind: str, count: int) -> str:
        """What keeps ``count`` more slots of a type from being held for good by ``owner``; empty: nothing does."""
        key = (owner, kind, count)
        if key not in self._known:
            self._known[key] = self._why_not(*key)
        return self._known[key]

    def _why_not(self, owner: str, kind: str, count: int) -> str:
        team = self._entitled.team_of(owner)
        own = _sum([self._held.get(owner, {}), {kind: count}])
        others = [self._held.get(user, {}) for user in self._members.get(team, ()) if user != owner]
        for title, quota, held in (
            (f"user {owner}", self._quota_of(owner), own),
            (f"team {team}", self._entitled.teams.get(team, _NONE), _sum([own, *others])),
        ):
            for limited, most in quota.limit.items():
                if (sum(held.values()) if limited == ANY_TYPE else held.get(limited, 0)) > most:
                    return limit_in_words(title, limited, most)
        need, before = self._need_of_team(team, {owner: own}), self._needs.get(team, {})
        after = {each: self._totals.get(each, 0) - before.get(each, 0) + number for each, number in need.items()}
        fits = sum(need.values()) <= max(
            sum(before.values()), sum(self._slots.values()) - sum(self._totals.values()) + sum(before.values())
        )
        if fits and all(after[each] <= max(self._totals.get(each, 0), most) for each, most in self._slots.items()):
            return ""
        if promised := ", ".join(self._open(owner, team)):
            return f"it is not preemptible, and the slots that it could have are promised to others: {promised}"
        return "it is not preemptible, and all slots that it could have are held by jobs that must not be moved"

    def _open(self, owner: str, team: str) -> Iterable[str]:
        """Who is promised what is not held for good yet: other teams, and colleagues."""
        for other, need in self._needs.items():
            held = sum(sum(self._held.get(user, {}).values()) for user in self._members[other])
            if other != team and sum(need.values()) > held:
                yield f"{sum(need.values()) - held} to team {other}"
        for user in self._members.get(team, ()):
            missing = sum(self._need_of_user(user, {}).values()) - sum(self._held.get(user, {}).values())
            if user != owner and missing > 0:
                yield f"{missing} to user {user}"

    # Needs ------------------------------------------------------------------------------------

    def _quota_of(self, owner: str) -> Quota:
        member = self._entitled.users.get(owner)
        return _NONE if member is None else member.quota

    def _need_of_user(self, user: str, changed: Mapping[str, Counts]) -> Counts:
        return self._need(self._quota_of(user), changed.get(user) or self._held.get(user, {}))

    def _need_of_team(self, team: str, changed: Mapping[str, Counts]) -> Counts:
        """``changed``: users who hold something else than they do."""
        users = dict.fromkeys([*self._members.get(team, ()), *changed])
        inside = _sum(self._need_of_user(user, changed) for user in users)
        return self._need(self._entitled.teams.get(team, _NONE), inside)

    def _need(self, quota: Quota, inside: Counts) -> Counts:
        """The least that has room for what is inside and for the guarantee; ``any``: beside what is by type."""
        promised = {kind: number for kind, number in quota.guarantee.items() if kind in (*self._slots, ANY_TYPE)}
        need = {kind: max(inside.get(kind, 0), promised.get(kind, 0)) for kind in self._slots}
        whole = max(sum(inside.values()), sum(promised.values()))
        return {**need, ANY_TYPE: max(whole - sum(need.values()), 0)}


def limit_in_words(title: str, kind: str, limit: int, least: int = 0) -> str:
    """``least``: slots that the job needs at once; with more than the limit it can never start."""
    of_type = "" if kind == ANY_TYPE else f" of type {kind}"
    text = f"{title} is limited to {limit} {'slot' if limit == 1 else 'slots'}{of_type}"
    if least <= limit:
        return text
    return f"{text}, and it needs {least} at once: submit it with fewer, or let an admin raise the limit"


def _sum(counts: Iterable[Counts]) -> Counts:
    total: Counts = {}
    for one in counts:
        for kind, number in one.items():
            total[kind] = total.get(kind, 0) + number
    return total
