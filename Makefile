# Every target makes its own .venv on a bare machine; nothing has to be done before.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo docs test test-long test-all test-core test-gpu check style chromium chaos soak study-kills bench clean

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	@touch $@

demo: $(STAMP)
	$(BIN)/pollux demo

# The documentation as a site. Nothing is loaded from other hosts, so it can be read offline.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "out/site/index.html; with search: $(BIN)/python -m http.server --directory out/site"

# Tests start hundreds of interpreters: these must not compile everything again, whatever the user likes elsewhere.
test test-long test-all: export PYTHONDONTWRITEBYTECODE =
PYTEST := $(BIN)/python -m pytest -n auto

# What to run before every commit: style and types, and one of every kind of test. mypy runs beside the tests, as they
# wait a lot; what it finds is shown last. Of properties it tries a few examples; with
# PROFILE=explore many, and others in every run.
PROFILE ?= quick
test: style chromium
	$(call beside_mypy,$(PROFILE),-m "not long")

# Repetitions, soak runs and further variants, and many examples of every property: after make test, what is left of
# test-all.
test-long: $(STAMP) chromium
	POLLUX_TEST_PROFILE=thorough $(PYTEST) -m "long or property"

test-all: style chromium
	$(call beside_mypy,thorough,)

define beside_mypy
	@log=$$(mktemp) && { $(BIN)/mypy >$$log 2>&1 & } && mypy=$$! && trap "kill $$mypy; rm -f $$log; exit 130" INT TERM; \
	export POLLUX_TEST_PROFILE=$(1); echo '$(PYTEST) $(2)'; $(PYTEST) $(2); tests=$$?; \
	echo "$(BIN)/mypy"; wait $$mypy; types=$$?; cat $$log; rm -f $$log; test $$tests -eq 0 -a $$types -eq 0
endef

# The core alone, as "pip install" without extras gives it, in an environment of its own: imports, and the unit tests
# that need no more. The others skip themselves.
CORE := .venv-core
CORE_TESTS := tests/test_architecture.py tests/conformance tests/property tests/unit
test-core:
	@test -x $(CORE)/bin/python || $(PYTHON) -m venv $(CORE)
	$(CORE)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[testing]"
	POLLUX_TEST_PROFILE=quick $(CORE)/bin/python -m pytest -m "not long" $(CORE_TESTS)

# What a machine with GPUs can test beside that, with its own torch: the one in .venv may have no CUDA.
GPU_PYTHON ?= $(PYTHON)
test-gpu:
	PYTHONPATH=src $(GPU_PYTHON) -m pytest tests/gpu tests/unit/train/test_gpu.py

check: style
	$(BIN)/mypy

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The dashboard is tested in Debian's chromium, installed where that is allowed; without it those tests are skipped.
chromium:
	@command -v chromium >/dev/null || test "$$(id -u)" != 0 || ! command -v apt-get >/dev/null || { \
	echo "installing chromium for the tests of the dashboard"; \
	timeout 300 sh -c 'apt-get -q -o Acquire::Retries=1 -o Acquire::http::Timeout=20 update; DEBIAN_FRONTEND=noninteractive \
	apt-get -q -y --no-install-recommends install chromium fonts-dejavu-core' >/dev/null 2>&1 || \
	echo "chromium could not be installed"; }

chaos: $(STAMP)
	$(BIN)/python -m tests.e2e.chaos

# Fifty kills of the server, of trials and of the fork server while studies run, in pieces of ten.
study-kills: $(STAMP)
	$(BIN)/python -m tests.e2e.study_kills

# 1,000 faults on a cluster with users, guarantees and two servers on PostgreSQL, in pieces of under an hour: call it
# again and it goes on. What was counted is in out/soak.json.
SOAK ?= --faults 1000 --piece 50 --minutes 55 --postgres --resume
soak: $(STAMP)
	$(BIN)/python -m tests.e2e.soak $(SOAK)

bench: export OPENBLAS_NUM_THREADS = 1
bench: $(STAMP)
	$(BIN)/python benchmarks/decisions.py
	$(BIN)/python benchmarks/scale.py
	$(BIN)/python benchmarks/fitting.py
	$(BIN)/python benchmarks/simulation.py
	$(BIN)/python benchmarks/year.py
	$(BIN)/python benchmarks/autoscaling.py
	$(BIN)/python benchmarks/train_overhead.py
	$(BIN)/python benchmarks/resize.py
	$(BIN)/python benchmarks/ray_resize.py
	$(BIN)/python benchmarks/scaling_rules.py
	$(BIN)/python benchmarks/server.py
	$(BIN)/python benchmarks/dashboard.py

clean:
	rm -rf $(VENV) $(CORE) out build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis src/*.egg-info
