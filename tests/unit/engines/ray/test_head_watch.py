from __future__ import annotations

import threading
import time
from collections.abc import Callable

from pollux.engines.ray.head_watch import LATE_S, PERIOD_S, HeadWatch

TIMEOUT_S = 20.0  # a bound for a hang on a busy machine


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def test_a_head_that_blocks_is_told_and_so_is_its_return() -> None:
    """A frozen head takes connections and answers nothing."""
    answers, told = threading.Event(), list[str]()
    answers.set()
    watch = HeadWatch(lambda: answers.wait(TIMEOUT_S), told.append, period_s=0.05, late_s=0.3)
    watch.start()
    try:
        time.sleep(0.5)
        assert told == []
        answers.clear()
        until(lambda: told)
        assert "has not answered" in told[0]
        answers.set()
        until(lambda: len(told) == 2)
        assert told[1] == ""
    finally:
        answers.set()
        watch.close()


def test_a_head_that_refuses_is_told_once() -> None:
    def refuse() -> None:
        raise ConnectionError("refused")

    told = list[str]()
    watch = HeadWatch(refuse, told.append, period_s=0.02, late_s=0.1)
    watch.start()
    until(lambda: told)
    time.sleep(0.3)
    watch.close()
    assert len(told) == 1


def test_it_is_told_within_5_s() -> None:
    assert LATE_S + 2 * PERIOD_S <= 5.0
