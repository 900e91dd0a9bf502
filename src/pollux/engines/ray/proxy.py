"""The server's side of a Ray cluster: a process that carries messages between an engine and the Ray supervisor.

``python -m pollux.engines.ray.proxy --fd N ...``, started by the Ray engine, talks over the socket N as the supervisor
of one machine does (:mod:`pollux.engines.messages`), and calls the supervisor's actor. It also fetches what replicas
print, from the node agents into the data directory. It keeps nothing: Ray may end it at any moment, and another takes
over.

It is a process of its own because Ray ends a process whose node it loses, and takes over its signals and its logging.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import os
import queue
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pollux.engines.messages import PROTOCOL_VERSION, VERSIONS
from pollux.engines.ray.connection import LAST_S, Refused, join
from pollux.engines.ray.head_watch import HeadWatch
from pollux.engines.transport import Channel, Message

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

HEAR_S = 1.0
START_S = 60.0
LATE_S = 5.0  # beyond that
ANSWER_S = 10.0
PATIENCE_S = 15.0  # with a supervisor that is out of reach: another proxy is soon started, and can say more
LOG_PERIOD_S = 2.0
CATCH_UP_S = 2.0
MAX_KNOWN = 10_000  # log files of one node
RECEIVE_S = 5.0  # a bound on one wait; the thread then waits again
ENDS = ("ended", "stopped", "lost")

logger = logging.getLogger(__name__)


class Proxy:
    def __init__(self, channel: Channel, supervisor: ActorHandle, directory: Path) -> None:
        self._channel, self._supervisor, self._directory = channel, supervisor, directory
        self._client = secrets.token_hex(8)
        self._questions: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._agents: dict[str, ActorHandle] = {}
        self._known: dict[str, dict[str, int]] = {}  # node -> log file -> how much of it is here
        self._writing = threading.Lock()
        self._end_by = math.inf  # in monotonic time: all should be over by then

    def run(self, owner: str, takes_over: bool, epoch: int) -> None:
        """Until the engine or the supervisor has ended.

        Raises:
            Refused: the supervisor does not take this client, or is out of reach.
        """
        import ray

        hello = {**VERSIONS, "takes_over": takes_over, "epoch": epoch}
        if reason := ray.get(self._supervisor.greet.remote(self._client, owner, hello), timeout=START_S):
            raise Refused(reason)
        HeadWatch(ray.nodes, lambda problem: self._channel.send({"event": "head", "problem": problem})).start()
        for target in (self._read, self._ask, self._fetch_logs):
            threading.Thread(target=self._guarded, args=(target,), daemon=True).start()
        heard, lost_at = 0, None
        while True:
            if time.monotonic() > self._end_by:
                ray.kill(self._supervisor)  # Ray ends what it owns
                raise Refused("the jobs did not leave in time: they were ended by force")
            try:
                told = ray.get(self._supervisor.hear.remote(self._client, heard, HEAR_S), timeout=HEAR_S + LATE_S)
                lost_at = None
            except (ray.exceptions.ActorUnavailableError, ray.exceptions.GetTimeoutError) as error:
                lost_at = lost_at or time.monotonic()
                if time.monotonic() - lost_at > PATIENCE_S:
                    raise Refused(f"the supervisor is out of reach: {error}") from error
                time.sleep(0.2)
                continue
            if any(message["event"] in ENDS for _, message in told):
                self._catch_up()
            for number, message in told:
                heard = max(heard, number)
                if message["event"] == "over":
                    ray.kill(self._supervisor)
                    return
                if not self._channel.send(message):
                    return  # the engine is gone

    def _guarded(self, target: Callable[[], None]) -> None:
        """When one thread ends, the process ends: the engine starts another proxy."""
        try:
            target()
        except Exception:
            logger.exception("the proxy ends")
        os._exit(1)

    def _read(self) -> None:
        while (messages := self._channel.receive(RECEIVE_S)) is not None:
            for message in messages:
                if message["op"] == "shutdown":
                    self._end_by = min(self._end_by, time.monotonic() + message["grace_s"] + LAST_S)
                self._questions.put(message)
        os._exit(0)  # the engine is gone; the supervisor is not

    def _ask(self) -> None:
        import ray

        number = 0
        while True:
            messages = [self._questions.get()]
            while not self._questions.empty():
                messages.append(self._questions.get())
            number += 1
            ends_at = time.monotonic() + PATIENCE_S
            while True:
                try:
                    ray.get(self._supervisor.ask.remote(self._client, number, messages), timeout=ANSWER_S)
                    break
                except (ray.exceptions.ActorUnavailableError, ray.exceptions.GetTimeoutError):
                    if time.monotonic() > ends_at:
                        raise
                    time.sleep(0.2)

    def _fetch_logs(self) -> None:
        """With one question to each agent under way."""
        import ray

        asked: dict[str, ObjectRef] = {}
        seen_at = -LOG_PERIOD_S
        while True:
            if time.monotonic() - seen_at > LOG_PERIOD_S:
                seen_at = time.monotonic()
                with contextlib.suppress(ray.exceptions.ActorUnavailableError, ray.exceptions.GetTimeoutError):
                    self._agents = ray.get(self._supervisor.agents.remote(), timeout=ANSWER_S)
            for node, agent in self._agents.items():
                if node not in asked:
                    asked[node] = agent.read_logs.remote(self._known_of(node), HEAR_S)
            if not asked:
                time.sleep(0.2)
                continue
            ready = ray.wait(list(asked.values()), num_returns=1, timeout=HEAR_S)[0]
            for node, ref in list(asked.items()):
                if ref not in ready:
                    continue
                del asked[node]
                try:
                    self._write(node, ray.get(ref, timeout=0))
                except ray.exceptions.RayError:
                    self._agents.pop(node, None)  # its node is lost, perhaps; it is asked for again

    def _catch_up(self) -> None:
        """Output from before an end must be here before the engine hears of the end."""
        import ray

        ends_at = time.monotonic() + CATCH_UP_S
        for node, agent in list(self._agents.items()):
            with contextlib.suppress(ray.exceptions.RayError):
                while (left_s := ends_at - time.monotonic()) > 0:
                    found = ray.get(agent.read_logs.remote(self._known_of(node), 0.0), timeout=left_s)
                    if not found:
                        break
                    self._write(node, found)

    def _known_of(self, node: str) -> dict[str, int]:
        with self._writing:
            return dict(self._known.get(node, {}))

    def _write(self, node: str, found: dict[str, tuple[int, bytes]]) -> None:
        for name, (offset, data) in found.items():
            with self._writing:
                known = self._known.setdefault(node, {})
                while len(known) > MAX_KNOWN:  # one that is still read is only asked about again
                    del known[next(iter(known))]
                try:
                    known[name] = self._append(name, offset, data)
                except OSError as error:  # a full disk, say: it is fetched again
                    logger.warning("%s: %s", name, error)
                    time.sleep(0.5)

    def _append(self, name: str, offset: int, data: bytes) -> int:
        """How much of it is here then."""
        path = Path(name)
        if not path.is_relative_to(self._directory / "jobs") or ".." in path.parts:
            logger.error("an agent offers %s, which is no log of ours", name)
            return sys.maxsize
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            if file.tell() == offset:
                file.write(data)
        return path.stat().st_size


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pollux.engines.ray.proxy", description="carries messages")
    parser.add_argument("--fd", type=int, required=True, help="an inherited, connected stream socket")
    parser.add_argument("--directory", type=Path, required=True, help="the data directory")
    parser.add_argument("--settings", required=True, help="as JSON: see RaySettings.to_json")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = socket.socket(fileno=options.fd)
    os.set_inheritable(connection.fileno(), False)
    channel = Channel(connection)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    try:
        settings = json.loads(options.settings)
        proxy = Proxy(channel, join(settings), options.directory)
        proxy.run(settings["supervisor"]["owner"], settings["takes_over"], settings["epoch"])
    except Refused as error:
        channel.send({"event": "refused", "version": PROTOCOL_VERSION, "reason": str(error)})
        return 1
    except Exception as error:
        logger.exception("the proxy ends")
        reason = f"Ray: {str(error).splitlines()[0]}"
        channel.send({"event": "refused", "version": PROTOCOL_VERSION, "reason": reason})
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code)  # Ray's own end takes seconds, and nothing of ours is left to do
