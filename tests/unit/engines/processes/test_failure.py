"""Why a replica failed, out of its stderr."""

from __future__ import annotations

import signal

import pytest

pytest.importorskip("torch")

from pollux.engines.processes.failure import (
    describe_failure,
    error_in_code,
    how_it_ended,
    is_bad_usage,
    read_end,
    read_failure,
)

TRACE = """Traceback (most recent call last):
  File "train.py", line 3, in <module>
    main()
ValueError: too bad
"""


def test_the_exception_and_its_traceback_are_found(tmp_path):
    path = tmp_path / "err"
    path.write_text("a warning\n" * 10_000 + TRACE + "shutting down\n" * 500)
    headline, tail = read_failure(path.read_text())
    assert headline == "ValueError: too bad"
    assert tail.startswith("Traceback") and tail.endswith("shutting down")
    assert describe_failure("a: rank 1 exited with 1", path, path.read_text(), 1).splitlines()[0] == (
        "a: rank 1 exited with 1: ValueError: too bad"
    )


def test_torchs_marks_of_ranks_are_taken_off(tmp_path):
    path = tmp_path / "err"
    path.write_text("".join(f"[rank1]: [rank0]: {line}\n" for line in TRACE.splitlines()))
    assert read_failure(path.read_text()) == ("ValueError: too bad", TRACE.strip())


def test_without_a_traceback_the_end_is_shown(tmp_path):
    path = tmp_path / "err"
    assert describe_failure("gone", path, read_end(path), 1).endswith("(nothing)")
    path.write_text("x" * 10_000 + "Segmentation fault")
    headline, tail = read_failure(path.read_text())
    assert headline == ""
    assert len(tail) == 4000 and tail.endswith("Segmentation fault")


def test_without_a_traceback_the_last_line_is_the_reason_of_an_exit_and_not_of_a_signal():
    usage = "usage: train.py [-h]\ntrain.py: error: unrecognized arguments: --foo\n"
    said = describe_failure("it exited with 2", "err", usage, 2)
    assert said.splitlines()[0] == "it exited with 2: train.py: error: unrecognized arguments: --foo"
    assert describe_failure("it was killed", "err", "a warning\n", -9).splitlines()[0] == "it was killed"
    assert is_bad_usage(2, usage) and not is_bad_usage(1, usage)
    assert not is_bad_usage(2, "python: can't open file 'train.py': [Errno 2] No such file or directory\n")


@pytest.mark.parametrize("error", ["TypeError: no a", "NameError: name 'x'", "AttributeError: y", "SyntaxError: z"])
def test_an_error_in_the_code_is_known_by_its_line(error):
    trace = TRACE.replace("ValueError: too bad", error)
    assert error_in_code(1, f"a warning\n{trace}bye\n") == f'{error} (File "train.py", line 3)'
    assert error_in_code(1, trace.replace("line 3", "line 4")) == f'{error} (File "train.py", line 4)'
    assert error_in_code(1, "".join(f"[rank1]: {line}\n" for line in trace.splitlines())) == error_in_code(1, trace)
    assert error_in_code(-9, trace) == error_in_code(143, trace) == ""


def test_other_errors_may_be_mended_by_another_start_or_node():
    assert error_in_code(1, TRACE) == error_in_code(1, "TypeError: said by nobody") == ""
    for error in ("ModuleNotFoundError: No module named 'x'", "ImportError: x", "AttributeError: no NVIDIA driver"):
        assert error_in_code(1, TRACE.replace("ValueError: too bad", error)) == ""


def test_addresses_make_no_other_error():
    first, second = (TRACE.replace("ValueError: too bad", f"TypeError: <A at {at}>") for at in ("0x7f0a", "0x56"))
    assert error_in_code(1, first) == error_in_code(1, second) != ""


def test_a_wrong_syntax_of_the_script_itself_has_no_header():
    shown = '  File "train.py", line 7\n    def (\n        ^\nSyntaxError: invalid syntax\n'
    assert error_in_code(1, shown) == 'SyntaxError: invalid syntax (File "train.py", line 7)'


def test_a_deep_recursion_is_cut_in_the_middle(tmp_path):
    path = tmp_path / "err"
    frames = "".join(f'  File "train.py", line {number}, in f\n' for number in range(1500))
    path.write_text(f"Traceback (most recent call last):\n{frames}RecursionError: deep\n")
    headline, tail = read_failure(path.read_text())
    assert headline == "RecursionError: deep"
    assert len(tail) < 20_000 and "[...]" in tail and tail.endswith("RecursionError: deep")


def test_ends_in_words():
    assert how_it_ended(3) == "exited with 3"
    assert how_it_ended(-signal.SIGSEGV) == "was killed by SIGSEGV"
    assert how_it_ended(-40) == "was killed by signal 40"
