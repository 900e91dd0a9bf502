"""How fast two jobs run on the same accelerators. Simulator and sharing policies use it.

A job's *load* is the share of a step in which its kernels keep the accelerator busy; the rest it spends launching,
loading and synchronising. Two jobs whose loads add up to less than one fill each other's gaps and keep nearly their
full speed; beyond that the accelerator is divided between them, and each is slowed alike. The switching costs both
a few percent: packing measurements of Gandiva (OSDI'18, figure 4) and Lucid (ASPLOS'23, section 2) show small
models together at 0.9 and more of their speed, large ones at about half.
"""

from __future__ import annotations

SWITCHING = 0.05  # share of its speed that each job loses by sharing at all: the published pairs keep 0.9 and more
# The same by 1,245 pairs that Gavel's authors measured on K80 and P100 (OSDI'20), without bias there: time slices, not
# overlap. On their V100, which was not used, predicted speeds are 0.01 too low on average; with SWITCHING 0.24 too
# high (docs/truth.md).
MEASURED_SWITCHING = 0.35


def shared_speed(load: float, other: float, switching: float = SWITCHING) -> float:
    """Share of its own speed that a job with ``load`` keeps beside one with ``other``; the same for both."""
    return (1 - switching) / max(1.0, load + other)
