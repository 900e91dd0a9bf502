"""Damaged, torn, foreign and forged checkpoints: the one before is used, and nothing of them is run."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")


from pollux.errors import CheckpointError, ForeignCheckpointError  # noqa: E402
from pollux.train import checkpoint_files as files  # noqa: E402
from pollux.train import tensor_file  # noqa: E402
from pollux.train.checkpoint import (  # noqa: E402
    CheckpointDirectory,
)
from tests.unit.train.checkpoints import info, names, newest_of_two, save, step_of  # noqa: E402

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
