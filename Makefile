# One obvious way to run each thing. Every target makes its own .venv from the pinned versions in constraints.txt; a second
# call finds it made. Name another interpreter with `make PYTHON=python3.12 …`.

PYTHON ?= python3
SEED ?= 2
ARGS ?=
# Workers that share the tests: those that train processes are one part, those that start servers another. 0: no workers.
WORKERS ?= 2

BIN := .venv/bin
# The stamp carries what the environment was made from, this folder's place included: an editable install points at it.
KEY := $(shell { cat pyproject.toml constraints.txt; pwd; } | cksum | cut -d' ' -f1)
STAMP := .venv/.made-from-$(KEY)
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet --quiet

.PHONY: help venv demo test lint bench clean
.DEFAULT_GOAL := help

help: ## say what can be made
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1\t\2/p' Makefile | expand -t 14

venv: $(STAMP) ## make .venv: trainwarden (editable), torch and the tools, in the pinned versions

demo: $(STAMP) ## run the whole loop on this machine: a run breaks, is rolled back, recovers (SEED=2)
	@$(BIN)/trainwarden demo --seed $(SEED) $(ARGS)

test: $(STAMP) ## run all tests (ARGS="-k record -x" goes to pytest)
	@$(BIN)/python -m pytest --numprocesses $(WORKERS) $(ARGS)

lint: $(STAMP) ## ruff check, ruff format --check, mypy strict
	@$(BIN)/python -m ruff check .
	@$(BIN)/python -m ruff format --check .
	@$(BIN)/python -m mypy

bench: $(STAMP) ## measure what the exporter costs a step, into .bench/overhead.json (10 to 30 minutes, best where nothing else runs)
	@mkdir -p .bench
	@$(BIN)/python bench/overhead.py --output .bench/overhead.json $(ARGS)

clean: ## remove everything that was made, .venv included
	rm -rf .venv .demo .demo-* .bench .trainwarden build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "trainwarden needs Python 3.11 or newer, and $(PYTHON) is `$(PYTHON) --version 2>&1`." \
	    "Name a newer one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "$(PYTHON) has no venv module. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@echo "making .venv (a minute or two, once)"
	@$(PYTHON) -m venv .venv
	@$(PIP) install --constraint constraints.txt setuptools
	@$(PIP) install --constraint constraints.txt --no-build-isolation --editable '.[torch,dev]'
	@rm -f .venv/.made-from-*
	@touch $@
