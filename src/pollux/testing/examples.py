"""How many examples hypothesis tries. The suites here and Pollux's own tests ask."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

PLAIN_EXAMPLES = 100  # of hypothesis, where no profile says otherwise


def examples(number: int, parent: settings | None = None, **options: Any) -> settings:
    """``settings(max_examples=number)``, fewer or more as the loaded profile has fewer or more than hypothesis."""
    share = settings().max_examples / PLAIN_EXAMPLES
    return settings(parent, max_examples=max(1, round(number * share)), **options)
