# What a person or a script runs here. `make setup` needs Python 3.11 or newer with its venv module, and nothing else.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# The first Python here that is new enough (a name may be there and still not run).
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3; do \
  if $$name -c '$(NEW_ENOUGH)' 2>/dev/null; then echo $$name; break; fi; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
SERVED := api billing migrations scheduler store weft_server workers client_sdk/weft
ROOMS := $(SERVED) setup.py examples bench tools tests

.PHONY: help setup vllm demo test retest test-quick soak chaos compat loaders cookbook mutants gpu-bundle gpu-check docs lint format clean

help:
	@echo "make setup | vllm | demo | test | retest | test-quick | soak | chaos | compat | loaders | cookbook | mutants | gpu-bundle | gpu-check | docs | lint | format | clean"

# Its bytecode, too: who serves from here may not write here, and would compile hundreds of files at each start.
setup: $(STAMP)
	@$(BIN)/python -m compileall -q $(SERVED)

# A pip that chooses among the files of an index in a third of the time of the one that Python 3.11 brings (23.0), and
# what builds both packages, once, not in an environment for each.
# setuptools warns of `compat` at length, once for each package: that is kept back.
# Torch goes first and pinned, so that the rest cannot pull another one. On a GPU machine: make setup TORCH_INDEX=<url>.
$(STAMP): pyproject.toml setup.py client_sdk/pyproject.toml constraints.txt
	@test -n "$(PYTHON)" && $(PYTHON) -c '$(NEW_ENOUGH)' \
	  || { echo "make setup: Weft needs Python 3.11 or newer (make setup PYTHON=/path/to/python3)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	  || { echo "make setup: $(PYTHON) has no venv module; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet 'pip>=26' 'setuptools>=77'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation \
	  --config-settings editable_mode=compat --editable client_sdk --editable '.[dev]'
	$(BIN)/python -m workers.model.native.build workers/*/*/*.c || true
	@touch $@

# vLLM for the CPU, in an environment of its own: it pins too much to share one. Its wheels are for Python 3.11 alone.
VLLM := .vllm
PYTHON311 ?= $(shell for name in /usr/bin/python3.11 python3.11; do \
  if $$name -c 'import ensurepip, venv' 2>/dev/null; then echo $$name; break; fi; done)

vllm: $(VLLM)/.setup-done

$(VLLM)/.setup-done: deploy/vllm/requirements.txt deploy/vllm/build.sh deploy/vllm/plugin/pyproject.toml \
    $(wildcard deploy/vllm/plugin/weft_vllm/*.py)
	@test -n "$(PYTHON311)" && $(PYTHON311) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' \
	  || { echo "make vllm: vLLM for the CPU needs Python 3.11 (make vllm PYTHON311=/path/to/python3.11)" >&2; exit 1; }
	deploy/vllm/build.sh $(VLLM) $(PYTHON311)
	@touch $@

demo: setup
	$(BIN)/python examples/demo.py

# What pytest knows of a run's failures. A run that broke, instead of failing, leaves none.
FAILED := .pytest_cache/v/cache/lastfailed

# tests/order.py says how the processes, one a core and one more but four at most, share the tests.
test: setup
	@rm -f $(FAILED)
	$(BIN)/python -m pytest -n auto --maxprocesses 4 -m "not long" || { status=$$?; [ $$status = 1 ] || rm -f $(FAILED); exit $$status; }

# The tests that failed in the last run, one after another. If none is known, the run itself broke, and so does this.
retest: setup
	$(BIN)/python -m pytest -v --last-failed --last-failed-no-failures none --maxfail 1

# What starts no server and no browser, and computes little: two minutes of processor time.
QUICK := tests/test_walls.py tests/client_sdk/wire tests/store tests/billing/payments tests/fakestripe $(addprefix tests/scheduler/, \
  dispatch journal links order reports simulator)

test-quick: setup
	$(BIN)/python -m pytest -n 2 -m "not server and not search" $(QUICK)

# Every random search with seeds of its own, and TIMES as many examples (tests/search.py); then the model of the service.
# What they find becomes a plain test.
TIMES ?= 20
soak: setup
	WEFT_SOAK=$(TIMES) $(BIN)/python -m pytest --timeout=0 -m "hypothesis or search or long"
	$(BIN)/python -m tests.truth.soak

# Kills, full disks and damaged files, on real services; docs/recovery.md has the tables.
KILLS ?= 5

chaos: setup
	$(BIN)/python -m bench.chaos --idle --kills $(KILLS) --json bench/results/chaos-idle.json
	$(BIN)/python -m bench.chaos --kills $(KILLS) --json bench/results/chaos-embedded.json
	$(BIN)/python -m bench.chaos --production --kills $(KILLS) --json bench/results/chaos-production.json
	$(BIN)/python -m bench.chaos --damage --json bench/results/chaos-damage.json
	$(BIN)/python bench/figures.py

# Every version of the official SDK against a real server; writes docs/compatibility.md.
compat: setup
	$(BIN)/python -m tests.compat.tour
	$(BIN)/python -m tests.compat.page

# A downloaded adapter in every pair of versions of transformers and PEFT; writes their table in docs/compatibility.md.
loaders: setup
	$(BIN)/python -m tests.compat.loaders
	$(BIN)/python -m tests.compat.page

# Published recipes of tinker_cookbook, offline, against a real server.
cookbook: setup
	$(BIN)/python -m tests.cookbook

# Small faults in what guards money, isolation and fairness, one at a time: does a test notice? MODULES="api/who/reach.py ..."
MUTANTS := .mutants

mutants: setup $(MUTANTS)/.setup-done
	$(MUTANTS)/bin/python -m tools.mutants $(MODULES)

$(MUTANTS)/.setup-done:
	test -x $(MUTANTS)/bin/python || $(PYTHON) -m venv $(MUTANTS)
	$(MUTANTS)/bin/python -m pip install --quiet 'cosmic-ray==8.7.0'
	@touch $@

# Everything to try on a GPU, in under nine minutes: deploy/gpu/check.py. It needs torch, triton, transformers and Python
# 3.12, and no `make setup`; what else is imported comes from the wheels of gpu-bundle, made here and taken along.
GPU_BUNDLE := .gpu-bundle
HERE := $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)
GPU_PLATFORMS := $(addprefix --platform ,manylinux_2_28_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64)

gpu-bundle:
	rm -rf $(GPU_BUNDLE)
	$(HERE) -m pip download --quiet --dest $(GPU_BUNDLE) --only-binary :all: --python-version 3.12 $(GPU_PLATFORMS) \
	  --requirement deploy/gpu/requirements.txt
	for name in numpy transformers tokenizers huggingface_hub hf_xet regex uvloop; do rm -f $(GPU_BUNDLE)/$$name-*; done
	@size=$$(du -sm $(GPU_BUNDLE) | cut -f1); echo "$(GPU_BUNDLE): $$size MB"; test $$size -le 45

gpu-check:
	$(HERE) deploy/gpu/check.py

# The documentation as a site, in build/site; its pictures that are computed. A link or an anchor that leads nowhere fails.
docs: setup
	$(BIN)/python -m tools.timelines
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

lint: setup
	$(BIN)/ruff check $(ROOMS)
	$(BIN)/ruff format --check $(ROOMS)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo

format: setup
	$(BIN)/ruff check --fix $(ROOMS)
	$(BIN)/ruff format $(ROOMS)

clean:
	rm -rf $(VENV) $(VLLM) $(MUTANTS) .compat .cookbook build demo-data demo-out .mypy_cache .ruff_cache .pytest_cache .hypothesis
