# SPDX-License-Identifier: Apache-2.0
# Every target builds .venv itself, from plain python3 (3.11 or newer) and the pins of constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PEERS := .bench

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help venv demo test test-full bench lint docs clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       record, validate, inspect, replay and fork the example agent, offline"
	@echo "make test       formatting, lint, types, import arrows, tests (a few minutes)"
	@echo "make test-full  the long tests, and the documentation with warnings as errors"
	@echo "make bench      the speed targets, measured here, each beside its contender"
	@echo "make lint       the checks of 'make test' without the tests"
	@echo "make docs       the documentation as HTML in site/"
	@echo "make venv       only build .venv"

venv: $(READY)

$(READY): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) not found: install Python 3.11 or newer, or say make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: Python 3.11 or newer is needed, $(PYTHON) is $$($(PYTHON) -V 2>&1); say make PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(BIN)/python || { echo "building $(VENV)"; $(PYTHON) -m venv $(VENV) || { echo "make: $(PYTHON) cannot build a venv (on Debian and Ubuntu: install python3-venv)"; exit 1; }; }
	@echo "installing into $(VENV)"
	@$(BIN)/python -m pip install -qq --no-compile -c constraints.txt -e '.[dev]'
	@touch $(READY)

demo: $(READY)
	@$(BIN)/python examples/demo.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src
	$(BIN)/lint-imports

test: lint
	$(BIN)/pytest -q -n auto --dist loadfile

test-full: docs
	$(BIN)/pytest -q -m full -n auto --dist loadfile

docs: $(READY)
	$(BIN)/sphinx-build -q -W --keep-going -n -b html docs site

bench: $(PEERS)/.ready
	@PYTHONPATH=$(PEERS) $(BIN)/python benchmarks/run.py

# Apart from .venv: they bring pytest plugins, which the tests must not run under.
$(PEERS)/.ready: $(READY)
	@$(BIN)/python -m pip install -qq --no-deps --upgrade --target $(PEERS) -r benchmarks/peers.txt
	@touch $(PEERS)/.ready

clean:
	rm -rf $(VENV) $(PEERS) site sftraces .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .host-suites .matrix .frameworks
