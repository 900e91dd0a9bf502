"""Notices reach a real HTTP server and a real SMTP server; what fails is tried again, what is refused is not."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pollux.errors import InputFileError
from pollux.server.live.news import News
from pollux.server.notify.config import MailConfig, NotifyConfig, WebhookConfig, read_notify
from pollux.server.notify.notice import Notice
from pollux.server.notify.notifier import Notifier
from tests.unit.live_server import eventually

SECRET = "shared with the receiver"


class Hook:
    """Remembers what it was sent; answers with the codes it was given, then 200.

    A code of 0: no answer at all, and it hangs up when ``goes_on`` is set, or after a while.
    """

    def __init__(self, *codes: int) -> None:
        self.codes, self.calls, self.headers = list(codes), [], []
        self.goes_on, self.num_hung_up = threading.Event(), 0
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                hook.calls.append(body)
                hook.headers.append(dict(self.headers))
                code = hook.codes.pop(0) if hook.codes else 200
                if code == 0:
                    hook.goes_on.wait(20.0)
                    hook.num_hung_up += 1
                    return
                self.send_response(code)
                if code == 302:
                    self.send_header("Location", f"{hook.url}elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_GET = do_POST

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def told(self) -> list[dict[str, Any]]:
        return [json.loads(body) for body in self.calls]


@pytest.fixture
def hooks() -> Iterator[Callable[..., Hook]]:
    with contextlib.ExitStack() as stack:

        def make(*codes: int) -> Hook:
            hook = Hook(*codes)
            stack.callback(hook.close)
            return hook

        yield make


class MailServer:
    """Enough of SMTP: takes mail, refuses what it is told to refuse with the codes it is given first."""

    def __init__(self, *codes: int) -> None:
        self.mails: list[tuple[list[str], str]] = []
        self.codes = list(codes)
        mail = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                self.say("220 test")
                to: list[str] = []
                while line := self.rfile.readline().decode().strip():
                    word = line.upper()
                    if word.startswith(("EHLO", "HELO", "MAIL", "RSET", "NOOP")):
                        self.say("250 ok")
                    elif word.startswith("RCPT"):
                        code = mail.codes.pop(0) if mail.codes else 250
                        if code == 250:
                            to.append(line.partition("<")[2].partition(">")[0])
                        self.say(f"{code} answer")
                    elif word == "DATA":
                        self.say("354 go on")
                        lines = []
                        while (got := self.rfile.readline().decode().rstrip("\r\n")) != ".":
                            lines.append(got)
                        mail.mails.append((to, "\n".join(lines)))
                        to = []
                        self.say("250 taken")
                    else:
                        self.say("221 bye")
                        return

            def say(self, text: str) -> None:
                self.wfile.write(f"{text}\r\n".encode())

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextlib.contextmanager
def telling(config: NotifyConfig, pauses_s: tuple[float, ...] = (0.05, 0.05)) -> Iterator[Notifier]:
    notifier = Notifier(config, pauses_s)
    notifier.start()
    try:
        yield notifier
    finally:
        notifier.close()


def webhook(hook: Hook, *topics: Any, timeout_s: float = 5.0) -> NotifyConfig:
    about = WebhookConfig(url=hook.url, secret=SECRET, timeout_s=timeout_s)
    return NotifyConfig(topics=topics or ("ends", "failures", "alerts"), webhook=about)


def notice(event: Any = "job.failed", **changes: Any) -> Notice:
    return Notice(**{"event": event, "at": 1e9, "cluster": "http://x", "text": "it broke", "job": "train", **changes})


def test_a_call_is_signed(hooks: Callable[..., Hook]) -> None:
    hook = hooks()
    with telling(webhook(hook)) as notifier:
        notifier.tell(notice(owner="ada", exit_code=3))
        eventually(lambda: len(hook.calls) == 1, "a call", 10)
    (told,), (headers,) = hook.told, hook.headers
    assert (told["event"], told["job"], told["owner"], told["exit_code"]) == ("job.failed", "train", "ada", 3)
    assert headers["Pollux-Delivery"] == told["id"] and headers["Pollux-Event"] == "job.failed"
    at, _, given = headers["Pollux-Signature"].removeprefix("t=").partition(",v1=")
    expected = hmac.new(SECRET.encode(), at.encode() + b"." + hook.calls[0], hashlib.sha256).hexdigest()
    assert hmac.compare_digest(given, expected) and abs(time.time() - int(at)) < 60


def test_a_call_that_fails_is_repeated_with_the_same_id(hooks: Callable[..., Hook]) -> None:
    hook = hooks(500, 429)
    with telling(webhook(hook)) as notifier:
        notifier.tell(notice())
        eventually(lambda: len(hook.calls) == 3, "three calls", 10)
    assert len({told["id"] for told in hook.told}) == 1


def test_a_call_that_is_refused_or_sent_elsewhere_is_not_repeated(hooks: Callable[..., Hook]) -> None:
    hook = hooks(403, 302)
    with telling(webhook(hook)) as notifier:
        for job in ("refused", "sent-elsewhere", "last"):
            notifier.tell(notice(job=job))
        eventually(lambda: len(hook.calls) >= 3, "three calls", 10)
        time.sleep(0.3)
    assert [told["job"] for told in hook.told] == ["refused", "sent-elsewhere", "last"]


def test_a_receiver_that_hangs_is_left_after_a_while(hooks: Callable[..., Hook]) -> None:
    hook = hooks(0)
    with telling(webhook(hook, timeout_s=0.3)) as notifier:
        notifier.tell(notice())
        eventually(lambda: len(hook.calls) == 2, "the second call", 15)
        assert hook.num_hung_up == 0


def test_telling_does_not_wait_for_the_receiver(hooks: Callable[..., Hook]) -> None:
    hook = hooks(0)
    with telling(webhook(hook, timeout_s=60.0)) as notifier:
        notifier.tell(notice())
        eventually(lambda: bool(hook.calls), "a call", 15)
        assert hook.num_hung_up == 0
        hook.goes_on.set()
        eventually(lambda: len(hook.calls) == 2, "the second call", 15)


def test_what_nobody_listens_to_ends_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    config = NotifyConfig(topics=("failures",), webhook=WebhookConfig(url=f"http://127.0.0.1:{port}/", secret="s"))
    with telling(config) as notifier:
        notifier.tell(notice())
        eventually(lambda: "was not delivered" in caplog.text, "the log", 10)
    assert caplog.text.count("trying again") == 2


def test_only_what_was_asked_for_is_told(hooks: Callable[..., Hook]) -> None:
    hook = hooks()
    with telling(webhook(hook, "failures")) as notifier:
        for event in ("job.succeeded", "job.cancelled", "cluster.alert", "job.failed"):
            notifier.tell(notice(event))
        eventually(lambda: bool(hook.calls), "a call", 10)
        time.sleep(0.2)
    assert [told["event"] for told in hook.told] == ["job.failed"]


def test_mail_reaches_the_operator_and_the_owner() -> None:
    server = MailServer(451)  # greylisted: the first attempt is refused for now
    about = MailConfig(
        host="127.0.0.1",
        port=server.port,
        sender="pollux@lab.example",
        to=("ops@lab.example", "{owner}@lab.example"),
        security="none",
    )
    try:
        with telling(NotifyConfig(topics=("ends",), mail=about)) as notifier:
            notifier.tell(notice(owner="ada", text="exit code 3\nTraceback: ünïcode"))
            eventually(lambda: bool(server.mails), "a mail", 10)
            notifier.tell(notice("job.succeeded", job="second"))
            eventually(lambda: len(server.mails) >= 2, "another mail", 10)
    finally:
        server.close()
    addressees = {address for to, _ in server.mails for address in to}
    assert addressees == {"ops@lab.example", "ada@lab.example"}
    assert "Subject: [pollux] job train failed" in server.mails[0][1]
    assert server.mails[-1][0] == ["ops@lab.example"]


def test_alerts_come_after_a_while_and_are_taken_back(hooks: Callable[..., Hook]) -> None:
    hook = hooks()
    with telling(webhook(hook)) as notifier:
        news = News(notifier, "http://x", alert_after_s=0.2)
        news.watch("the database is away")
        news.watch("")  # over before it was news
        news.watch("the disk is full")
        time.sleep(0.25)
        for _ in range(3):
            news.watch("the disk is full")
        news.watch("")
        eventually(lambda: len(hook.calls) == 2, "two calls", 10)
    assert [told["event"] for told in hook.told] == ["cluster.alert", "cluster.resolved"]
    assert "the disk is full" in hook.told[0]["text"]


# The configuration ----------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    secret = tmp_path / "secret"
    secret.write_text("s3cret\n")
    secret.chmod(0o600)
    (tmp_path / "open").write_text("s3cret")
    (tmp_path / "open").chmod(0o644)
    return tmp_path / "pollux.toml"


HOOK = {"url": "https://hooks.example.org/x", "secret-file": "secret"}
MAIL = {"host": "mail.example.org", "from": "pollux@lab.example", "to": "ops@lab.example"}


def test_a_configuration_is_read(path: Path) -> None:
    login = {"user": "pollux", "password-file": "secret"}
    config = read_notify(path, {"topics": ["ends"], "webhook": HOOK, "mail": {**MAIL, **login}})
    assert config is not None and config.webhook is not None and config.mail is not None
    assert (config.webhook.secret, config.mail.password, config.mail.port) == ("s3cret", "s3cret", 587)
    assert "s3cret" not in repr(config)
    assert read_notify(path, None) is None


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({}, "neither how"),
        ("x", "a table is needed"),
        ({"topic": ["ends"], "webhook": HOOK}, "unknown key notify.topic. Did you mean 'topics'"),
        ({"topics": ["everything"], "webhook": HOOK}, "ends, failures, alerts"),
        ({"webhook": {**HOOK, "url": "ftp://x"}}, "a URL is needed"),
        ({"webhook": {**HOOK, "url": "https://me:pw@x/"}}, "has a password in it"),
        ({"webhook": {"url": "https://x/"}}, "secret-file = None; text is needed"),
        ({"webhook": {**HOOK, "secret-file": "missing"}}, "cannot be read"),
        ({"webhook": {**HOOK, "secret-file": "open"}}, "others can read it"),
        ({"webhook": {**HOOK, "timeout-s": 0}}, "seconds are needed"),
        ({"mail": {**MAIL, "to": ["ops"]}}, "an address is needed"),
        ({"mail": {**MAIL, "to": "a@b\nBcc: c@d"}}, "an address is needed"),
        ({"mail": {**MAIL, "from": "{owner}@lab.example"}}, "an address is needed"),
        ({"mail": {**MAIL, "to": []}}, "one address or more"),
        ({"mail": {**MAIL, "port": "25"}}, "1 to 65535"),
        ({"mail": {**MAIL, "user": "me", "password-file": "secret", "security": "none"}}, "unencrypted"),
        ({"mail": {**MAIL, "security": "ssl"}}, "one of starttls, tls, none"),
    ],
)
def test_what_makes_no_sense_is_said(path: Path, table: object, says: str) -> None:
    with pytest.raises(InputFileError, match=says) as error:
        read_notify(path, table)
    assert "pw@" not in str(error.value)
