# The verbs of this project. CI calls the same ones: .ci/run installs a SLURM, then runs test, slow and recipes.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup test slow recipes gpu soak demo docs lint format clean

# The first Python >= 3.11 found; PYTHON=/path/to/python chooses another.
ifndef PYTHON
PYTHON := $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
endif
BIN := .venv/bin
# Tests run on this many processes of one thread each: `make test WORKERS=8 PYTEST_ARGS="-k lora"`.
WORKERS ?= 2
PYTEST_ARGS ?=
# A soak is bounded by these.
STEPS ?= 2000
KILL_EVERY ?= 100
SEED ?= 0

help:  ## show the verbs
	@sed -nE 's/^([a-z]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

setup:  ## make .venv with everything in it (about a minute where packages are cached; at once when it is there)
	@test -n "$(PYTHON)" || { echo "setup: no Python 3.11 or newer found; install one, or make setup PYTHON=..." >&2; exit 1; }
	@$(PYTHON) scripts/setup_venv.py

test: setup  ## set up and run the quick tests, of at most five seconds each
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow" $(PYTEST_ARGS)

slow: setup  ## set up and run the other tests: whole runs, several processes, SLURM, images, every documented command
	$(BIN)/python -m pytest -n $(WORKERS) -m slow $(PYTEST_ARGS)

recipes: setup  ## set up and run every published recipe and network at its full size; the others try one of each kind
	$(BIN)/python -m pytest --recipes $(PYTEST_ARGS)

gpu: setup  ## set up and run what only a CUDA device can show; all other tests hide it and run on the CPU
	$(BIN)/python -m pytest --gpu $(PYTEST_ARGS)

soak: setup  ## set up and train with kills at random moments, to the same bits as without
	$(BIN)/python bench/soak.py --steps $(STEPS) --kill-every $(KILL_EVERY) --seed $(SEED)

demo: setup  ## set up and teach the tiny model in the package a new word by a LoRA, on the CPU, in about a minute
	@scripts/demo.sh

docs: setup  ## build the site of the documentation into site/, every warning an error; open site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

lint: setup  ## check style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup  ## mend what lint can mend by itself
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

clean:  ## remove caches and build products; .venv and runs/ stay
	rm -rf build dist site .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
