# Each target does its own set-up in .venv. What is installed is remembered in stamp files, so
# a second run starts at once; a change of requirements/ or pyproject.toml installs again.
#
#   make demo                  a real engine: cold, warm from DRAM, warm from disk, restarted
#   make test                  everything that must hold
#   make model SECONDS=600     the model checker for as long as it is told
#   make PYTHON=python3.12 ... another Python;  PIP_ARGS="..." more options for pip

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:

# The locked set is tested with 3.11.
PYTHON ?= $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
VENV ?= .venv
PIP_ARGS ?=
PYTEST_ARGS ?=
SECONDS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --no-input --no-deps --no-compile $(PIP_ARGS)
PYTEST := $(BIN)/python -m pytest --durations=8 --durations-min=1 $(PYTEST_ARGS)
SOURCES := $(foreach part,kvtier backends tests docs benchmarks stress,\
    $(if $(shell find $(part) -name '*.py' 2>/dev/null),$(part)))

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Nothing is compiled at installation: Python compiles what is used, once, and must keep it.
unexport PYTHONDONTWRITEBYTECODE
# What is tested is what is installed in .venv, not what lies on somebody's path.
unexport PYTHONPATH PYTHONHOME

.PHONY: help demo test lint types unit conformance model engine docs soak \
        bench-import clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^#   //p' Makefile

# --- set-up ---

$(VENV)/.made:
	@echo "== a virtual environment in $(VENV)"
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvtier needs Python 3.11 or later; run make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.engine: requirements/engine-cpu.txt | $(VENV)/.made
	@echo "== vLLM for the CPU and what it needs (about a minute)"
	$(PIP) -r requirements/engine-cpu.txt
	touch $@

$(VENV)/.kvtier: pyproject.toml $(VENV)/.engine
	@echo "== kvtier itself"
	$(PIP) --no-build-isolation -e .
	touch $@

$(VENV)/.dev: requirements/dev.txt $(VENV)/.kvtier
	@echo "== tools for lint, types, tests and docs"
	$(PIP) -r requirements/dev.txt
	touch $@

# --- what a user runs ---

demo: $(VENV)/.kvtier
	$(BIN)/python -m kvtier.demo

# One after the other, cheapest first, whatever -j says: the engine tests want both cores.
# CI=true: a skipped test fails (tests/conftest.py).
test:
	@for part in lint types unit conformance model engine docs soak; do \
	    echo "== $$part"; start=$$SECONDS; \
	    env -u SECONDS CI=true $(MAKE) --no-print-directory $$part; \
	    echo "== $$part passed in $$((SECONDS - start)) s"; \
	done

# --- its parts ---

lint: $(VENV)/.dev
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

types: $(VENV)/.dev
	$(BIN)/mypy $(filter-out tests,$(SOURCES))

unit: $(VENV)/.dev
	$(PYTEST) tests/unit

conformance: $(VENV)/.dev
	$(PYTEST) tests/conformance

# Without SECONDS: the CI profile of some minutes.
model: $(VENV)/.dev
	KVTIER_MODEL_PROFILE=$(if $(SECONDS),long,ci) KVTIER_MODEL_SECONDS=$(SECONDS) \
	    $(PYTEST) --timeout=$(if $(SECONDS),0,1200) tests/model

engine: $(VENV)/.dev
	$(PYTEST) --timeout=600 tests/vllm

docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

soak: $(VENV)/.dev
	@$(BIN)/python stress/soak.py --seconds 20

bench-import: $(VENV)/.kvtier
	$(BIN)/python benchmarks/import_time.py

clean:
	rm -rf $(VENV) .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist site *.egg-info
	find kvtier backends tests docs benchmarks stress -name __pycache__ -prune -exec rm -rf {} +
