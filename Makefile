# Every target makes its own .venv on a bare machine; nothing has to be done before.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test check style chromium chaos bench clean

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	@touch $@

demo: $(STAMP)
	$(BIN)/pollux demo

# As check, and the tests beside mypy, as they wait a lot; what it finds is shown last. Hundreds of interpreters are
# started: they must not compile everything again, whatever the user likes elsewhere.
test: export PYTHONDONTWRITEBYTECODE =
test: style chromium
	@log=$$(mktemp) && { $(BIN)/mypy >$$log 2>&1 & } && mypy=$$! && trap "kill $$mypy; rm -f $$log; exit 130" INT TERM; \
	echo "$(BIN)/python -m pytest -n auto"; $(BIN)/python -m pytest -n auto; tests=$$?; \
	echo "$(BIN)/mypy"; wait $$mypy; types=$$?; cat $$log; rm -f $$log; test $$tests -eq 0 -a $$types -eq 0

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
	rm -rf $(VENV) out build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis src/*.egg-info
