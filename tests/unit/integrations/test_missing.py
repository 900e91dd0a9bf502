"""A framework that is not installed is said, with how to get it; nothing loads one that was not asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("torch")


@pytest.mark.parametrize(("module", "package"), [("huggingface", "transformers"), ("accelerate", "accelerate")])
def test_a_framework_that_is_missing_is_named_with_its_extra(module, package):
    code = f"import sys; sys.modules[{package!r}] = None; import pollux.integrations.{module}"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = answer.stderr.strip().splitlines()[-1]
    assert last == f'ImportError: {package} is not installed: pip install "pollux-scheduler[hf]"'


def test_a_framework_is_loaded_only_when_it_is_asked_for():
    asked = "sorted({'transformers', 'accelerate'} & {*sys.modules})"
    code = f"import sys, pollux.train.run, pollux.integrations; print({asked})"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
