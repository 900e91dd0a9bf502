"""Where test data lives, and a hypothesis profile that does not mind slow machines."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("ci", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ci")

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def osdi21() -> Path:
    """The published traces and workloads; not part of this project."""
    path = SHARED / "osdi21"
    if not path.is_dir():
        pytest.skip("published OSDI'21 data not found in ../shared/osdi21")
    return path


@pytest.fixture(scope="session")
def instances() -> Path:
    path = SHARED / "instances"
    if not path.is_dir():
        pytest.skip("scheduling instances not found in ../shared/instances")
    return path
