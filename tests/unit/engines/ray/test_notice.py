"""The notice that a machine will be taken away: from a file and from a metadata server; and a disk that is full."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pollux.engines.ray.notice import FILE, HEADER, URL, DiskWatch, NoticeWatch
from tests.unit.engines.bench import until


class _Metadata(BaseHTTPRequestHandler):
    answer = (404, b"")

    def do_GET(self) -> None:
        code, body = type(self).answer if self.headers.get("Metadata-Flavor") == "Google" else (403, b"")
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def metadata() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Metadata)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/preempted"
    server.shutdown()
    server.server_close()


def test_a_file_is_a_notice_as_long_as_it_is_there(tmp_path: Path) -> None:
    path = tmp_path / "notice"
    with closing(NoticeWatch({FILE: str(path)}, period_s=0.02)) as watch:
        assert watch.reason == ""
        path.write_text("spot: terminate at 12:00\x1b[31m\nmore\n")
        until(lambda: watch.reason == "its machine is taken away soon: spot: terminate at 12:00 [31m", "the notice")
        path.unlink()
        until(lambda: watch.reason == "", "its end")
    until(lambda: "pollux-notice" not in {thread.name for thread in threading.enumerate()}, "its thread's end")


def test_a_metadata_server_tells_when_it_answers(metadata: str) -> None:
    answers = (((200, b"FALSE"), False), ((200, b"TRUE"), True), ((404, b""), False), ((200, b""), True))
    with closing(NoticeWatch({URL: metadata, HEADER: "Metadata-Flavor: Google"}, period_s=0.02)) as watch:
        for answer, is_told in answers:
            _Metadata.answer = answer
            until(lambda is_told=is_told: bool(watch.reason) == is_told, f"{answer}")  # type: ignore[misc]
    with closing(NoticeWatch({URL: "file:///etc/passwd"})) as watch:
        assert watch._look() == ""


def test_a_full_disk_is_a_problem_until_there_is_some_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 100 << 20
    monkeypatch.setattr("pollux.engines.ray.notice.free_bytes", lambda _: free)
    watch = DiskWatch(str(tmp_path), period_s=0.0)
    assert watch.problem() == ""
    free = 10 << 20
    assert watch.problem() == f"its disk is full: 10 MiB free at {tmp_path}, 64 MiB are needed"
    free = 66 << 20
    assert watch.problem().startswith("its disk is full: 66 MiB")  # a little more would be full again at once
    free = 90 << 20
    assert watch.problem() == ""


def test_the_disk_is_looked_at_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    monkeypatch.setattr("pollux.engines.ray.notice.free_bytes", lambda path: looks.append(path) or (1 << 40))
    watch = DiskWatch(str(tmp_path), period_s=60.0)
    for _ in range(5):
        assert watch.problem() == ""
    assert looks == [str(tmp_path)]
