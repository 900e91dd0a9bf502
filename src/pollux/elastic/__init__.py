"""Elastic training for any framework, by restart. Needs Python's standard library alone.

A script calls :func:`join`, trains with the size and batch that it is told, says after every step how it went, and
saves and leaves when it is asked to. It is then started again with another size. See docs/elastic.md.
"""

from __future__ import annotations

from pollux.elastic.batch import Batch, BatchBounds, choose_batch
from pollux.elastic.job import Job, join

__all__ = ["Batch", "BatchBounds", "Job", "choose_batch", "join"]
