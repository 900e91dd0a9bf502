"""Checkpoints on real files: identity, every kind of damage, writers killed at random, a disk that refuses.

Where it makes sense, a folder is also used through its file:// URL, which goes the way of object stores.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import math
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from pollux.errors import CheckpointError, ForeignCheckpointError, InvalidValueError  # noqa: E402
from pollux.testing.examples import examples  # noqa: E402
from pollux.train import checkpoint_files as files  # noqa: E402
from pollux.train import tensor_file  # noqa: E402
from pollux.train.checkpoint import (  # noqa: E402
    AsyncSaver,
    Checkpoint,
    CheckpointDirectory,
    CheckpointInfo,
    checkpoint_interval_s,
)
from tests.long import first_of  # noqa: E402

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool)


@pytest.fixture(params=first_of(["folder", "URL"]))
def at(request):
    """Makes the CheckpointDirectory of a folder, by its path or by its URL."""

    def make(path, **options):
        return CheckpointDirectory(f"file://{path}" if request.param == "URL" else path, **options)

    make.is_url = request.param == "URL"
    return make


def info(step=1, signature="ours", **fields):
    return CheckpointInfo(step=step, epoch=0, signature=signature, **fields)


def state(step):
    return {"model/weight": torch.full((64,), float(step)), "model/bias": torch.arange(8) + step}


def save(directory, step, **fields):
    directory.save(state(step), f"blob {step}".encode(), info(step, **fields))


def step_of(checkpoint):
    """The step, after a look that everything in the checkpoint belongs to it."""
    assert isinstance(checkpoint, Checkpoint)
    step = checkpoint.info.step
    assert_same(checkpoint.tensors, state(step))
    assert checkpoint.blob == f"blob {step}".encode()
    return step


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        other = found[name]
        assert (other.dtype, other.shape, str(other.device)) == (tensor.dtype, tensor.shape, "cpu"), name
        # Bit patterns, since NaN is a value like any other here.
        ours, theirs = (x.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8) for x in (other, tensor))
        assert torch.equal(ours, theirs), name


def names(path):
    return sorted(os.listdir(path))


def temporaries(path):
    return [name for name in names(path) if name.startswith(".")]


def run(code, *arguments, **options):
    """Start a Python process that executes ``code``."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )


def finish(process):
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    return output


# Identity


def test_every_kind_of_tensor_comes_back(tmp_path, at):
    base = torch.randn(4, 6)
    tensors = {f"type/{dtype}": torch.randn(3, 5).mul(9).to(dtype) for dtype in DTYPES}
    tensors |= {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0),
        "empty matrix": torch.empty(0, 3, dtype=torch.int32),
        "transposed": base.T,
        "strided": base[1:, ::2],
        "shared": base,
        "shared again": base,
        "expanded": torch.ones(1, 3).expand(4, 3),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "parameter": torch.nn.Parameter(base.clone()),
        "not a number": torch.tensor([math.nan, math.inf, -0.0]),
        "dots.and/slashes": torch.ones(2),
        "": torch.zeros(1),
    }
    directory = at(tmp_path / "not" / "yet" / "there")
    given_info = info(7, generation=3, created_s=123.5, extra={"loss": 0.5, "names": ["a", "ü"]})
    directory.save(tensors, b"\x00\xffblob", given_info)
    found = directory.load("ours")
    assert_same(found.tensors, tensors)
    assert found.blob == b"\x00\xffblob"
    assert found.info == given_info == directory.latest()


def test_an_empty_state_comes_back(tmp_path, at):
    directory = at(tmp_path)
    directory.save({}, b"", info())
    assert directory.load("ours") == Checkpoint(tensors={}, blob=b"", info=directory.latest())


@st.composite
def small_tensors(draw):
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    values = draw(st.lists(st.integers(-100, 100), min_size=math.prod(shape), max_size=math.prod(shape)))
    tensor = torch.tensor(values, dtype=torch.float64).reshape(shape).to(draw(st.sampled_from(DTYPES)))
    return tensor.mT if tensor.ndim >= 2 and draw(st.booleans()) else tensor


@examples(25, deadline=None)
@given(tensors=st.dictionaries(st.text(max_size=8), small_tensors(), max_size=4), blob=st.binary(max_size=64))
def test_load_gives_what_was_saved(tensors, blob):
    with tempfile.TemporaryDirectory() as path:
        directory = CheckpointDirectory(path)
        directory.save(tensors, blob, info())
        found = directory.load("ours")
    assert_same(found.tensors, tensors)
    assert found.blob == blob


def test_nothing_saved_is_none(tmp_path, at):
    (tmp_path / "notes.txt").write_text("not a checkpoint")
    for path in (tmp_path, tmp_path / "missing"):
        assert at(path).load("ours") is None
        assert at(path).latest() is None
        assert at(path).list_all() == ()


def test_what_cannot_be_saved_is_refused_before_anything_is_written(tmp_path):
    directory = CheckpointDirectory(tmp_path / "none")
    sparse, meta = torch.eye(3).to_sparse(), torch.empty(3, device="meta")
    for tensors in ({"a": sparse}, {"a": meta}, {"pollux/blob": torch.ones(1)}, {"a": [1.0]}):
        with pytest.raises(InvalidValueError):
            directory.save(tensors, b"", info())
        with pytest.raises(InvalidValueError):
            AsyncSaver(directory).begin(tensors, b"", info())
    assert not directory.path.exists()
    for fields in ({"step": -1}, {"epoch": 0.5}, {"extra": {"a": object()}}):
        with pytest.raises(InvalidValueError):
            CheckpointInfo(**{"step": 0, "epoch": 0, "signature": "", **fields})
    with pytest.raises(InvalidValueError, match="keep is 0"):
        CheckpointDirectory(tmp_path, keep=0)


# What is kept


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_are_kept(tmp_path, at, keep):
    directory = at(tmp_path, keep=keep)
    for step in (1, 2, 9, 10, 11):
        save(directory, step)
        assert step_of(directory.load("ours")) == step
    assert [entry.step for entry in directory.list_all()] == [11, 10, 9][:keep]
    assert len(names(tmp_path)) == keep


def test_the_same_step_again_replaces_it(tmp_path, at):
    directory = at(tmp_path)
    save(directory, 4)
    for generation in (1, 2, 3):
        save(directory, 5, generation=generation)
        assert directory.load("ours").info.generation == generation
        assert [entry.step for entry in directory.list_all()] == [5, 4]


def test_a_step_back_is_kept_and_the_newer_ones_wait_to_be_overtaken(tmp_path, at):
    directory = at(tmp_path)
    for step in (10, 20, 12, 13, 14):  # the 20 was damaged, say, and training went on from 10
        save(directory, step)
    assert [entry.step for entry in directory.list_all()] == [20, 14, 13]
    save(directory, 21)
    assert [entry.step for entry in directory.list_all()] == [21, 20]


def test_another_models_checkpoints_are_neither_counted_nor_removed(tmp_path, at):
    directory = at(tmp_path)
    for step in (1, 2, 3):
        save(directory, step, signature="theirs")
    for step in (3, 4, 5):
        save(directory, step)
    assert [(entry.step, entry.signature) for entry in directory.list_all()] == [
        (5, "ours"),
        (4, "ours"),
        (3, "theirs"),
        (2, "theirs"),
    ]
    assert step_of(directory.load("ours")) == 5
    assert step_of(directory.load("theirs")) == 3


# Damage


def flip_a_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x01
    path.write_bytes(content)


def truncate(path):
    os.truncate(path, path.stat().st_size - 1)


FILES = ("tensors.safetensors", "manifest.json")
DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped": flip_a_byte,
    "truncated": truncate,
    "emptied": lambda path: os.truncate(path, 0),
    "removed": os.remove,
    "replaced by a folder": lambda path: (os.remove(path), path.mkdir()),
}
TORN_MANIFESTS = ("", "{", "[]", "null", '"text"', "{}", '{"version": 1}', '{"version": "1", "digest": 0}', "[" * 10**5)


def newest_of_two(path, at=CheckpointDirectory):
    directory = at(path)
    save(directory, 1)
    save(directory, 2)
    return directory, path / "step-000000000002"


def assert_previous_is_used(directory, newest, caplog):
    caplog.clear()
    assert step_of(directory.load("ours")) == 1
    (record,) = (record for record in caplog.records if record.levelno == logging.ERROR)
    assert str(newest) in record.getMessage()
    assert "Trying the one before" in record.getMessage()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_leads_to_the_previous_checkpoint(tmp_path, at, caplog, name, damage):
    directory, newest = newest_of_two(tmp_path, at)
    assert names(newest) == sorted(FILES)
    DAMAGES[damage](newest / name)
    if at.is_url and name == "manifest.json" and damage in ("removed", "replaced by a folder"):
        assert step_of(directory.load("ours")) == 1  # without a manifest it is no checkpoint at all
        return
    assert_previous_is_used(directory, newest, caplog)
    if damage == "truncated":
        assert directory.latest().step == 1
    shutil.rmtree(tmp_path / "step-000000000001")
    with pytest.raises(CheckpointError, match=r"step-000000000002: .*another directory, or remove") as raised:
        directory.load("ours")
    assert not isinstance(raised.value, ForeignCheckpointError)


@pytest.mark.parametrize("content", TORN_MANIFESTS, ids=range(len(TORN_MANIFESTS)))
def test_a_torn_manifest_leads_to_the_previous_checkpoint(tmp_path, at, caplog, content):
    directory, newest = newest_of_two(tmp_path, at)
    (newest / "manifest.json").write_text(content)
    assert_previous_is_used(directory, newest, caplog)


def test_any_changed_character_of_a_manifest_is_seen(tmp_path):
    directory = CheckpointDirectory(tmp_path)
    directory.save({"a": torch.ones(1)}, b"", info(created_s=123.5, extra={"loss": 1.25}))
    manifest = tmp_path / "step-000000000001" / "manifest.json"
    text = manifest.read_text()
    for position, character in enumerate(text):
        if not character.isspace():
            manifest.write_text(text[:position] + chr(ord(character) ^ 1) + text[position + 1 :])
            with pytest.raises(CheckpointError):
                directory.load("ours")


def test_an_empty_folder_or_a_file_by_a_checkpoints_name_is_damage(tmp_path, caplog):
    directory, newest = newest_of_two(tmp_path)
    shutil.rmtree(newest)
    newest.mkdir()
    assert_previous_is_used(directory, newest, caplog)
    newest.rmdir()
    newest.write_text("a file")
    assert_previous_is_used(directory, newest, caplog)
    save(directory, 2)
    assert step_of(directory.load("ours")) == 2


def test_damaged_ones_are_not_counted_and_go_when_enough_good_ones_are_newer(tmp_path, at):
    directory, newest = newest_of_two(tmp_path, at)
    truncate(newest / "tensors.safetensors")
    save(directory, 3)
    assert names(tmp_path) == ["step-000000000001", "step-000000000002", "step-000000000003"]
    save(directory, 4)
    assert names(tmp_path) == ["step-000000000003", "step-000000000004"]


def test_a_foreign_one_leads_to_the_previous_checkpoint(tmp_path, at, caplog):
    directory = at(tmp_path)
    save(directory, 1)
    save(directory, 2, signature="theirs")
    assert_previous_is_used(directory, tmp_path / "step-000000000002", caplog)
    assert "'theirs' instead of 'ours'" in caplog.text


def test_only_foreign_and_damaged_ones_are_listed_with_their_reasons(tmp_path, at):
    directory, newest = newest_of_two(tmp_path, at)
    truncate(newest / "tensors.safetensors")
    with pytest.raises(ForeignCheckpointError) as raised:
        directory.load("theirs")
    message = str(raised.value)
    assert "step-000000000001: it belongs to another model" in message
    assert "step-000000000002: its file tensors.safetensors has" in message
    assert "remove them to start from the beginning" in message


def test_a_newer_format_is_foreign(tmp_path, at):
    directory = at(tmp_path)
    save(directory, 1)
    manifest = tmp_path / "step-000000000001" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "version": 99}))
    with pytest.raises(ForeignCheckpointError, match="newer Pollux wrote it in format 99"):
        directory.load("ours")
    for step in (2, 3, 4):
        save(directory, step)
    assert "step-000000000001" in names(tmp_path)  # not ours to remove


def test_a_reader_survives_a_writer_that_removes_what_it_reads(tmp_path, at):
    writer = run(
        """
        import sys, torch
        from pollux.train.checkpoint import CheckpointDirectory, CheckpointInfo
        directory = CheckpointDirectory(sys.argv[1], keep=1)
        for step in range(1, 20):
            tensors = {"model/weight": torch.full((64,), float(step)), "model/bias": torch.arange(8) + step}
            info = CheckpointInfo(step=step, epoch=0, signature="ours")
            directory.save(tensors, f"blob {step}".encode(), info)
        """,
        at(tmp_path).path,
    )
    last = 0
    while writer.poll() is None:
        found = at(tmp_path).load("ours")
        if found is None:
            time.sleep(0.01)  # the writer still imports torch
        if found is not None or last:
            assert step_of(found) >= last
            last = found.info.step
    finish(writer)
    assert step_of(at(tmp_path).load("ours")) == 19


# Writers that die


def test_kill_at_any_moment_leaves_a_good_checkpoint_and_no_litter(tmp_path, at, monkeypatch):
    """One process forks writers, as importing torch for each would take seconds."""
    code = """
        import os, random, signal, sys, time, torch
        from pollux.train.checkpoint import CheckpointDirectory, CheckpointInfo
        path, folder, chance = sys.argv[1], sys.argv[2], random.Random(1)
        torch.set_num_threads(1)

        def save(step):
            tensors = {"a": torch.full((50_000,), float(step)), "b": torch.full((3,), step)}
            info = CheckpointInfo(step=step, epoch=0, signature="ours")
            CheckpointDirectory(path).save(tensors, str(step).encode(), info)

        def write(step):
            while True:
                save(step)
                step += chance.random() < 0.7  # else the same step again

        save(1)
        started = time.perf_counter()
        save(1)
        save_s, last = time.perf_counter() - started, 1
        for trial in range(20):
            child = os.fork()
            if child == 0:
                write(last + 1)
            time.sleep(chance.uniform(0.0, 5 * save_s))  # however slow this machine is today
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            found = CheckpointDirectory(path).load("ours")
            step = found.info.step
            assert step >= last, (step, last)
            assert found.tensors["a"].eq(step).all() and found.tensors["b"].eq(step).all()
            assert found.blob == str(step).encode()
            assert sum(name.startswith(".") for name in os.listdir(folder)) <= 2, os.listdir(folder)
            last = step
        print(last)
    """
    drafts = tmp_path if not at.is_url else tmp_path / "drafts"
    drafts.mkdir(exist_ok=True)
    directory = at(tmp_path / "store" if at.is_url else tmp_path)
    environment = {**os.environ, "TMPDIR": str(drafts)}
    assert int(finish(run(code, directory.path, drafts, env=environment))) >= 1
    assert directory.load("ours") is not None
    monkeypatch.setattr(tempfile, "tempdir", str(drafts))
    directory.save({}, b"", info(10**6))
    assert temporaries(drafts) == []
    assert len(directory.list_all()) == 2
    if at.is_url:  # halves that were being written stay for a day: nobody can tell whether their writer lives
        halves = [path for path in (tmp_path / "store").iterdir() if not (path / "manifest.json").exists()]
        for path in (file for half in halves for file in half.iterdir()):
            os.utime(path, (time.time() - 25 * 3600,) * 2)
        directory.save({}, b"", info(10**6 + 1))
    assert len(names(directory.path.removeprefix("file://") if at.is_url else tmp_path)) == 2


def leave_temporary(path, pid, start, host=None, age_s=0.0):
    folder = path / f".temporary.{host or files._host()}.{pid}.{start}.{len(os.listdir(path)):08x}"
    folder.mkdir()
    (folder / "tensors.safetensors").write_text("half")
    for touched in (folder / "tensors.safetensors", folder):
        os.utime(touched, (time.time() - age_s,) * 2)
    return folder.name


def test_only_dead_writers_temporaries_are_removed(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    ours, parent = (files._start_time(pid) for pid in (os.getpid(), os.getppid()))
    kept = {
        leave_temporary(tmp_path, os.getpid(), ours),
        leave_temporary(tmp_path, os.getppid(), parent),
        leave_temporary(tmp_path, dead.pid, 1, host="elsewhere.example.com-1", age_s=3600),
    }
    leave_temporary(tmp_path, dead.pid, 1)
    leave_temporary(tmp_path, os.getpid(), 1)  # another process that had our number
    leave_temporary(tmp_path, os.getpid(), ours, age_s=25 * 3600)
    leave_temporary(tmp_path, dead.pid, 1, host="elsewhere.example.com-1", age_s=25 * 3600)
    (tmp_path / ".hidden").mkdir()  # not ours at all
    save(CheckpointDirectory(tmp_path), 1)
    assert set(temporaries(tmp_path)) == kept | {".hidden"}


def test_a_zombie_counts_as_dead(tmp_path):
    child = os.posix_spawn(sys.executable, [sys.executable, "-c", ""], dict(os.environ))
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    try:
        leave_temporary(tmp_path, child, 1)
        assert not files._is_alive(child, files._start_time(os.getpid()))
        files.remove_stale(tmp_path)
        assert temporaries(tmp_path) == []
    finally:
        os.waitpid(child, 0)


# A disk that refuses

REFUSAL = """
    import resource, sys, torch
    from pollux.errors import CheckpointError
    from pollux.train.checkpoint import AsyncSaver, CheckpointDirectory, CheckpointInfo
    directory = CheckpointDirectory(sys.argv[1])
    saver = AsyncSaver(directory)
    state = {"a": torch.zeros(100_000)}, b"", CheckpointInfo(step=3, epoch=0, signature="ours")
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    for limit in (0, 1, 1_000, 100_000, 400_050):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        for save in (directory.save, saver.begin):
            try:
                save(*state)
                saver.wait()
            except CheckpointError as error:
                print("REFUSED", error)
    saver.close()  # the errors have been seen
"""


def test_a_full_disk_is_told_and_leaves_the_previous_ones(tmp_path):
    """A limit on the size of files stands for the disk: both fail in write()."""
    directory, _ = newest_of_two(tmp_path)
    before = names(tmp_path)
    output = finish(run(REFUSAL, tmp_path))
    lines = [line for line in output.splitlines() if line.startswith("REFUSED")]
    assert len(lines) == 10
    for line in lines:
        assert f"{tmp_path}: the checkpoint of step 3 could not be written: [Errno 27] File too large" in line
        assert "Make room" in line
    assert names(tmp_path) == before
    assert step_of(directory.load("ours")) == 2


def test_a_path_that_cannot_be_a_directory_is_told(tmp_path, at):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match="could not be written"):
            save(at(path), 1)
        if not at.is_url:  # in an object store nothing keeps a file and "folders" from having one name
            with pytest.raises(CheckpointError, match="cannot look for checkpoints"):
                at(path).load("ours")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_without_permission_is_told(tmp_path, at):
    directory, _ = newest_of_two(tmp_path, at)
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(CheckpointError, match="Permission denied"):
            save(directory, 3)
        assert step_of(directory.load("ours")) == 2
    finally:
        tmp_path.chmod(0o700)


# In the background


def big_state(value):
    return {"a": torch.full((4_000_000,), float(value)), "b": torch.full((3,), value)}


def test_the_callers_tensors_may_change_at_once(tmp_path, at):
    directory = at(tmp_path)
    saver = AsyncSaver(directory)
    tensors, expected = state(1), state(1)
    blob = bytearray(b"blob 1")
    for _ in range(3):  # later rounds reuse the copies
        assert saver.begin(tensors, blob, info(1))
        for tensor in tensors.values():
            tensor.zero_()
        blob[:] = b"......"
        saver.wait(60)
        assert_same(directory.load("ours").tensors, expected)
        assert directory.load("ours").blob == b"blob 1"
        tensors, blob = state(1), bytearray(b"blob 1")
    assert saver.last_stall_s > 0
    assert saver.last_write_s > 0
    assert not saver.is_busy
    saver.close()


def test_a_second_begin_while_busy_does_nothing(tmp_path, at):
    directory = at(tmp_path)
    saver = AsyncSaver(directory)
    assert saver.last_stall_s is None
    assert saver.last_write_s is None
    assert saver.begin(big_state(1), b"", info(1))
    stall_s = saver.last_stall_s
    assert not saver.begin(big_state(2), b"", info(2))
    assert saver.is_busy
    assert saver.last_stall_s == stall_s
    with pytest.raises(CheckpointError, match=r"still being written after 0\.0 s"):
        saver.wait(0.0)
    saver.wait()
    assert directory.latest().step == 1
    assert_same(directory.load("ours").tensors, big_state(1))
    assert saver.begin(big_state(2), b"", info(2))
    saver.close()
    assert directory.load("ours").info.step == 2


def test_shapes_types_and_names_may_change_from_save_to_save(tmp_path):
    directory = CheckpointDirectory(tmp_path)
    saver = AsyncSaver(directory)
    base = torch.arange(6.0).reshape(2, 3)
    for step, tensors in enumerate(
        ({"a": base}, {"a": base.T, "b": base.half()}, {"a": base.int()}, {"c": base[:, 1]})
    ):
        saver.begin(tensors, b"", info(step))
        saver.wait()
        assert_same(directory.load("ours").tensors, tensors)


def test_shared_tensors_are_copied_once(tmp_path):
    directory = CheckpointDirectory(tmp_path)
    saver = AsyncSaver(directory)
    base = torch.randn(4, 6)
    tensors = {"a": base, "tied": base.view(4, 6), "part": base[:2], "turned": base.view(6, 4), "copy": base.clone()}
    saver.begin(tensors, b"", info())
    saver.wait()
    assert_same(directory.load("ours").tensors, tensors)
    assert {name for name, _ in saver._buffers} == {"a", "part", "turned", "copy"}


@pytest.mark.parametrize("way", ["wait", "begin", "close"])
def test_an_error_surfaces_once(tmp_path, caplog, way):
    path = tmp_path / "file"
    path.write_text("")
    saver = AsyncSaver(CheckpointDirectory(path))
    saver.begin(state(1), b"", info(1))
    while saver.is_busy:
        time.sleep(0.001)
    assert "saving step 1 failed" in caplog.text
    with pytest.raises(CheckpointError, match="could not be written"):
        saver.begin(state(2), b"", info(2)) if way == "begin" else getattr(saver, way)()
    saver.wait()
    path.unlink()
    if way == "close":
        saver.close()
        with pytest.raises(CheckpointError, match="closed"):
            saver.begin(state(2), b"", info(2))
    else:
        assert saver.begin(state(2), b"blob 2", info(2))
        saver.wait()
        assert step_of(CheckpointDirectory(path).load("ours")) == 2


def test_a_program_that_ends_waits_for_the_write_under_way_only(tmp_path):
    code = """
        import sys, torch
        from pollux.train.checkpoint import AsyncSaver, CheckpointDirectory, CheckpointInfo
        saver = AsyncSaver(CheckpointDirectory(sys.argv[1]))
        for step in (1, 2):
            saver.begin({"a": torch.ones(1_000_000)}, b"", CheckpointInfo(step=step, epoch=0, signature="ours"))
            if step == 1:
                saver.wait()
        assert saver.is_busy
    """
    finish(run(code, tmp_path))
    assert CheckpointDirectory(tmp_path).load("ours").info.step == 2
    assert temporaries(tmp_path) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_device_tensors_are_copied_in_stream_order_without_waiting(tmp_path):
    directory = CheckpointDirectory(tmp_path)
    saver = AsyncSaver(directory)
    weight, tied = torch.zeros(1 << 20, device="cuda"), torch.zeros(3, device="cuda")
    tensors = {
        "weight": weight,
        "turned": weight.view(1024, 1024).T,
        "tied": tied,
        "again": tied,
        "host": torch.ones(2),
    }
    for step in (1, 2, 3):
        torch.cuda.synchronize()
        if step > 1:  # the first allocates pinned memory, for which CUDA waits
            pinned = {key: buffer.data_ptr() for key, buffer in saver._buffers.items()}
            torch.cuda.set_sync_debug_mode("error")
        try:
            torch.cuda._sleep(500_000_000)  # about 0.3 s: what follows is queued behind it
            weight.fill_(step)
            assert saver.begin(tensors, b"", info(step))
            weight.fill_(-1)
            if step > 1:
                assert not torch.cuda.current_stream().query()  # the device is still asleep: nobody waited for it
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if step > 1:
            assert saver.last_stall_s < 0.05
            assert {key: buffer.data_ptr() for key, buffer in saver._buffers.items()} == pinned
        saver.wait()
        found = directory.load("ours")
        assert found.tensors["weight"].eq(step).all()
        assert found.tensors["turned"].eq(step).all()
        assert found.info.step == step
    assert all(saver._buffers[key].is_pinned() == key[1] for key in saver._buffers)
    assert ("again", True) not in saver._buffers
    on_device = directory.load("ours", device="cuda")
    assert all(tensor.is_cuda for tensor in on_device.tensors.values())
    assert on_device.tensors["weight"].eq(3).all()
    directory.save({"weight": weight}, b"", info(4))
    assert directory.load("ours").tensors["weight"].eq(-1).all()


# How often


@pytest.mark.parametrize(
    ("cost_s", "mtbf_s", "expected_s"),
    [
        # sqrt(2 * 5 * 3600) = 189.737; times 1 + 0.026352 / 3 + 0.000694 / 9; less 5
        (5.0, 3600.0, 186.418),
        # sqrt(2 * 60 * 24 * 3600) = 3219.938; times 1 + 0.018634 / 3 + 0.000347 / 9; less 60
        (60.0, 24 * 3600.0, 3180.062),
        (300.0, 100.0, 100.0),  # a checkpoint takes longer than 2 M: the interval is M
        (0.0, 3600.0, 30.0),
        (0.001, 3600.0, 30.0),
        (5.0, math.inf, 3600.0),
        (0.0, math.inf, 30.0),
    ],
)
def test_interval_is_dalys(cost_s, mtbf_s, expected_s):
    assert checkpoint_interval_s(cost_s, mtbf_s) == pytest.approx(expected_s, abs=2e-3)


@pytest.mark.parametrize("cost_s", [0.1, 1.0, 10.0, 100.0])
@pytest.mark.parametrize("mtbf_s", [300.0, 3600.0, 86400.0])
def test_interval_minimises_the_expected_time(cost_s, mtbf_s):
    """Against Daly's full model: a segment of τ + δ without failure is expected to take M(exp((τ+δ)/M) - 1)."""

    def time_per_work(interval_s):
        return mtbf_s * math.expm1((interval_s + cost_s) / mtbf_s) / interval_s

    interval_s = checkpoint_interval_s(cost_s, mtbf_s, shortest_s=1e-3, longest_s=1e9)
    best_s = min((cost_s * 1.002**k for k in range(-1000, 5000) if cost_s * 1.002**k < 9 * mtbf_s), key=time_per_work)
    # The series ends after the third term, which is good to 2 % even at δ = M/3; the time lost hardly notices.
    assert interval_s == pytest.approx(best_s, rel=0.02)
    assert time_per_work(interval_s) == pytest.approx(time_per_work(best_s), rel=1e-4)


@pytest.mark.parametrize(
    "arguments",
    [(-1.0, 1.0), (math.nan, 1.0), (math.inf, 1.0), (1.0, 0.0), (1.0, math.nan), (1.0, -5.0)],
)
def test_interval_refuses_what_cannot_be(arguments):
    with pytest.raises(InvalidValueError):
        checkpoint_interval_s(*arguments)
    with pytest.raises(InvalidValueError, match="bounds"):
        checkpoint_interval_s(1.0, 1.0, shortest_s=10.0, longest_s=5.0)


# Attacks: another program has written to the folder, and knows how to make a manifest.


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def forge(folder: Path, replace: Callable[[Path], None]) -> None:
    """Change the files of a checkpoint and seal them anew."""
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").unlink()
    for path in folder.iterdir():
        replace(path)
    files.seal(folder, manifest["info"])


def test_a_forged_checkpoint_runs_nothing(tmp_path):
    root, proof = tmp_path / "checkpoints", tmp_path / "proof"
    directory = CheckpointDirectory(root)
    save(directory, 1)
    (folder,) = root.iterdir()
    bombs = [pickle.dumps(Bomb(proof)), torch_pickle(Bomb(proof))]
    pickle.loads(bombs[0])
    assert proof.exists(), "the bomb does not work"
    for bomb in bombs:
        proof.unlink(missing_ok=True)
        forge(folder, lambda path, bomb=bomb: path.write_bytes(bomb))
        with pytest.raises(CheckpointError, match="none of the 1 checkpoints there can be used"):
            directory.load("ours")
        assert not proof.exists()


def torch_pickle(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def header(**entries: object) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        (10**12).to_bytes(8, "little") + b"{}",
        header(a=1),
        header(a={"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}),  # beyond the end
        header(a={"dtype": "F32", "shape": [10**15], "data_offsets": [0, 4 * 10**15]}),
        header(a={"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}) + bytes(8),
        header(a={"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}) + bytes(8),
        header(a={"dtype": "OBJECT", "shape": [1], "data_offsets": [0, 8]}) + bytes(8),
        header(a={"dtype": "U8", "shape": [1.0], "data_offsets": [0, 1]}) + bytes(8),
        header(a={"dtype": "F32", "shape": [True], "data_offsets": [0, 4]})[:-3],
    ],
)
def test_a_file_of_tensors_that_is_none_is_refused(tmp_path, content):
    (tmp_path / "tensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="is no file of tensors"):
        tensor_file.read_tensors(tmp_path / "tensors", torch.device("cpu"))


def test_tensors_of_every_type_come_back(tmp_path):
    tensors = {str(dtype): torch.ones(3, 2).to(dtype) for dtype in tensor_file._NAMES}
    tensors |= {"none": torch.empty(0, 5), "one": torch.tensor(7), "turned": torch.arange(6).reshape(2, 3).t()}
    tensor_file.write_tensors(tensors, tmp_path / "tensors")
    found = tensor_file.read_tensors(tmp_path / "tensors", torch.device("cpu"))
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert found[name].contiguous().view(-1).tolist() == tensor.contiguous().view(-1).tolist()


def test_a_name_that_leads_out_of_the_folder_is_refused(tmp_path):
    directory = CheckpointDirectory(tmp_path / "checkpoints")
    save(directory, 1)
    (folder,) = (tmp_path / "checkpoints").iterdir()
    content = json.loads((folder / "manifest.json").read_text())
    (tmp_path / "outside").write_text("x")
    del content["digest"]
    content["files"]["../../outside"] = {"size_bytes": 1, "digest": hashlib.sha256(b"x").hexdigest()}
    content["digest"] = files._digest(content)
    (folder / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"names '../../outside', which is not a plain file name"):
        directory.load("ours")
