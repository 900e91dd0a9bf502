"""A job that is resized by restart: what a script sees, what it tells, and when it leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest

from pollux import elastic
from pollux.api.codec import encode
from pollux.api.report import ReportAnswer, decode_report
from pollux.elastic.__main__ import main
from pollux.elastic.shared_files import SharedFiles
from pollux.errors import InvalidValueError, PeerLostError
from pollux.types import BatchLimits, ThroughputParams

THETA = ThroughputParams(0.01, 0.0001, 0.1, 0.0, 0.01, 0.0, 1.0)


@pytest.fixture(autouse=True)
def handler_of_before():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


class Server:
    """Takes reports as the server does, and answers with a model."""

    def __init__(self) -> None:
        self.reports: list[dict] = []
        self.status = 200
        self.answered: list[int] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.paths.append((self.path, self.headers["Authorization"]))
                outer.reports.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                body = json.dumps(encode(ReportAnswer(params={"cpu": THETA}, report_every_s=0.05))).encode()
                outer.answered.append(outer.status)
                self.send_response(outer.status)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None: ...

        self.paths: list[tuple[str, str]] = []
        self._http = HTTPServer(("127.0.0.1", 0), Handler)
        self.env = {
            "POLLUX_URL": f"http://127.0.0.1:{self._http.server_port}",
            "POLLUX_TOKEN": "secret",
            "POLLUX_JOB_ID": "mnist",
            "POLLUX_REPLICA_ID": "mnist.3-4",
            "POLLUX_GENERATION": "3",
        }
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(10)


@pytest.fixture
def server():
    made = Server()
    yield made
    made.close()


def ranks(folder: Path, size: int, start: int = 0) -> list[elastic.Job]:
    """All replicas of a start, in one process."""
    return [
        elastic.join(
            batch_size=12,
            total_examples=1200,
            env={
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                "POLLUX_REPLICA_ID": f"job-{start + rank}",
                "POLLUX_CHECKPOINT_DIR": str(folder),
            },
        )
        for rank in range(size)
    ]


def test_alone_it_needs_nothing():
    with elastic.join(batch_size=8, total_examples=20, env={}) as job:
        assert (job.rank, job.size, job.batch.total, job.progress) == (0, 1, 8, 0.0)
        seen = []
        while not job.is_done:
            seen += job.positions
            job.step()
        assert seen == list(range(24))
        assert (job.num_steps, job.progress, job.should_leave()) == (3, 1.0, False)
        assert len(job.addresses()) == 1


def test_every_position_is_used_once_at_any_sizes(tmp_path):
    seen, state = [], None
    for number, size in enumerate((1, 3, 2, 4)):
        jobs = ranks(tmp_path, size, start=10 * number)
        for job in jobs:
            if state is not None:
                job.load_state_dict(state)
        for _ in range(5):
            for job in jobs:
                seen += job.positions
            for job in jobs:
                job.step()
        state = json.loads(json.dumps(jobs[0].state_dict()))
    assert sorted(seen) == list(range(len(seen))) and len(seen) == 20 * 12


def test_all_replicas_leave_after_the_same_step(tmp_path):
    jobs = ranks(tmp_path, 3)
    left: dict[int, int] = {}
    for step in range(6):
        if step == 2:  # the handler is that of the job that was made last: rank 2 is asked before rank 0
            os.kill(os.getpid(), signal.SIGTERM)
            assert jobs[2].is_asked_to_leave and not jobs[0].is_asked_to_leave
        if step == 3:
            jobs[0]._receive(signal.SIGTERM, None)
        for job in jobs:
            job.step()
        # Rank 1 looks first: it may not be ahead of what rank 0 decides.
        for job in (jobs[1], jobs[0], jobs[2]):
            if job.should_leave():
                left.setdefault(job.rank, job.num_steps)
    assert left == {0: 5, 1: 5, 2: 5}


def test_a_framework_that_takes_the_signal_does_not_keep_it():
    job = elastic.join(batch_size=1, env={})
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    job.step()
    os.kill(os.getpid(), signal.SIGTERM)
    assert job.is_asked_to_leave and job.should_leave()


def test_a_start_does_not_heed_the_file_of_an_earlier_one(tmp_path):
    first = ranks(tmp_path, 2)
    first[0]._receive(signal.SIGTERM, None)
    first[0].step()
    first[0].should_leave()
    assert list((tmp_path / ".pollux-elastic").glob("*leave"))
    second = ranks(tmp_path, 2, start=2)
    for job in second:
        job.step()
        assert not job.should_leave()
    assert not list((tmp_path / ".pollux-elastic").glob("*leave"))


def test_leaving_ends_the_process_with_143():
    with pytest.raises(SystemExit) as left:
        elastic.join(batch_size=1, env={}).leave()
    assert left.value.code == 143


def test_replicas_find_each_other(tmp_path):
    jobs, found = ranks(tmp_path, 3), {}
    threads = [threading.Thread(target=lambda job=job: found.setdefault(job.rank, job.addresses(10.0))) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found[0] == found[1] == found[2] and len(set(found[0])) == 3
    with pytest.raises(PeerLostError, match="address-7"):
        SharedFiles(tmp_path, "x").wait_for(["address-7"], 0.05)


def test_the_noise_scale_is_found_again():
    """Gradients of 50 numbers with |G|² = 4 and tr(Σ) = 800: φ is 200 examples."""
    generator, mean = np.random.default_rng(1), np.zeros(50)
    mean[0] = 2.0
    job = elastic.join(batch_size=32, max_batch_size=512, env={})
    seen = []
    for _ in range(400):
        small = mean + generator.normal(scale=4 / np.sqrt(16), size=(4, 50))  # four replicas with 16 examples each
        large = small.mean(axis=0)
        job.observe_noise(16, float((small**2).sum(axis=1).mean()), 64, float((large**2).sum()))
        job.step()
        seen.append(job.noise_scale)
    assert seen[3] is None
    assert np.median(seen[40:]) == pytest.approx(200, rel=0.15)
    job.observe_noise(16, float("nan"), 64, 1.0)  # a step that overflowed changes nothing
    assert job.noise_scale == seen[-1]
    with pytest.raises(InvalidValueError, match="must be smaller"):
        job.observe_noise(64, 1.0, 64, 1.0)


def test_reports_are_what_the_server_reads(server):
    with elastic.join(batch_size=32, max_batch_size=256, total_examples=640, env=server.env) as job:
        for number in range(10):
            job.observe_noise(16, 3.0, 32, 2.0)
            time.sleep(0.02)
            job.step(loss=0.5, odd=float("nan"), number=number)
    assert server.paths[0] == ("/api/v1/jobs/mnist/reports", "Bearer secret")
    reports = [decode_report(report) for report in server.reports]
    last = reports[-1]
    assert (last.job, last.replica, last.generation) == ("mnist", "mnist.3-4", 3)
    assert (last.num_steps, last.progress, last.remaining_examples) == (10, 0.5, 320)
    assert last.batch == BatchLimits(initial=32, maximum=256, device_max=256)
    assert last.noise_scale == pytest.approx(32.0)
    ((configuration, timing),) = last.timings
    assert configuration == (1, 1, 32) and 0.015 < timing.step_s < 0.2 and timing.grad_s == timing.step_s
    assert last.metrics == {"loss": 0.5, "odd": "nan", "number": 9}
    assert job.state_dict()["theta"] == list(THETA)


def test_a_model_of_its_speed_and_its_noise_make_the_batch_of_the_next_start(server):
    with elastic.join(batch_size=32, max_batch_size=256, env=server.env) as job:
        for _ in range(8):
            job.observe_noise(16, 10.0, 32, 5.05)
            job.step()
            time.sleep(0.03)
    state = json.loads(json.dumps(job.state_dict()))
    assert state["theta"] == list(THETA) and state["grad_s"][0][0] == 32
    again = elastic.join(batch_size=32, max_batch_size=256, env={})
    assert (again.batch.total, again.gain) == (32, 1.0)
    again.load_state_dict(state)
    assert again.batch.total > 64 and 1 < again.gain < again.batch.total / 32
    with pytest.raises(InvalidValueError, match="state_dict"):
        again.load_state_dict({**state, "version": 9})
    again.step()
    with pytest.raises(InvalidValueError, match="after 1 steps"):
        again.load_state_dict(state)


def test_the_last_report_waits_while_the_job_reports_too_much(server):
    server.status = 429
    with elastic.join(batch_size=8, total_examples=16, env=server.env) as job:
        job.step()
        job.step(loss=0.5)
        back = threading.Timer(0.7, lambda: setattr(server, "status", 200))
        back.start()
    back.join()
    assert server.answered[0] == 429 and server.answered[-1] == 200
    assert (server.reports[-1]["num_steps"], server.reports[-1]["metrics"]) == (2, {"loss": 0.5})


def test_a_replaced_replica_stops_reporting(server):
    server.status = 409
    with elastic.join(batch_size=1, env=server.env) as job:
        for _ in range(10):
            job.step()
            time.sleep(0.05)
    assert len(server.reports) == 1


def test_training_goes_on_without_a_server(server):
    server.close()
    with elastic.join(batch_size=1, env=server.env) as job:
        job.step()
        assert job.num_steps == 1


@pytest.mark.parametrize(
    ("env", "options", "message"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, {}, "counted from 0"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, {}, "RANK is 'x'"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, {}, "a folder that all of them reach"),
        ({"RANK": "0", "WORLD_SIZE": "2", "POLLUX_CHECKPOINT_DIR": "s3://b/x"}, {}, "checkpoints go to s3://b/x"),
        ({}, {"total_examples": 0}, "total_examples is 0"),
        ({"POLLUX_URL": "7077", "POLLUX_TOKEN": "x", "POLLUX_JOB_ID": "x"}, {}, "POLLUX_URL is '7077'"),
    ],
)
def test_an_environment_that_cannot_be_is_refused(env, options, message):
    with pytest.raises(InvalidValueError, match=message):
        elastic.join(batch_size=4, env=env, **options)


# The command line of shell scripts ------------------------------------------------------------


def test_a_shell_script_reports(server, monkeypatch):
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WORLD_SIZE", "2")
    told = ["--done", "30", "--total", "120", "--step-s", "0.5", "--metric", "loss=0.25"]
    assert main(["report", *told, "--batch", "10"]) == 0
    assert main(["report", *told, "--per-replica", "5"]) == 0
    shared, own = [decode_report(report) for report in server.reports]
    assert (shared.progress, shared.remaining_examples, shared.total_batch) == (0.25, 90, 10)
    assert shared.batch.maximum == 10 and shared.metrics == {"loss": "0.25"}
    assert own.batch.maximum > 1000 and own.total_batch == 10 and own.efficiency == pytest.approx(1.0)
    assert own.timings[0][0] == (1, 2, 5)
    monkeypatch.setenv("RANK", "1")
    assert main(["report", *told, "--batch", "10"]) == 0
    assert len(server.reports) == 2  # rank 0 alone reports


def test_a_shell_script_is_told_what_is_wrong(server, monkeypatch, capsys):
    assert main(["report", "--done", "1", "--batch", "1"]) == 0
    assert "not in a cluster" in capsys.readouterr().err
    for arguments, message in (
        (["--done", "-1", "--batch", "1"], "--done is -1"),
        (["--done", "1", "--batch", "0"], "--batch is 0"),
        (["--done", "1", "--batch", "1", "--step-s", "0"], "--step-s is 0"),
        (["--done", "1", "--batch", "1", "--metric", "x"], "NAME=VALUE"),
    ):
        assert main(["report", *arguments]) == 2
        assert message in capsys.readouterr().err
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    server.status = 422
    assert main(["report", "--done", "1", "--batch", "1"]) == 0
    assert "422" in capsys.readouterr().err


def test_it_needs_the_standard_library_alone():
    code = (
        "import sys; before = set(sys.modules); import pollux.elastic, pollux.elastic.__main__;"
        "print(*{name.split('.')[0] for name in set(sys.modules) - before})"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    foreign = {name for name in loaded if not name.startswith("_")} - set(sys.stdlib_module_names)
    assert foreign == {"pollux"}
