# Every target makes its own .venv on a bare machine; nothing has to be done before.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test check chaos bench clean

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	@touch $@

demo: $(STAMP)
	$(BIN)/pollux demo

test: check
	$(BIN)/python -m pytest -n auto

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

chaos: $(STAMP)
	$(BIN)/python -m tests.e2e.chaos

bench: export OPENBLAS_NUM_THREADS = 1
bench: $(STAMP)
	$(BIN)/python benchmarks/decisions.py
	$(BIN)/python benchmarks/fitting.py
	$(BIN)/python benchmarks/simulation.py
	$(BIN)/python benchmarks/train_overhead.py
	$(BIN)/python benchmarks/resize.py
	$(BIN)/python benchmarks/scaling_rules.py
	$(BIN)/python benchmarks/server.py

clean:
	rm -rf $(VENV) out build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis src/*.egg-info
