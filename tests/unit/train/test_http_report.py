"""Reports over HTTP, to a real server in a thread that can be told to misbehave."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from pollux.api.report import MAX_REPORT_BYTES, Report, read_report
from pollux.errors import InvalidValueError
from pollux.model.profile import Configuration, Timing
from pollux.train import http_report
from pollux.train.http_report import HttpReporter, addressed
from pollux.types import ThroughputParams
from tests.reports import report_fields

TIMING = (Configuration(1, 1, 8), Timing(0.1, 0.1, 5))


def a_report(**values: Any) -> Report:
    return Report(**report_fields(**{"accelerator": "cpu", **values}))


class Listener:
    def __init__(self) -> None:
        self.received: list[tuple[str, str | None, Report]] = []
        self.num_refused = 0
        self.status = 200
        self.answer: dict[str, Any] = {"params": None, "report_every_s": 0.05}
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if outer.status == 200:
                    report = read_report(body)
                    outer.received.append((self.path, self.headers["Authorization"], report))
                answer = json.dumps(outer.answer).encode()
                self.send_response(outer.status)
                self.send_header("Content-Length", str(len(answer)))
                if outer.status == 429:
                    self.send_header("Retry-After", "1")
                self.end_headers()
                self.wfile.write(answer)
                outer.num_refused += outer.status != 200

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=[0.02], daemon=True).start()


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener()
    yield made
    made.server.shutdown()
    made.server.server_close()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_report_arrives_with_the_jobs_name_and_token(listener):
    reporter = HttpReporter(listener.url, "secret", "a job/with a slash")
    told = dict(timings=(TIMING,), noise_scale_error=15.0, notes=("step 7: batch 32 -> 64",))
    reporter.send(a_report(**told, metrics={"loss": float("nan"), "best": 1}))
    until(lambda: listener.received)
    path, token, report = listener.received[0]
    assert path == "/api/v1/jobs/a%20job%2Fwith%20a%20slash/reports" and token == "Bearer secret"
    assert report.job == "a job/with a slash" and report.timings == (TIMING,)
    assert report.metrics == {"loss": "nan", "best": 1} and report.batch is not None
    assert (report.noise_scale_error, report.notes) == (15.0, ("step 7: batch 32 -> 64",))
    reporter.close()


def test_the_servers_answer_becomes_advice_once(listener):
    numbers = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 2.0]
    listener.answer = {"params": {"cpu": numbers, "other": [1.0] * 7}, "report_every_s": 0.05}
    reporter = HttpReporter(listener.url, "secret", "a")
    assert reporter.advice() is None
    reporter.send(a_report())
    until(lambda: reporter._advice is not None)
    assert reporter.advice() == ThroughputParams(*numbers)
    assert reporter.advice() is None
    reporter.close()


def test_a_value_that_a_study_waits_for_does_not_wait_for_its_turn(listener):
    listener.answer = {"params": None, "report_every_s": 300.0}
    reporter = HttpReporter(listener.url, "secret", "a")
    reporter.send(a_report(num_steps=1))
    until(lambda: reporter._every_s == 300.0)
    reporter.send(a_report(num_steps=2))
    reporter.send(a_report(num_steps=3, observed=((0.1, 2.0),)))
    reporter.send(a_report(num_steps=4, observed=((0.2, "nan"),)))
    until(lambda: len(listener.received) == 2 or reporter._pending is None)
    until(lambda: sum(len(report.observed) for _, _, report in listener.received) == 2)
    assert [one for _, _, report in listener.received for one in report.observed] == [(0.1, 2.0), (0.2, "nan")]
    reporter.close()


def test_the_last_value_of_a_trial_waits_for_a_server_that_is_restarted(listener, monkeypatch):
    monkeypatch.setattr(http_report, "LAST_WORD_S", 0.2)
    listener.status = 503
    reporter = HttpReporter(listener.url, "secret", "a")
    reporter.send(a_report(num_steps=9, observed=((1.0, 0.5),)))
    until(lambda: listener.num_refused > 0)
    back = threading.Timer(1.0, lambda: setattr(listener, "status", 200))
    back.start()
    reporter.close()
    assert [report.observed for _, _, report in listener.received] == [((1.0, 0.5),)]
    back.join()


@pytest.mark.parametrize("observed", [((1.0, 0.5),), ()])
def test_the_last_report_waits_while_the_job_reports_too_much(listener, observed):
    listener.status = 429
    reporter = HttpReporter(listener.url, "secret", "a")
    reporter.send(a_report(num_steps=9, observed=observed))
    until(lambda: listener.num_refused > 0 and reporter._pause_s == 1.0)  # as the server asks
    back = threading.Timer(0.7, lambda: setattr(listener, "status", 200))
    back.start()
    reporter.close()
    assert [report.observed for _, _, report in listener.received] == [observed]
    back.join()


def test_values_arrive_without_metrics_that_are_too_long(listener, caplog):
    reporter = HttpReporter(listener.url, "secret", "a")
    reporter.send(a_report(metrics={"image": "x" * MAX_REPORT_BYTES, "loss": 1.0}, observed=((0.5, 2.0),)))
    until(lambda: listener.received)
    (report,) = [report for _, _, report in listener.received]
    assert (report.observed, report.metrics) == (((0.5, 2.0),), {})
    assert "metrics are left out of reports: report of" in caplog.text
    reporter.close()


def test_what_cannot_be_sent_is_joined_with_what_comes_later(listener, monkeypatch):
    listener.status = 503
    reporter = HttpReporter(listener.url, "secret", "a")
    reporter.send(a_report(num_steps=1, timings=(TIMING,), notes=("first",)))
    until(lambda: reporter._pause_s > 0)
    reporter.send(a_report(num_steps=2, timings=(TIMING,), notes=("second", "third")))
    listener.status = 200
    until(lambda: listener.received)
    (report,) = [report for _, _, report in listener.received]
    assert report.num_steps == 2 and report.timings == (TIMING, TIMING)
    assert report.notes == ("first", "second", "third")
    reporter.close()


def test_nobody_there_is_no_reason_to_wait():
    reporter = HttpReporter("http://127.0.0.1:9", "secret", "a")
    begun = time.monotonic()
    for step in range(100):
        reporter.send(a_report(num_steps=step))
    assert time.monotonic() - begun < 30  # one that waits for each would take minutes
    reporter.close()
    assert time.monotonic() - begun < http_report.LAST_WORD_S + 60


def test_a_refused_report_is_dropped_and_said(listener, caplog):
    listener.status, listener.answer = 403, {"error": {"message": "not yours"}}
    reporter = HttpReporter(listener.url, "secret", "a")
    reporter.send(a_report())
    until(lambda: "not yours" in caplog.text)
    listener.status, listener.answer = 200, {"params": None, "report_every_s": 0.05}
    reporter.send(a_report(num_steps=7))
    until(lambda: listener.received)
    assert listener.received[0][2].num_steps == 7
    reporter.close()


def test_the_last_report_is_sent_when_the_run_is_over(listener):
    listener.answer = {"params": None, "report_every_s": 300}
    reporter = HttpReporter(listener.url, "secret", "a")
    reporter.send(a_report(num_steps=1))
    until(lambda: listener.received)
    reporter.send(a_report(num_steps=2))
    reporter.close()
    assert listener.received[-1][2].num_steps == 2


def test_the_environment_decides_who_is_told():
    assert HttpReporter.from_environment({"POLLUX_URL": "http://x", "POLLUX_TOKEN": "t"}) is None
    env = {"POLLUX_URL": "http://127.0.0.1:9", "POLLUX_TOKEN": "t", "POLLUX_JOB_ID": "a"}
    assert isinstance(HttpReporter.from_environment(env), HttpReporter)
    with pytest.raises(InvalidValueError, match="POLLUX_URL"):
        HttpReporter.from_environment({**env, "POLLUX_URL": "nowhere"})


def test_numbers_that_are_none_are_left_out_on_the_wire():
    odd = dict(noise_scale=float("inf"), noise_scale_error=float("nan"), goodput=float("nan"))
    report = addressed(a_report(**odd, efficiency=0.5), "a")
    assert (report.noise_scale, report.noise_scale_error, report.goodput) == (None, None, None)
    assert report.efficiency == 0.5


def test_a_server_that_refuses_is_complained_of_once(listener, caplog):
    """Not in every second of a training of days."""
    listener.status = 401
    reporter = HttpReporter(listener.url, "secret", "job")
    reporter._every_s = 0.01
    for num_refused in range(1, 4):
        reporter.send(a_report())
        until(lambda seen=num_refused: listener.num_refused >= seen)
    listener.status = 200
    reporter.send(a_report())
    until(lambda: listener.received)
    listener.status = 403
    reporter.send(a_report())
    until(lambda: listener.num_refused >= 4)
    reporter.close()
    assert [line.split(": ")[1][:3] for line in caplog.messages if "refuses" in line] == ["401", "403"]


def test_a_replica_that_was_given_up_is_told_once_and_sends_no_more(listener):
    listener.status, listener.answer = 409, {"error": {"type": "FencedError", "message": "'a-1' was given up"}}
    reporter = HttpReporter(listener.url, "secret", "a", "a-1")
    reporter._every_s = 0.01
    told = []
    reporter.on_fenced = lambda message: told.append(message) or True
    reporter.send(a_report())
    until(lambda: told)
    reporter._thread.join(10)
    assert not reporter._thread.is_alive()
    for step in range(5):
        reporter.send(a_report(num_steps=step))
    reporter.close()
    assert told == ["the server says: 'a-1' was given up"] and listener.num_refused == 1


def test_a_server_that_is_behind_is_not_believed(listener, caplog):
    """The owner of the replicas knows better: reports go on."""
    listener.status, listener.answer = 409, {"error": {"message": "unknown"}}
    reporter = HttpReporter(listener.url, "secret", "a", "a-1")
    reporter._every_s = 0.01
    reporter.on_fenced = lambda message: False
    for num_refused in (1, 2):
        reporter.send(a_report())
        until(lambda seen=num_refused: listener.num_refused >= seen)
    listener.status, listener.answer = 200, {"params": None, "report_every_s": 0.05}
    reporter.send(a_report(num_steps=7))
    until(lambda: listener.received)
    assert (listener.received[0][2].num_steps, listener.received[0][2].replica) == (7, "a-1")
    reporter.close()
    assert caplog.text.count("409") == 1


def test_the_replica_is_named_by_the_environment(listener):
    env = {"POLLUX_URL": listener.url, "POLLUX_TOKEN": "t", "POLLUX_JOB_ID": "a"}
    for more, expected in (({}, None), ({"POLLUX_REPLICA_ID": "a-7"}, "a-7")):
        reporter = HttpReporter.from_environment({**env, **more})
        assert reporter is not None
        reporter.send(a_report())
        until(lambda: listener.received)
        reporter.close()
        assert listener.received.pop()[2].replica == expected
