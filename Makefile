# Each target does its own set-up in .venv. What is installed is remembered in stamp files, so
# a second run starts at once; a change of requirements/ or pyproject.toml installs again.
#
#   make demo                  a real engine: cold, warm from DRAM, warm from disk, restarted
#   make demo TIER=redis       the same with Valkey in place of a disk
#   make test                  everything that must hold, on both releases of vLLM
#   make dev                   kvtier and its tools without vLLM, in which lint, types, unit, backends, conformance,
#                              model, soak and docs run: under a minute
#   make quick                 lint, types and the quick unit tests, in two minutes
#   make test-long             what takes hours: fresh seeds for the model checker, soaks, servers
#   make model SECONDS=600     the model checker for as long as it is told
#   make rig MINUTES=60        vLLM's scheduler over a model that checks each read, fresh seeds
#   make vllm-tests            vLLM's own tests of its tiers, on tiers that kvtier hosts
#   make gpu                   that rig on a CUDA device, in three minutes; nothing is installed
#   make gpu-engine            a whole engine on a GPU: every tier, a restart, kill -9
#   make mutants MODULE=kvtier.engine.primary.lookups   small changes that the tests nearby must notice
#   make bench-compression     what compression gains on keys and values of a real model
#   make soak MINUTES=60       a runtime under injected faults, for as long as it is told
#   make PYTHON=python3.12 ... another Python;  PIP_ARGS="..." more options for pip

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:

# The first that can make a virtual environment: Debian's python3 may lack venv, and pyenv has names without a Python.
PYTHON ?= $(shell for each in python3.11 python3.12 python3.13 python3; do \
    $$each -c 'import ensurepip, venv, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$each && exit; \
    done; echo python3)
VENV ?= .venv
PIP_ARGS ?=
PYTEST_ARGS ?=
SECONDS ?=
MINUTES ?=
SEED ?=
TIER ?=

BIN := $(VENV)/bin
STRESS := $(BIN)/python -m stress
# Without MINUTES a soak is the gate's: it has the same faults each time, they come after so many
# requests, and counts end it (stress/pace.py). With MINUTES it goes by the clock, and a seed is drawn.
how_long = $(if $(MINUTES),--minutes $(MINUTES),--gate) $(if $(SEED),--seed $(SEED))
# Both take what is pinned, and nothing besides. The first says how far it is.
INSTALL := $(BIN)/python requirements/install.py $(PIP_ARGS)
PIP := $(BIN)/python -m pip install -qq --no-input --no-deps --no-compile $(PIP_ARGS)
# How long each test took stands in build/durations/, a file for each part.
PYTEST = $(BIN)/python -m pytest --durations=8 --durations-min=1 \
    --junitxml=build/durations/$@.xml $(PYTEST_ARGS)
SOURCES := $(foreach part,kvtier backends tests docs stress requirements,\
    $(if $(shell find $(part) -name '*.py' 2>/dev/null),$(part)))

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Nothing is compiled at installation: Python compiles what is used, once, and must keep it.
unexport PYTHONDONTWRITEBYTECODE
# What is tested is what is installed in .venv, not what lies on somebody's path (but for `gpu`).
CALLERS_PYTHONPATH := $(PYTHONPATH)
unexport PYTHONPATH PYTHONHOME
# Libraries that the system lacks: requirements/libraries.py. An empty entry would be the current folder.
export LD_LIBRARY_PATH := $(abspath $(VENV)/libraries)$(if $(LD_LIBRARY_PATH),:$(LD_LIBRARY_PATH))

.PHONY: help demo test test-long dev quick quick-unit lint types unit backends package conformance model \
        counterexamples engine engine-0.32 bench engine-0.33 vllm-0.33 rig rig-0.32 rig-0.33 gpu gpu-engine docs soak \
        soak-filesystem soak-remote server bench-compression mutants vllm-tests vllm-tests-0.32 \
        vllm-tests-0.33 clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^#   //p' Makefile

# --- set-up ---

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvtier needs Python 3.11 or later, this is %s: run make PYTHON=..." % sys.version.split()[0])'
	@$(PYTHON) -c 'import sys, ensurepip; print("== a virtual environment in $(VENV), of Python", sys.version.split()[0], flush=True)' \
	    || { echo "$(PYTHON) can't make a virtual environment: install its venv (Debian: apt-get install python3-venv), or run make PYTHON=..."; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.base: requirements/kvtier.txt requirements/install.py | $(VENV)/.made
	@echo "== what kvtier needs (10 seconds)"
	@$(INSTALL) -r $<
	@touch $@

$(VENV)/.kvtier: pyproject.toml $(VENV)/.base
	@echo "== kvtier itself"
	@$(PIP) --no-build-isolation -e .
	@touch $@

$(VENV)/.tools: requirements/dev.txt $(VENV)/.base
	@echo "== tools for lint, types, tests and docs (half a minute)"
	@$(INSTALL) -r $<
	@touch $@

$(VENV)/.dev: $(VENV)/.kvtier $(VENV)/.tools
	@touch $@

$(VENV)/.engine: requirements/engine-cpu.txt $(VENV)/.base
	@echo "== vLLM for the CPU (a minute or two)"
	@$(INSTALL) -r $<
	@$(BIN)/python requirements/libraries.py $(PIP_ARGS)
	@touch $@

$(VENV)/.full: requirements/engine-tests.txt requirements/engine-tests-cuda.txt $(VENV)/.dev $(VENV)/.engine
	@$(INSTALL) -r $<
	@if $(BIN)/python -c 'import sys, torch; sys.exit(torch.version.cuda is None)'; then \
	    $(INSTALL) -r requirements/engine-tests-cuda.txt; fi
	@touch $@

# There is no CPU build of vLLM 0.33: its Python over the compiled parts of 0.32.
NEWER := $(VENV)/vllm-0.33
$(NEWER)/.made: requirements/engine-cpu-0.33.txt tests/vllm/support/other_release.py $(VENV)/.engine
	@echo "== vLLM 0.33 for the CPU (about a minute)"
	@PIP_ARGS='$(PIP_ARGS)' $(BIN)/python tests/vllm/support/other_release.py $< $(@D)
	touch $@

# For `python -m stress.bench lmcache`, and `disk --beside lmcache`.
LMCACHE := $(VENV)/lmcache
$(LMCACHE)/.made: requirements/lmcache.txt $(VENV)/.full
	$(PIP) --target $(@D) -r $<
	touch $@

# --- what a user runs ---

# TIER=redis starts a Valkey server of its own, whose program and client are among the test's.
demo: $(VENV)/.engine $(VENV)/$(if $(TIER),.dev,.kvtier)
	@$(BIN)/python -m kvtier.tools.demo $(if $(TIER),--tier $(TIER))

# Its parts, three at a time: tests/support/gate.py. What takes minutes, or goes by the clock, is in `test-long`: tests
# that are marked `long`, benchmarks, soaks with MINUTES. With CI=true from outside, a test that is left out has failed.
# Inside it is always set: Hypothesis draws the same examples each time.
GATE := $(if $(LONG),,-m "not long")

test: $(VENV)/.made
	@$(BIN)/python requirements/debian.py
	@$(MAKE) --no-print-directory -j2 $(VENV)/.full
	@env -u SECONDS -u MINUTES -u SEED CI=true KVTIER_TEST_LEAVE_OUT=$(if $(filter true,$(CI)),0,1) \
	    $(BIN)/python -m tests.support.gate

dev: $(VENV)/.dev

quick: $(VENV)/.dev
	@$(MAKE) --no-print-directory -j2 --output-sync=recurse quick-unit lint types

quick-unit: $(VENV)/.dev
	$(PYTEST) -q -m "not slow" tests/house tests/unit

# The same proofs as in the tests, with more examples and other kills: their seed is printed.
test-long: $(VENV)/.full $(NEWER)/.made
	$(BIN)/python -m stress.bare_machine
	$(BIN)/python -m stress.bare_machine --dockerfile
	$(BIN)/python -m stress.pods
	$(BIN)/python -m stress.pods local-nvme --user 1000680000:0
	seed=$${KVTIER_TEST_SEED:-$$RANDOM}; echo "KVTIER_TEST_SEED=$$seed"; \
	KVTIER_TEST_TIMES=5 KVTIER_DISK_KILLS=500 KVTIER_SOAK_PLANTS=1 KVTIER_TEST_SEED=$$seed \
	    $(MAKE) --no-print-directory LONG=1 unit backends PYTEST_ARGS="--hypothesis-seed=$$seed $(PYTEST_ARGS)"
	$(MAKE) --no-print-directory -j1 LONG=1 package conformance engine-0.32 bench engine-0.33 rig-0.33 model
	$(MAKE) --no-print-directory MINUTES= server
	KVTIER_EVENT_REQUESTS=2700 KVTIER_EVENTS=100000 $(PYTEST) --timeout=0 tests/vllm/test_kv_events.py
	$(MAKE) --no-print-directory rig MINUTES=$(or $(MINUTES),60)
	$(BIN)/python -m tests.vllm.gpu_engine --device cpu
	$(MAKE) --no-print-directory -j1 LONG=1 model SECONDS=$(or $(SECONDS),3600)
	$(MAKE) --no-print-directory vllm-tests
	KVTIER_TEST_CEPH=1 $(PYTEST) tests/conformance/test_s3_keeps_the_contract.py
	$(BIN)/python -m stress.shared_folder --blocks $(or $(KVTIER_SHARED_BLOCKS),1000000) --minutes 20
	$(STRESS) --layer runtime --minutes $(or $(MINUTES),60)
	$(STRESS) --layer filesystem --minutes $(or $(MINUTES),60)
	$(STRESS) --layer remote --minutes $(or $(MINUTES),60)
	$(STRESS) --layer engine --minutes 20
	PYTHONPATH=$(abspath $(NEWER)) $(STRESS) --layer engine --minutes 20

# --- its parts ---

lint: $(VENV)/.dev
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

vllm-0.33: $(NEWER)/.made

types: $(VENV)/.dev
	$(BIN)/mypy $(filter-out tests,$(SOURCES))

# By itself, on two cores; as a part of `make test`, whose parts run three at a time, on one.
unit: $(VENV)/.dev
	$(PYTEST) $(GATE) -n $(or $(WORKERS),2) --ignore=tests/unit/backends tests/unit tests/house

# They wait for servers, disks and networks that fail.
backends: $(VENV)/.dev
	$(PYTEST) $(GATE) tests/unit/backends

# The wheel, in an environment of its own.
package: $(VENV)/.dev
	PIP_ARGS='$(PIP_ARGS)' $(PYTEST) $(GATE) tests/package

conformance: $(VENV)/.dev
	$(PYTEST) $(GATE) tests/conformance

# Without SECONDS: the CI profile of some minutes.
model: $(VENV)/.dev
	KVTIER_MODEL_PROFILE=$(if $(SECONDS),long,ci) KVTIER_MODEL_SECONDS=$(SECONDS) \
	    $(PYTEST) $(GATE) $(if $(SECONDS),--timeout=0) tests/model

# Each mistake of the model tells its story from a file; see tests/model/counterexamples.py.
counterexamples: $(VENV)/.dev
	PYTHONPATH=.:tests/model $(BIN)/python tests/model/find_counterexamples.py $(NAMES)

engine: engine-0.32 engine-0.33

engine-0.32: $(VENV)/.full
	KVTIER_TEST_VLLM=0.32 $(PYTEST) $(GATE) --ignore=tests/vllm/bench tests/vllm

bench: $(LMCACHE)/.made
	KVTIER_TEST_VLLM=0.32 PYTHONPATH=$(abspath $(LMCACHE)) $(PYTEST) tests/vllm/bench

# What does not look at vLLM has been tested with 0.32.
engine-0.33: $(VENV)/.full $(NEWER)/.made
	KVTIER_TEST_VLLM=0.33 PYTHONPATH=$(abspath $(NEWER)) \
	    $(PYTEST) $(if $(LONG),,-m "not one_release and not long") --ignore=tests/vllm/bench \
	    -o cache_dir=.pytest_cache/vllm-0.33 tests/vllm

# Half of the time on each release of vLLM. A seed that fails is told: --seed plays it alone.
rig: $(VENV)/.full $(NEWER)/.made
	$(BIN)/python -m tests.rig --seconds $$(($(or $(MINUTES),60) * 30))
	PYTHONPATH=$(abspath $(NEWER)) $(BIN)/python -m tests.rig --seconds $$(($(or $(MINUTES),60) * 30))

# They are in vLLM's source distribution (45 MB a release), and no part of this repository. What
# they leave out is in tests/vllm/vllms_tests/left_out.toml.
VLLMS_TESTS := tests/vllm/vllms_tests
OF_0.32 := $(VENV)/vllm-tests-0.32
OF_0.33 := $(VENV)/vllm-tests-0.33
$(OF_0.32)/.made: requirements/engine-cpu.txt
$(OF_0.33)/.made: requirements/engine-cpu-0.33.txt
$(OF_0.32)/.made $(OF_0.33)/.made: $(VLLMS_TESTS)/fetch.py $(VENV)/.full
	@echo "== vLLM's own tests, for $(@D)"
	PIP_ARGS='$(PIP_ARGS)' $(BIN)/python -m tests.vllm.vllms_tests.fetch $(filter %.txt,$^) $(@D)
	touch $@

vllm-tests: vllm-tests-0.32 vllm-tests-0.33

run_vllms_tests = cd $(1) && PYTHONPATH=$(2)$(abspath $(VLLMS_TESTS)) $(abspath $(BIN))/python -m pytest \
    -c $(abspath $(VLLMS_TESTS)/pytest.ini) --rootdir . $(PYTEST_ARGS) tests/v1/kv_offload/tiering

vllm-tests-0.32: $(OF_0.32)/.made
	$(call run_vllms_tests,$(OF_0.32))

vllm-tests-0.33: $(OF_0.33)/.made $(NEWER)/.made
	$(call run_vllms_tests,$(OF_0.33),$(abspath $(NEWER)):)

# Three hundred scenarios, half of them on each release, and that the rig finds what is wrong. Sets
# of strings have an order of their own in each process; with a hash seed, a scenario is the same
# each time.
rig-0.32: $(VENV)/.full
	PYTHONHASHSEED=0 KVTIER_TEST_VLLM=0.32 $(PYTEST) tests/rig

rig-0.33: $(VENV)/.full $(NEWER)/.made
	PYTHONHASHSEED=0 KVTIER_TEST_VLLM=0.33 PYTHONPATH=$(abspath $(NEWER)) \
	    $(PYTEST) $(if $(LONG),,-m "not one_release") -o cache_dir=.pytest_cache/vllm-0.33 tests/rig

# With the Python that has torch and vLLM for CUDA, and kvtier beside them: what `python3` is in
# an activated environment, or PYTHON=. Without a device they end with status 77, and make with 2.
GPU_PYTHON := $(if $(filter command line,$(origin PYTHON)),$(PYTHON),python3)
gpu gpu-engine: export PYTHONPATH := $(CALLERS_PYTHONPATH)

gpu:
	$(GPU_PYTHON) -m tests.rig --device cuda --seconds $(or $(SECONDS),180)

gpu-engine:
	$(GPU_PYTHON) -m tests.vllm.gpu_engine

docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

soak: $(VENV)/.dev
	@$(STRESS) --layer runtime $(how_long)

# Needs FUSE (apt-get install fuse3) and root.
soak-filesystem: $(VENV)/.dev
	@$(STRESS) --layer filesystem $(how_long)

soak-remote: $(VENV)/.dev
	@$(STRESS) --layer remote $(how_long)

# Without MINUTES each kind of fault comes but a restart and a second engine.
server: $(VENV)/.full
	@$(STRESS) --layer engine $(how_long)

$(VENV)/.mutants: requirements/mutants.txt $(VENV)/.full
	$(PIP) -r requirements/mutants.txt
	touch $@

# [tool.mutmut] in pyproject.toml says what is mutated, and by which tests it is tried. MODULE: one of those modules;
# none takes hours. All happens in a copy, and in the copy of it that mutmut makes, which processes of tests import, too.
MUTANTS := build/mutants
mutants: $(VENV)/.mutants
	rm -rf $(MUTANTS)
	mkdir -p $(MUTANTS)/mutants
	cp -r kvtier backends/kvtier_backends tests stress requirements pyproject.toml $(MUTANTS)
	export PYTHONPATH=$(abspath $(MUTANTS)/mutants) PYTHONHASHSEED=0 CI=true KVTIER_TEST_LEAVE_OUT=1; cd $(MUTANTS); \
	    $(abspath $(BIN))/mutmut run --max-children $(or $(WORKERS),1) $(if $(MODULE),'$(MODULE).*'); \
	    $(abspath $(BIN))/mutmut results | sed -n 's/: survived$$//p' | xargs -rn1 $(abspath $(BIN))/mutmut show

# What compression gains on the keys and values of a real model (92 MB), in bfloat16 and float16.
REAL_KV := build/real-kv
$(REAL_KV)/packages/.made: requirements/real-kv.txt $(VENV)/.full
	$(PIP) --target $(@D) -r requirements/real-kv.txt
	touch $@

bench-compression: $(REAL_KV)/packages/.made
	for dtype in bfloat16 float16; do \
	    PYTHONPATH=$(abspath $(REAL_KV)/packages) $(BIN)/python -m stress.real_kv \
	        --folder $(REAL_KV) --dtype $$dtype > $(REAL_KV)/$$dtype.log 2>&1; \
	    $(BIN)/python -m stress.bench compression --blocks 48 --folder $(REAL_KV)/$$dtype --json $(REAL_KV)/$$dtype.json; \
	done

clean:
	rm -rf $(VENV) .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist site *.egg-info
	find kvtier backends tests docs stress -name __pycache__ -prune -exec rm -rf {} +
