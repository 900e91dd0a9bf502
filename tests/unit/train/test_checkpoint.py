"""Checkpoints on real files: identity, which are kept, writers killed at random, a disk that refuses."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import time

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from pollux.errors import CheckpointError, InvalidValueError  # noqa: E402
from pollux.testing.examples import examples  # noqa: E402
from pollux.train import checkpoint_files as files  # noqa: E402
from pollux.train.checkpoint import (  # noqa: E402
    AsyncSaver,
    Checkpoint,
    CheckpointDirectory,
    CheckpointInfo,
)
from tests.long import long  # noqa: E402
from tests.unit.train.checkpoints import (  # noqa: E402
    assert_same,
    finish,
    info,
    names,
    newest_of_two,
    run,
    save,
    step_of,
    temporaries,
)

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool)


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


@long
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
    *warnings, last = finish(run(code, directory.path, drafts, env=environment)).splitlines()
    assert int(last) >= 1
    assert at.is_url or warnings == []  # a file:// has half a manifest where its writer was killed; that is passed over
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
