"""Log files as one text: order, prefixes, tails, files that grow, are cut off or replaced, bytes that are no text."""

from __future__ import annotations

import os
import time

import pytest

from pollux.server.storage import logs
from pollux.server.storage.logs import LogReader, list_files


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def write(tmp_path):
    def write(name, content, mode="wb"):
        path = tmp_path / "logs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, mode) as file:
            file.write(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def text(reader, is_last=False):
    return "".join(reader.read(is_last=is_last))


def test_files_are_listed_in_order_of_start_and_replica(tmp_path, write):
    for name in ("2/j-3.err", "10/j-9.out", "2/j-10.out", "2/j-3.out", "x/j-1.out", "2/notes.txt", "2/.out", "3.out"):
        write(name, "x")
    os.mkfifo(tmp_path / "logs" / "2" / "pipe.out")
    (tmp_path / "logs" / "2" / "link.out").symlink_to("/etc/passwd")
    found = [(file.start, file.replica, file.stream, file.size_bytes) for file in list_files(tmp_path)]
    assert found == [(2, "j-3", "out", 1), (2, "j-3", "err", 1), (2, "j-10", "out", 1), (10, "j-9", "out", 1)]


def test_of_two_streams_the_one_written_to_last_comes_last(tmp_path, write):
    out, err = write("1/a.out", "epoch 38\n"), write("1/a.err", "resumed\n")
    os.utime(err, (1000.0, 1000.0))
    assert text(LogReader(tmp_path)) == "resumed\nepoch 38\n"
    os.utime(out, (1000.0, 1000.0))
    assert text(LogReader(tmp_path)) == "epoch 38\nresumed\n"


def test_only_of_one_replica_or_stream(tmp_path, write):
    for name in ("1/a.out", "1/a.err", "1/b.out"):
        write(name, f"{name}\n")
    assert [file.path.name for file in list_files(tmp_path, replica="a")] == ["a.out", "a.err"]
    assert [file.path.name for file in list_files(tmp_path, stream="out")] == ["a.out", "b.out"]
    assert list_files(tmp_path, replica="../1/a") == list_files(tmp_path, replica="*") == []
    assert list_files(tmp_path / "missing") == []
    assert text(LogReader(tmp_path, replica="a", stream="err")) == "1/a.err\n"


def test_lines_of_several_replicas_say_whose_they_are(tmp_path, write):
    write("1/a.out", "one\ntwo\n")
    assert text(LogReader(tmp_path)) == "one\ntwo\n"
    write("1/a.err", "oh\n")
    assert text(LogReader(tmp_path)) == "one\ntwo\noh\n"
    write("1/b.out", "three\n\nfour")
    assert text(LogReader(tmp_path), is_last=True) == "[a] one\n[a] two\n[a] oh\n[b] three\n[b] \n[b] four"


def test_an_unfinished_line_does_not_run_into_the_next_file(tmp_path, write):
    write("1/a.out", "no newline")
    write("1/a.err", "error\n")
    assert text(LogReader(tmp_path), is_last=True) == "no newline\nerror\n"


@pytest.mark.parametrize(
    ("content", "tail", "expected"),
    [
        ("a\nb\nc\n", 2, "b\nc\n"),
        ("a\nb\nc", 2, "b\nc"),
        ("a\nb\nc\n", 0, ""),
        ("a\nb\nc\n", 3, "a\nb\nc\n"),
        ("a\nb\nc\n", 99, "a\nb\nc\n"),
        ("\n\n\n", 2, "\n\n"),
        ("", 2, ""),
    ],
)
@pytest.mark.parametrize("piece_bytes", [1, 2, 3, 1 << 16])
def test_tails(tmp_path, write, monkeypatch, content, tail, expected, piece_bytes):
    monkeypatch.setattr(logs, "PIECE_BYTES", piece_bytes)
    write("1/a.out", content)
    assert text(LogReader(tmp_path, tail=tail), is_last=True) == expected


def test_a_tail_is_of_the_files_there_were(tmp_path, write):
    write("1/a.out", "a\nb\n")
    reader = LogReader(tmp_path, tail=1)
    assert text(reader) == "b\n"
    write("2/c.out", "c\nd\n")
    assert text(reader) == "[c] c\n[c] d\n"


def test_growing_files_are_read_on(tmp_path, write):
    reader = LogReader(tmp_path)
    assert text(reader) == ""
    write("1/a.out", "one\ntw")
    assert text(reader) == "one\n"
    write("1/a.out", "o\n", "ab")
    write("1/b.out", "B\n")
    assert text(reader) == "[a] two\n[b] B\n"
    assert text(reader) == ""
    write("1/a.out", "end", "ab")
    assert text(reader) == ""
    assert text(reader, is_last=True) == "[a] end"


def test_a_line_that_stays_unfinished_is_shown_and_gone_on_with(tmp_path, write):
    clock = Clock()
    reader = LogReader(tmp_path, clock=clock)
    write("1/a.out", "epoch 1 ...")
    write("1/b.out", "B\n")
    assert text(reader) == "[b] B\n"
    clock.now += logs.IDLE_LINE_S
    assert text(reader) == "[a] epoch 1 ..."
    assert text(reader) == ""
    write("1/a.out", " done\n", "ab")
    assert text(reader) == " done\n"
    write("1/a.out", "epoch 2 ...", "ab")
    text(reader)
    clock.now += logs.IDLE_LINE_S
    assert text(reader) == "[a] epoch 2 ..."
    write("1/b.out", "B\n", "ab")
    assert text(reader) == "\n[b] B\n"
    write("1/a.out", " done\n", "ab")
    assert text(reader) == "[a]  done\n"


def test_files_that_are_cut_off_or_replaced_are_read_from_their_beginning(tmp_path, write):
    reader = LogReader(tmp_path)
    path = write("1/a.out", "one\ntwo\nrest")
    assert text(reader) == "one\ntwo\n"
    write("1/a.out", "three\n")
    assert text(reader) == "rest\nthree\n"
    path.rename(path.with_suffix(".old"))
    write("1/a.out", "a longer one than there was\n")
    assert text(reader) == "a longer one than there was\n"
    path.unlink()
    assert text(reader) == ""


def test_bytes_that_are_no_text(tmp_path, write):
    write("1/a.out", b"a\0b\xff\xfec\n\xc3")
    reader = LogReader(tmp_path)
    assert text(reader) == "a\ufffdb\ufffd\ufffdc\n"
    write("1/a.out", b"\xbc\n\xe2\x82", "ab")
    assert text(reader) == "ü\n"
    assert text(reader, is_last=True) == "\ufffd"


def test_long_lines_and_files_are_not_kept(tmp_path, write, monkeypatch):
    monkeypatch.setattr(logs, "PIECE_BYTES", 100)
    content = "ü" * 5000 + "\n" + "x" * 5000
    write("1/a.out", content)
    write("1/b.out", "")
    pieces = list(LogReader(tmp_path).read(is_last=True))
    assert max(map(len, pieces)) < 300
    assert "".join(pieces) == f"[a] {'ü' * 5000}\n[a] {'x' * 5000}"


def test_what_is_added_while_it_is_read_waits_for_the_next_pass(tmp_path, write):
    path = write("1/a.out", "x\n" * 100_000)
    reader = LogReader(tmp_path)
    size = 0
    for piece in reader.read():
        size += len(piece)
        with open(path, "ab") as file:
            file.write(b"y\n")
    assert size == 200_000
    assert set(text(reader)) == {"y", "\n"}


def test_a_log_that_a_job_has_stretched_does_not_hold_a_reader_up(tmp_path, write):
    """``os.ftruncate(1, 1 << 42)`` makes 4 TiB of nothing: every reader of it would hold a thread of the server."""
    path = write("1/a.out", "first\n")
    os.truncate(path, 1 << 42)
    write("1/a.out", "last\n", "ab")
    began = time.monotonic()
    shown = text(LogReader(tmp_path), is_last=True)
    assert shown.startswith("first\n") and shown.endswith("last\n") and len(shown) < 1 << 20
    tail = text(LogReader(tmp_path, tail=1), is_last=True)
    assert tail.endswith("last\n") and len(tail) < 1 << 20
    assert text(LogReader(tmp_path, tail=5), is_last=True).endswith("last\n")
    assert time.monotonic() - began < 20
