# Two commands do everything on a fresh machine: `make run` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

TEXT ?= The captain looked at the sea, and the sea looked at the captain. The captain looked at the sea.
export TEXT

.PHONY: run tour test lint types docs unit bench clean

run: $(VENV)/.ready  ## what every head of the built-in model does with a sentence; make run TEXT='another'
	$(BIN)/headwise view "$$TEXT"

tour: $(VENV)/.ready  ## the ten steps on real tensors, fused against reference, and the speed measured now
	$(BIN)/headwise tour

test: lint types docs unit  ## format, lint, types, docs and all tests; the same thing CI runs

lint: $(VENV)/.ready-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.ready-dev
	$(BIN)/mypy

docs: $(VENV)/.ready-dev  ## the site, into site/; warnings are errors, and no network is used
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

unit: $(VENV)/.ready-dev
	OMP_NUM_THREADS=1 PYTHONHASHSEED=0 $(BIN)/pytest -n 2 --dist worksteal
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal tests/weights/test_kernels.py  # on the CPU

bench: $(VENV)/.ready-dev  ## speed against every peer, and the CPU tables of docs/performance.md
	$(BIN)/headwise bench --ladder --looking
	$(BIN)/python benchmarks/layer.py
	$(BIN)/python benchmarks/maps.py

# pip's own groups (PEP 735) need pip 25.1, so pip comes first.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt pip
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[builtin,terminal,save]' numpy  # torch warns on import without numpy
	touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	$(BIN)/pip install --quiet --constraint constraints.txt --group dev
	touch $@

clean:
	rm -rf $(VENV)
