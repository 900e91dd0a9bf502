"""A trial's part in copies between trials: gets orders from the server, offers this run's state, fetches another's.

The session asks it between steps, on rank 0. A thread waits for orders of the server, so that they arrive at once, and
another one sends or receives the state while training goes on. A state that has arrived whole is loaded by all replicas
at the end of a step; one that has not leaves the run as it was.
"""

from __future__ import annotations

import http.client
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from pollux.api.codec import decode, dumps, encode
from pollux.api.copy import WAIT_S, CopyAnswer, CopyNews, CopyNote, CopyOffer, CopyOrder, CopyProblem
from pollux.errors import PolluxError
from pollux.server_address import LEADER_HEADER, ServerAddress
from pollux.train.encoding import sendable
from pollux.train.state_transfer import Offer, Snapshot, fetch

ANSWER_S = WAIT_S + 10.0
PAUSE_S = 1.0  # before the server is asked again, when it is away
MOST_GROWTH = 4  # times this run's own state that another's may be: optimizers make their state at the first step
SMALL_BYTES = 64 << 20  # a state that is never too large
ROUNDING = 1e-9

sendable(CopyNote)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Fetched:
    """A state that has arrived, and the order it was fetched by."""

    order: CopyOrder
    snapshot: Snapshot
    ordered_at: float


class Copies:
    """Made on every replica; does nothing until :meth:`attend` is called, on rank 0."""

    def __init__(self, server: ServerAddress, token: str, job: str, study: str) -> None:
        self._server, self._job, self._study = server, job, study
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self._lock = threading.Lock()
        self._asked: CopyOrder | None = None  # the order to offer this run's state
        self._fetched: Fetched | None = None
        self._news: list[CopyNews] = []
        self._has_news = threading.Event()
        self._is_attended, self._is_over = False, False
        self._offer: Offer | None = None
        self._keep_at: float | None = None  # the share of the work at which the state is to be kept
        self._is_before = False  # whether that has been seen to lie ahead
        self._kept: Snapshot | None = None
        self._num_bytes = 0
        self._note: CopyNote | None = None  # of the last copy that this run has taken over
        self._thread: threading.Thread | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Copies | None:
        names = ("POLLUX_URL", "POLLUX_TOKEN", "POLLUX_JOB_ID", "POLLUX_STUDY")
        url, token, job, study = (environment.get(name, "") for name in names)
        if not (url and token and job and study):
            return None
        return cls(ServerAddress.from_environment(url, environment), token, job, study)

    # --- on rank 0, between two steps ---------------------------------------------------------------------------

    def attend(
        self, copied: CopyNote | None, is_whole: bool, progress: float | None, capture: Callable[[], Snapshot]
    ) -> None:
        """Listen for orders; keep or offer this run's state if the server asked for it.

        ``copied``: the last state that this run took over. ``is_whole``: the model is not sharded. ``progress``: the
        share of the work that is done.
        """
        self._note, self._is_attended = copied, True
        if self._thread is None and not self._is_over:
            self._thread = threading.Thread(target=self._listen, name="pollux-copies", daemon=True)
            self._thread.start()
        if self._keep_at is not None and progress is not None and is_whole and self._kept is None:
            self._keep(progress, capture)
        with self._lock:
            order, self._asked = self._asked, None
        if order is None:
            return
        if order.at is not None and self._kept is None:
            self.refuse(order.id, f"it has kept no state at {order.at:.0%} of its work")
            return
        if not is_whole:
            self.refuse(order.id, "its model is sharded: no replica has the whole state")
            return
        try:
            snapshot = capture() if order.at is None or self._kept is None else self._kept
            if self._offer is not None:
                self._offer.close()
            self._offer = Offer(snapshot, order.secret, self._own_host())
            offer = CopyOffer(id=order.id, address=self._offer.address)
            self._tell(CopyNews(study=self._study, offer=offer))
        except OSError as error:
            self.refuse(order.id, f"its state cannot be offered: {error}")

    def _keep(self, progress: float, capture: Callable[[], Snapshot]) -> None:
        """At the first step past the share of the work, if the run was seen before it: later states are others."""
        assert self._keep_at is not None
        if progress < self._keep_at - ROUNDING:
            self._is_before = True
        elif self._is_before:
            self._kept = capture()
            logger.info("keeps its state at %.1f%% of its work, %d bytes", 100 * progress, self._kept.num_bytes)

    def rest(self) -> None:
        """Another replica is rank 0 now."""
        self._is_attended = False

    def note_size(self, num_bytes: int) -> None:
        """Of this run's own state; what is fetched may not be much larger."""
        self._num_bytes = num_bytes

    @property
    def is_ready(self) -> bool:
        """Whether a state has arrived that all replicas should load. Never blocks."""
        return self._fetched is not None

    @property
    def fetched(self) -> Fetched | None:
        """The state that has arrived, until it is loaded or refused: a group that breaks in between tries again."""
        return self._fetched

    def done(self, note: CopyNote) -> None:
        self._note, self._fetched = note, None
        self._tell(CopyNews(study=self._study))

    def refuse(self, id_: str, message: str) -> None:
        logger.warning("a copy between trials is not made: %s", message)
        if self._fetched is not None and self._fetched.order.id == id_:
            self._fetched = None
        self._tell(CopyNews(study=self._study, problem=CopyProblem(id=id_, message=message[:500])))

    def close(self) -> None:
        """The run is over. The threads end by themselves."""
        self._is_over = True
        self._has_news.set()
        if self._offer is not None:
            self._offer.close()

    # --- the thread ---------------------------------------------------------------------------------------------

    def _tell(self, news: CopyNews) -> None:
        """Send it at once, beside the request that waits for an order."""
        with self._lock:
            self._news.append(news)
        threading.Thread(target=self._send_news, name="pollux-copy-news", daemon=True).start()

    def _send_news(self) -> None:
        while True:
            with self._lock:
                if not self._news:
                    return
                news = self._news.pop(0)
            for _ in range(3):
                try:
                    self._take(self._ask(news, is_waiting=False))
                    break
                except (OSError, http.client.HTTPException, PolluxError, ValueError) as error:
                    logger.info("the server does not take news of a copy: %s", error)
                    time.sleep(PAUSE_S)

    def _listen(self) -> None:
        while not self._is_over:
            if not self._is_attended:
                self._has_news.wait(PAUSE_S)
                continue
            try:
                answer = self._ask(CopyNews(study=self._study), is_waiting=True)
                self._take(answer)
                if not answer.again:
                    return
            except (OSError, http.client.HTTPException, PolluxError, ValueError) as error:
                logger.debug("no orders for copies: %s", error)
                self._has_news.wait(PAUSE_S)
            except Exception:  # a bug of ours must not end the thread silently
                logger.exception("an order for a copy was dropped")
                self._has_news.wait(PAUSE_S)

    def _ask(self, news: CopyNews, *, is_waiting: bool) -> CopyAnswer:
        body = dumps(encode(replace(news, copied=self._note)), "news of a copy")
        connection = self._server.connection(ANSWER_S)
        try:
            path = self._server.copies_of(self._job) + ("?wait=1" if is_waiting else "")
            connection.request("POST", path, body=body, headers=self._headers)
            response = connection.getresponse()
            text = response.read()
            if response.status in (404, 403, 409):
                return CopyAnswer(again=False)  # a server without copies, or one that has replaced this replica
            if response.status != 200:
                self._server.look_again(response.headers.get(LEADER_HEADER))
                raise http.client.HTTPException(f"it answered {response.status} {response.reason}")
            return decode(CopyAnswer, json.loads(text), "answer")
        finally:
            connection.close()

    def _take(self, answer: CopyAnswer) -> None:
        order = answer.order
        if order is None:
            return
        if order.role == "keep":
            self._keep_at = order.at
            return
        if order.role == "source":
            with self._lock:
                self._asked = order
            return
        threading.Thread(target=self._fetch, args=(order,), name="pollux-fetch", daemon=True).start()

    def _fetch(self, order: CopyOrder) -> None:
        begun = time.monotonic()
        try:
            snapshot = fetch(order.address, order.secret, max(MOST_GROWTH * self._num_bytes, SMALL_BYTES))
        except PolluxError as error:
            self.refuse(order.id, str(error))
            return
        except Exception as error:
            logger.exception("a state could not be fetched")
            self.refuse(order.id, repr(error))
            return
        logger.info("a state of %d bytes came from trial %d in %.3f s", snapshot.num_bytes, order.source,
                    time.monotonic() - begun)  # fmt: skip
        with self._lock:
            self._fetched = Fetched(order, snapshot, begun)

    def _own_host(self) -> str:
        """This machine's address on the way to the server, where the other trials can reach it. Raises OSError."""
        host, port = self._server.place
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
