"""``train.init(print_once=True)``: Python's print, on one replica."""

import builtins

from pollux import train
from pollux.train.live import LiveFlag
from pollux.train.output import PrintOnce


def test_only_the_main_replica_prints(capsys):
    is_main = [False]
    printing = PrintOnce(LiveFlag(lambda: is_main[0]))
    try:
        print("silent")
        is_main[0] = True  # a resize made it rank 0
        print("said", "once", sep="-")
    finally:
        printing.end()
    print("plain")
    assert capsys.readouterr().out == "said-once\nplain\n"


def test_the_run_gives_print_back(capsys):
    before = builtins.print
    with train.init(print_once=True) as run:
        assert builtins.print is not before
        print("from the main replica")
        run.print("likewise")
    assert builtins.print is before
    assert capsys.readouterr().out == "from the main replica\nlikewise\n"
