# On a fresh machine, `make run` shows headwise at work and `make test` runs all checks. Both install what they need into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

TEXT ?= The captain looked at the sea, and the sea looked at the captain. The captain looked at the sea.
export TEXT

.PHONY: run tour test lint types docs unit kernels bench clean

run: $(VENV)/.ready  ## show what every head of the built-in model does with a sentence; TEXT='...' for your own
	$(BIN)/headwise view "$$TEXT"

tour: $(VENV)/.ready  ## show the ten steps on real tensors, compare fused and reference, and measure the speed
	$(BIN)/headwise tour

test: $(VENV)/.ready-dev  ## run the formatter, linter, type checker, docs build and all tests, as CI does
	$(MAKE) --no-print-directory --jobs 2 --output-sync types kernels lint docs  # mypy would leave one core idle
	$(MAKE) --no-print-directory unit

lint: $(VENV)/.ready-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports  # the arrows between rooms, in pyproject.toml

types: $(VENV)/.ready-dev
	$(BIN)/mypy

docs: $(VENV)/.ready-dev  ## build the site into site/; warnings are errors, and no network is needed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

unit: $(VENV)/.ready-dev
	OMP_NUM_THREADS=1 PYTHONHASHSEED=0 $(BIN)/pytest -n 2 --dist worksteal

kernels: $(VENV)/.ready-dev  ## run the Triton kernels on the CPU, in Triton's interpreter
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal tests/weights/test_kernels.py

bench: $(VENV)/.ready-dev  ## compare the speed with other libraries, and measure the CPU tables of docs/performance.md
	$(BIN)/headwise bench --ladder --weights
	$(BIN)/python benchmarks/layer.py
	$(BIN)/python benchmarks/maps.py

# Everything is installed from the locks, by hash, except torch: its build depends on the machine, so only its version is fixed.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
LOCKED := $(PIP) --require-hashes --no-deps

$(VENV)/.ready: pyproject.toml constraints.txt locks/run.txt
	$(PYTHON) -m venv $(VENV)
	$(LOCKED) --requirement locks/run.txt
	$(PIP) --constraint constraints.txt torch
	$(PIP) --no-deps --no-build-isolation --editable .
	touch $@

$(VENV)/.ready-dev: $(VENV)/.ready locks/dev.txt
	$(LOCKED) --requirement locks/dev.txt
	touch $@

clean:
	rm -rf $(VENV)
