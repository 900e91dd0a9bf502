from __future__ import annotations

import contextlib
import threading
import time

from pollux.server.storage.fair_lock import FairLock


def test_one_at_a_time():
    lock, inside, most = FairLock(), 0, 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(200):
            with lock:
                inside += 1
                most = max(most, inside)
                time.sleep(0)
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert most == 1 and inside == 0


def test_who_takes_it_again_and_again_waits_for_the_others():
    lock, order = FairLock(), []
    is_held, may_go_on = threading.Event(), threading.Event()

    def greedy() -> None:
        with lock:
            is_held.set()
            may_go_on.wait(10)
        for number in range(3):
            with lock:
                order.append(f"greedy {number}")

    def patient() -> None:
        with lock:
            order.append("patient")

    threads = [threading.Thread(target=greedy), threading.Thread(target=patient)]
    threads[0].start()
    is_held.wait(10)
    threads[1].start()
    while not lock._waiting:
        time.sleep(0.001)
    may_go_on.set()
    for thread in threads:
        thread.join(10)
    assert order[0] == "patient"


def test_an_error_inside_gives_it_back():
    lock = FairLock()
    with contextlib.suppress(KeyError), lock:
        raise KeyError
    taken = threading.Event()

    def take() -> None:
        with lock:
            taken.set()

    threading.Thread(target=take, daemon=True).start()
    assert taken.wait(10)
