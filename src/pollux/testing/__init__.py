"""Conformance suites for engines and policies, for Pollux's own tests and for those of other packages.

Inherit a suite in a test module, provide its hooks, and pytest runs the tests. Needs the extra ``testing``, which is
pytest and hypothesis; nothing else in Pollux imports this package.
"""

import pytest

pytest.register_assert_rewrite("pollux.testing.engines", "pollux.testing.policies")

from pollux.testing.engines import EngineConformance  # noqa: E402
from pollux.testing.policies import PolicyConformance  # noqa: E402

__all__ = ["EngineConformance", "PolicyConformance"]
