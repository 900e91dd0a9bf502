"""Why a node of a Ray cluster gets no work, in words."""

from __future__ import annotations

import pytest

pytest.importorskip("ray")

from pollux.engines.ray.facts import gpu_problem
from pollux.engines.ray.nodes import cause_of

DIED = """The actor died because of an error raised in its creation task, ray::NodeAgent.__init__()
  File "agent.py", line 7, in <module>
    import pollux
ModuleNotFoundError: No module named 'pollux'
"""


@pytest.mark.parametrize(
    ("told", "seen", "others", "says"),
    [
        (4, 4, True, ""),
        (4, 3, True, "Ray counts 4 GPUs there, and the driver shows 3"),
        (1, 0, True, "Ray counts 1 GPUs there, and the driver shows 0"),
        (1, 0, False, ""),  # of a kind that the driver does not know
        (0, 2, True, ""),
    ],
)
def test_a_node_with_fewer_gpus_than_ray_was_told(told: int, seen: int, others: bool, says: str) -> None:
    found = gpu_problem(told, seen, others)
    assert found.startswith(says) and bool(found) == bool(says)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (DIED, "ModuleNotFoundError: No module named 'pollux'"),
        ("The actor is dead.\nclass_name: NodeAgent", "The actor is dead."),
        ("", "RuntimeError('')"),
        ("OSError: [Errno 28] No space left on device\n" + "x" * 1000, "OSError: [Errno 28] No space left on device"),
    ],
)
def test_the_cause_of_an_agents_death_is_a_line(text: str, cause: str) -> None:
    assert cause_of(RuntimeError(text)) == cause
