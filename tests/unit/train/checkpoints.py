"""Small checkpoints to save, damage and compare."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

torch = pytest.importorskip("torch")


from pollux.train.checkpoint import (  # noqa: E402
    Checkpoint,
    CheckpointDirectory,
    CheckpointInfo,
)


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


def newest_of_two(path, at=CheckpointDirectory):
    directory = at(path)
    save(directory, 1)
    save(directory, 2)
    return directory, path / "step-000000000002"
