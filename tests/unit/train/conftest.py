"""Fixtures that several test files of the training library share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pollux.train.nursery import Nursery


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    """A warm parent of replicas."""
    from pollux.train.nursery import Nursery

    with Nursery() as nursery:
        nursery.wait_ready(60.0)
        yield nursery
