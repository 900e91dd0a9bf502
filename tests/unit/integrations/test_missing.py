"""A framework that is not installed is said, with how to get it; nothing loads one that was not asked for."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

pytest.importorskip("torch")


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [
        ("huggingface", "transformers", "hf"),
        ("accelerate", "accelerate", "hf"),
        ("lightning", "lightning", "lightning"),
    ],
)
def test_a_framework_that_is_missing_is_named_with_its_extra(module, package, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    for name in [name for name in sys.modules if name.startswith(f"pollux.integrations.{module}")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError) as raised:
        importlib.import_module(f"pollux.integrations.{module}")
    assert str(raised.value) == f'{package} is not installed: pip install "pollux-scheduler[{extra}]"'


def test_a_framework_is_loaded_only_when_it_is_asked_for():
    asked = "sorted({'transformers', 'accelerate', 'lightning'} & {*sys.modules})"
    code = f"import sys, pollux.train.run, pollux.integrations; print({asked})"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
