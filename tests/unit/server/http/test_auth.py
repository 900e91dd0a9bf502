"""Tokens: who has which, and what becomes of files that anybody could read."""

from __future__ import annotations

import logging
import os
import stat

import pytest

from pollux.errors import InputFileError, InvalidValueError
from pollux.server.http.auth import Access, Caller, check_host, is_loopback, load_token

OPERATOR = "operator-token-0123456789"
JOB = "job-token-0123456789"


def job_of_token(token):
    return {JOB: "mnist"}.get(token)


def test_a_token_is_made_once_and_for_its_owner_alone(tmp_path):
    path = tmp_path / "token"
    before = os.umask(0)
    try:
        token = load_token(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(token) >= 43  # 32 bytes
    assert load_token(path) == token
    assert [entry.name for entry in tmp_path.iterdir()] == ["token"]
    (tmp_path / "other").mkdir()
    assert load_token(tmp_path / "other" / "token") != token


def test_a_token_that_others_could_read_is_closed_to_them(tmp_path, caplog):
    path = tmp_path / "token"
    path.write_text(f"{OPERATOR}\n")
    path.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        assert load_token(path) == OPERATOR
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "644" in caplog.text


@pytest.mark.parametrize(
    "content", [b"", b"short\n", b"two words of a token\n", "schlüssel-schlüssel".encode(), b"\xff" * 20]
)
def test_a_file_without_a_token_is_refused(tmp_path, content):
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(InputFileError, match="delete the file"):
        load_token(path)
    assert path.read_bytes() == content


def test_a_crash_while_a_token_was_made_does_no_harm(tmp_path):
    (tmp_path / "token.new").write_text("")
    assert len(load_token(tmp_path / "token")) >= 43


def test_a_token_where_none_can_be_written(tmp_path):
    with pytest.raises(InputFileError, match="writable"):
        load_token(tmp_path / "missing" / "token")


def test_callers_are_told_by_their_tokens():
    access = Access(OPERATOR, job_of_token)
    assert access.caller(OPERATOR) == Caller()
    assert access.caller(JOB) == Caller(job="mnist")
    for token in (None, "", "x", OPERATOR[:-1], OPERATOR + "x", "schlüssel", "\udcff"):
        assert access.caller(token) is None


def test_what_callers_may_report():
    assert Caller().may_report_for("any")
    assert Caller(job="a").may_report_for("a")
    assert not Caller(job="a").may_report_for("b")


def test_without_tokens_everybody_is_the_operator_but_jobs():
    access = Access(None, job_of_token)
    assert access.caller(None) == access.caller("anything") == Caller()
    assert access.caller(JOB) == Caller(job="mnist")


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.3.2.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False)],
)
def test_loopback(host, expected):
    assert is_loopback(host) is expected
    check_host(host, needs_token=True)
    if expected:
        check_host(host, needs_token=False)
    else:
        with pytest.raises(InvalidValueError, match=r"other machines.*127\.0\.0\.1"):
            check_host(host, needs_token=False)


def test_a_host_nobody_knows():
    with pytest.raises(InvalidValueError, match="not known"):
        is_loopback("no such host")
