"""A job's curves as TensorBoard reads them: the files are taken apart by protobuf itself, with checksums of our own."""

from __future__ import annotations

import functools
import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pollux.api.report import Report
from pollux.api.round import RoundSummary
from pollux.cli.app import app
from pollux.client import Client, event_file, tensorboard
from pollux.client.tensorboard import export
from pollux.errors import InputFileError, InvalidValueError
from pollux.server.config import ServiceConfig
from pollux.server.service import Service
from tests.messages import filled
from tests.reports import report_fields
from tests.unit.server.fake_cluster import FakeCluster

protobuf = pytest.importorskip("google.protobuf")
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # noqa: E402

# What an event is, as tensorflow/core/util/event.proto and those it imports say: field, number, type, repeated.
MESSAGES: dict[str, list[tuple[str, int, str, bool]]] = {
    "Event": [
        *(("wall_time", 1, "DOUBLE", False), ("step", 2, "INT64", False)),
        *(("file_version", 3, "STRING", False), ("summary", 5, "Summary", False)),
    ],
    "Summary": [("value", 1, "Value", True)],
    "Value": [
        *(("tag", 1, "STRING", False), ("simple_value", 2, "FLOAT", False)),
        *(("tensor", 8, "Tensor", False), ("metadata", 9, "Metadata", False)),
    ],
    "Metadata": [("plugin_data", 1, "Plugin", False)],
    "Plugin": [("plugin_name", 1, "STRING", False)],
    "Tensor": [("dtype", 1, "INT32", False), ("shape", 2, "Shape", False), ("string_val", 8, "BYTES", True)],
    "Shape": [("dim", 2, "Dim", True)],
    "Dim": [("size", 1, "INT64", False)],
}


@functools.cache
def event_class() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="event.proto", package="t", syntax="proto3")
    field_types = descriptor_pb2.FieldDescriptorProto
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, number, kind, is_repeated in fields:
            added = message.field.add(name=field, number=number)
            added.label = field_types.LABEL_REPEATED if is_repeated else field_types.LABEL_OPTIONAL
            if kind in MESSAGES:
                added.type, added.type_name = field_types.TYPE_MESSAGE, f".t.{kind}"
            else:
                added.type = getattr(field_types, f"TYPE_{kind}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Event"))


def slow_crc32c(data: bytes) -> int:
    """Bit by bit, from the polynomial."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 * (value & 1))
    return ~value & 0xFFFFFFFF


def unmasked(stored: bytes) -> int:
    """The checksum of a record's part, with the mask of TFRecord taken off."""
    rotated = (struct.unpack("<I", stored)[0] - 0xA282EAD8) & 0xFFFFFFFF
    return (rotated >> 17 | rotated << 15) & 0xFFFFFFFF


def records(data: bytes) -> Iterator[bytes]:
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        assert unmasked(data[8:12]) == slow_crc32c(data[:8])
        body, rest = data[12 : 12 + length], data[12 + length :]
        assert unmasked(rest[:4]) == slow_crc32c(body)
        yield body
        data = rest[4:]


def read(path: Path) -> tuple[dict[str, list[tuple[int, float, float]]], dict[str, list[tuple[int, float, str]]]]:
    """Curves and texts by tag: step, time and value."""
    parsed = [event_class().FromString(record) for record in records(path.read_bytes())]
    assert parsed[0].file_version == "brain.Event:2"
    curves: dict[str, list[tuple[int, float, float]]] = {}
    texts: dict[str, list[tuple[int, float, str]]] = {}
    for event in parsed[1:]:
        (value,) = event.summary.value
        if value.HasField("tensor"):
            assert (value.metadata.plugin_data.plugin_name, value.tensor.dtype) == ("text", 7)
            assert [dim.size for dim in value.tensor.shape.dim] == [1]
            (words,) = value.tensor.string_val
            texts.setdefault(value.tag, []).append((event.step, event.wall_time, words.decode()))
        else:
            curves.setdefault(value.tag, []).append((event.step, event.wall_time, value.simple_value))
    return curves, texts


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[FakeCluster, Client]]:
    cluster = FakeCluster(tmp_path / "data")
    config = ServiceConfig(data_directory=tmp_path / "data", port=0)
    with Service(config, lambda *_: cluster), Client(data_directory=tmp_path / "data") as client:
        yield cluster, client


def tell(cluster: FakeCluster, job: str, at: float, **values: Any) -> None:
    cluster.told.append((job, at, Report(job=job, **report_fields(**values))))


def test_all_reports_become_points(served, tmp_path, monkeypatch):
    cluster, client = served
    job = client.submit(["sleep", "9"], name="bert", cwd="/", kind="fixed")
    client.submit(["sleep", "9"], name="other", cwd="/", kind="fixed")
    monkeypatch.setattr(tensorboard, "PAGE", 20)
    number = 45  # more than two pages of them
    for step in range(number):
        metrics = {"loss": 1 / (step + 1), "eval": {"accuracy": step}, "name": "x", "list": [1], "is_best": True}
        notes = ("step 20: batch 32 -> 64", "step 20: once more") if step == 2 else ()
        told = dict(num_steps=10 * step, num_replicas=1 + step % 2, noise_scale_error=7.0, notes=notes)
        tell(cluster, "bert", 1000.5 + step, **told, metrics=metrics)
        tell(cluster, "other", 1.0)
    done = export(job, tmp_path / "runs")
    assert (done.num_reports, done.path.parent) == (number, tmp_path / "runs" / "bert")
    curves, texts = read(done.path)
    assert {tag: len(points) for tag, points in curves.items()} | {"pollux/notes": 2} == dict(done.num_points)
    words = ["step 20: batch 32 -> 64", "step 20: once more"]
    assert texts == {"pollux/notes/text_summary": [(20, 1002.5, text) for text in words]}
    assert {value for _, _, value in curves["pollux/noise_scale_error"]} == {7.0}
    assert set(curves) >= {"pollux/goodput", "pollux/noise_scale", "pollux/gain", "pollux/total_batch"}
    assert curves["pollux/replicas"] == [(10 * step, 1000.5 + step, 1 + step % 2) for step in range(number)]
    assert curves["metrics/loss"][3] == (30, 1003.5, pytest.approx(0.25))
    assert curves["metrics/eval/accuracy"][-1][2] == number - 1 and curves["metrics/is_best"][0][2] == 1
    assert {tag for tag in curves if tag.startswith("metrics/")} == {
        *("metrics/loss", "metrics/eval/accuracy", "metrics/is_best")
    }
    first = done.path.read_bytes()
    assert export(job, tmp_path / "runs").path.read_bytes() == first  # replaced, not doubled
    assert len(list((tmp_path / "runs" / "bert").iterdir())) == 1


def test_what_is_no_number_stays_what_it_is_and_unknown_is_left_out(served, tmp_path):
    cluster, client = served
    job = client.submit(["sleep", "9"], name="bert", cwd="/", kind="fixed")
    for step, value in enumerate(("nan", "inf", "-inf", 1e300, -1e300, 2)):
        tell(cluster, "bert", 1.0 + step, num_steps=step, noise_scale=None, metrics={"loss": value})
    curves, _ = read(export(job, tmp_path).path)
    values = [value for _, _, value in curves["metrics/loss"]]
    assert math.isnan(values[0]) and values[1:] == [math.inf, -math.inf, math.inf, -math.inf, 2.0]
    assert "pollux/noise_scale" not in curves


def test_decisions_are_texts_at_the_step_of_their_time(served, tmp_path, monkeypatch):
    cluster, client = served
    job = client.submit(["sleep", "9"], name="bert", cwd="/", kind="fixed")
    submitted_at = job.view().submitted_at
    for step in range(3):
        tell(cluster, "bert", submitted_at + 10 * step, num_steps=100 * step)

    def round_(id_: int, at: float, name: str, *words: str) -> RoundSummary:
        return filled(RoundSummary, id=id_, at=at, trigger="model", changes=[dict(job=name)], words=words)

    rounds = [
        round_(1, submitted_at - 5, "bert"),  # of another job, which had that name before
        round_(2, submitted_at, "other"),
        round_(3, submitted_at + 12, "bert", "bert-2 gave 1 slot to bert: why <b>", "bert-2 waits", "x gave 2 to bert"),
        round_(4, submitted_at + 25, "bert", "bertha starts", "and 70 jobs more"),
    ]
    monkeypatch.setattr(
        cluster, "rounds", lambda since, limit: [one for one in rounds if one.id > (since or 0)][:limit]
    )
    done = export(job, tmp_path)
    _, texts = read(done.path)
    assert done.num_points["pollux/decisions"] == 2
    assert [(step, at - submitted_at) for step, at, _ in texts["pollux/decisions/text_summary"]] == [
        (100, pytest.approx(12)),
        (200, pytest.approx(25)),
    ]
    # By the round's id, as everywhere, in the server's words; all of those where it is not among them.
    assert [words for _, _, words in texts["pollux/decisions/text_summary"]] == [
        "#3 (model): bert-2 gave 1 slot to bert: why <b>; x gave 2 to bert",
        "#4 (model): bertha starts; and 70 jobs more",
    ]


def test_the_command_says_where(served, tmp_path):
    cluster, client = served
    client.submit(["sleep", "9"], name="bert", cwd="/", kind="fixed")
    command = ["export", "bert", "--tensorboard", str(tmp_path / "a folder"), "--data", str(tmp_path / "data")]
    nothing = CliRunner().invoke(app, command)
    assert nothing.exit_code == 2 and "has not reported anything" in nothing.stderr
    tell(cluster, "bert", 1.0)
    told = CliRunner().invoke(app, command)
    assert told.exit_code == 0, told.output
    path = Path(told.stdout.strip())
    assert path.is_file() and "tfevents" in path.name
    assert "tensorboard --logdir" in told.stderr and "a folder'" in told.stderr
    as_json = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert (as_json["job"], as_json["file"], as_json["num_reports"]) == ("bert", str(path), 1)
    unknown = CliRunner().invoke(app, ["export", "bart", *command[2:]])
    assert unknown.exit_code == 2 and "bert" in unknown.stderr
    assert CliRunner().invoke(app, ["export", "bert"]).exit_code == 2  # into what?


def test_a_folder_that_is_none(served, tmp_path):
    cluster, client = served
    job = client.submit(["sleep", "9"], name="bert", cwd="/", kind="fixed")
    with pytest.raises(InvalidValueError, match="'bert' is pending"):
        export(job, tmp_path)
    tell(cluster, "bert", 1.0)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputFileError, match="name another directory"):
        export(job, tmp_path / "file")


def test_the_checksum_is_the_published_one():
    assert event_file.crc32c(b"123456789") == 0xE3069283  # the check value of CRC-32C (RFC 3720, appendix B.4)
    assert event_file.crc32c(bytes(32)) == 0x8A9136AA


def test_numbers_of_every_length_come_back():
    for step in (0, 1, 127, 128, 1 << 35, (1 << 63) - 1, -1):
        (body,) = records(event_file.scalar("x" * 200, 0.5, step, 2.0**40))
        event = event_class().FromString(body)
        assert (event.step, event.wall_time, event.summary.value[0].tag) == (step, 2.0**40, "x" * 200)
