"""What the words in tables and figures mean, and what each policy does, in one line each. Pages and terminal use it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable

from pollux.errors import PolluxError
from pollux.policy import Policy, make_policy

# By a word of a heading. docs/simulation.md explains them at more length.
WORDS = {
    "JCT": "job completion time: from a job's submission to its end",
    "above bound": "by how much the average JCT is above a proven lower bound: no schedule of these jobs on this "
    "cluster is faster than the bound, even one that knows the future",
    "p50": "half of the jobs are at or below this",
    "p99": "99 of 100 jobs are at or below this",
    "makespan": "from the first submission to the last end",
    "ρ": "finish-time fairness: a job's JCT over its JCT alone on a fair share of the cluster; above 1 the job "
    "lost by sharing",
    "resizes": "starts and resizes of a job after its first start",
    "GPU-h": "GPU-hours that jobs held",
    "efficiency": "statistical efficiency: progress per example at the batch size in use, relative to the batch size "
    "that the job's user tuned; mean over replicas and time",
    "decision": "mean time of one scheduling decision, on this machine",
    "gap": "how much better any other plan could be, at most, by a proven bound",
}


def explained(headings: Iterable[str]) -> dict[str, str]:
    """The words that one of the headings contains, with their meaning."""
    text = " ".join(headings)
    return {word: meaning for word, meaning in WORDS.items() if word in text}


def policy_summary(policy: Policy) -> str:
    """The first line of what its class says, or its module if the class says nothing of its own."""
    own = type(policy).__dict__.get("__doc__") or getattr(sys.modules.get(type(policy).__module__), "__doc__", None)
    return inspect.cleandoc(own or "").partition("\n")[0]


def policy_summaries(names: Iterable[str]) -> dict[str, str]:
    """By name, of the names that are policies."""
    found = {}
    for name in names:
        try:
            summary = policy_summary(make_policy(name))
        except PolluxError:  # a recorded one, or an installed one that is broken
            continue
        if summary:
            found[name] = summary
    return found
