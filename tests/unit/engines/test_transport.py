"""Messages over a socket: whole, in order, bounded in length and in time, and nothing but JSON objects."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.engines.transport import Channel, encode

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@pytest.fixture
def pair() -> Iterator[tuple[Channel, socket.socket]]:
    """A channel, and the bare socket at its other end."""
    ours, theirs = socket.socketpair()
    channel = Channel(ours, max_bytes=1000)
    yield channel, theirs
    channel.close()
    theirs.close()


@given(st.lists(st.dictionaries(st.text(), VALUES), min_size=1, max_size=5), st.integers(1, 50))
def test_messages_arrive_whole_and_in_order_however_they_are_cut(messages, size):
    ours, theirs = socket.socketpair()
    with theirs:
        channel, data = Channel(ours), b"".join(map(encode, messages))
        seen = []
        for start in range(0, len(data), size):
            theirs.sendall(data[start : start + size])
            seen += channel.receive(0.0) or []
        assert seen == messages
        channel.close()


def test_there_is_an_end_to_every_wait(pair):
    channel, other = pair
    began = time.monotonic()
    assert channel.receive(0.05) == []
    other.sendall(encode({"a": 1})[:3])
    assert channel.receive(0.05) == []
    assert not channel.send({"x": "y" * (1 << 23)}, timeout_s=0.05)  # the other end takes nothing
    assert time.monotonic() - began < 30.0


def test_a_connection_that_ends_is_over_for_both(pair):
    channel, other = pair
    other.sendall(encode({"a": 1}))
    other.close()
    assert channel.receive(1.0) == [{"a": 1}]
    assert channel.receive(1.0) is None
    assert not channel.send({"b": 2})


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">I", 1001) + b"x",
        struct.pack(">I", 3) + b"{x}",
        struct.pack(">I", 2) + b"[]",
        struct.pack(">I", 900) + b"[" * 900,
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x80\x04\x95\x10\x00\x00\x00",  # a pickle
    ],
)
def test_what_is_no_message_ends_the_connection_after_those_before_it(pair, data):
    channel, other = pair
    other.sendall(encode({"a": 1}) + data)
    assert channel.receive(1.0) == [{"a": 1}]
    assert channel.receive(1.0) is None


def test_what_a_peer_said_before_it_left_is_heard_also_when_it_takes_no_answer(pair):
    """A server that ends commands a stop and closes. An event that its supervisor sends then must not hide the stop."""
    channel, other = pair
    other.sendall(encode({"op": "stop", "job": "a"}) + encode({"op": "stop", "job": "b"}))
    other.close()
    channel.queue({"event": "replicas"})
    assert not channel.send({"event": "note"}, timeout_s=0.0)
    assert channel.receive(0.0) == [{"op": "stop", "job": "a"}, {"op": "stop", "job": "b"}]
    assert channel.receive(0.0) is None
    assert not channel.has_unsent


def test_messages_put_back_come_first(pair):
    channel, other = pair
    other.sendall(encode({"a": 3}))
    channel.put_back([{"a": 1}, {"a": 2}])
    assert channel.receive(1.0) == [{"a": 1}, {"a": 2}]
    assert channel.receive(1.0) == [{"a": 3}]


def test_what_is_queued_is_sent_while_waiting(pair):
    channel, other = pair
    long = {"x": "y" * (1 << 22)}
    channel.queue(long)
    assert channel.has_unsent
    received = bytearray()

    def read() -> None:
        while len(received) < len(encode(long)):
            received.extend(other.recv(1 << 16))
        other.sendall(encode({"done": True}))

    reader = threading.Thread(target=read)
    reader.start()
    assert channel.receive(30.0) == [{"done": True}]
    reader.join()
    assert json.loads(bytes(received[4:])) == long


def test_closing_wakes_a_thread_that_receives(pair):
    channel, _ = pair
    answers: list[object] = []
    thread = threading.Thread(target=lambda: answers.append(channel.receive(60.0)))
    thread.start()
    time.sleep(0.1)
    channel.close()
    thread.join(5.0)
    assert answers == [None]
