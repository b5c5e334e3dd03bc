# Every target does its own set-up; nothing has to be typed first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
FRAMEWORKS := .venv-frameworks
PYTEST := $(BIN)/python -m pytest
FOUR := -n 4 --dist worksteal
LAB := tests/lab $(wildcard fake_kubernetes)
ALL := tests --ignore tests/frameworks $(wildcard fake_kubernetes)
HERE := tests --ignore tests/lab --ignore tests/frameworks
SEED := $(or $(SEED),$(shell date +%s))

.PHONY: help demo test quick test-lab test-frameworks test-gpu nightly test-costs lint bench clean

help: ## What can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Stamps: an environment is set up again when what it is made of has changed.
$(VENV)/.examples: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) -e '.[examples]'
	@touch $@

$(VENV)/.dev: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) -e '.[examples,dev,bench]'
	@touch $@

$(FRAMEWORKS)/.ready: pyproject.toml tests/frameworks/requirements.txt
	$(PYTHON) -m venv $(FRAMEWORKS)
	$(FRAMEWORKS)/bin/pip install --quiet --disable-pip-version-check -r tests/frameworks/requirements.txt -e .
	@touch $@

demo: $(VENV)/.examples ## Train on real data with two ranks
	$(BIN)/paceline run -n 2 examples/digits.py

test: $(VENV)/.dev ## The tests that need no other host, in four processes: they wait much
	$(PYTEST) $(FOUR) $(HERE)

quick: $(VENV)/.dev ## Those of them that start no process
	$(PYTEST) $(FOUR) --quick $(HERE)

test-lab: $(VENV)/.dev ## The tests with hosts over ssh, Slurm and Kubernetes, which need root; each file in one process
	$(PYTEST) -n 4 --dist loadfile $(LAB)

test-frameworks: $(VENV)/.dev $(FRAMEWORKS)/.ready ## Unmodified scripts of torch, paddle, tensorflow and jax
	PACELINE_FRAMEWORKS_PYTHON=$(CURDIR)/$(FRAMEWORKS)/bin/python $(PYTEST) -m frameworks tests/frameworks

test-gpu: $(VENV)/.dev ## The tests that need an NVIDIA GPU
	$(PYTEST) -m gpu

nightly: $(VENV)/.dev ## A thousand faults, many kills, whole matrices, convergence; SEED=NUMBER repeats the faults
	@echo "the seed is $(SEED)"
	PACELINE_SOAK=1000 PACELINE_SOAK_SEED=$(SEED) PACELINE_SOAK_KILLS=200 PACELINE_SOAK_STREAMS=20 \
		PACELINE_CHECKPOINT_KILLS=200 $(PYTEST) $(FOUR) -m 'nightly or soak' -rA $(ALL)

test-costs: $(VENV)/.dev ## CPU seconds and processes of each test, and a table by folder; TESTS=FOLDER for less
	$(PYTEST) $(FOUR) --costs costs.jsonl $(or $(TESTS),$(ALL))

lint: $(VENV)/.dev ## Style, types, and which room may import which
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

bench: $(VENV)/.dev ## paceline beside the others, as ratios
	$(BIN)/python -m benchmarks

clean: ## Remove the environments and caches
	rm -rf $(VENV) $(FRAMEWORKS) .mypy_cache .ruff_cache .pytest_cache .hypothesis
