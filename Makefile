# Every target does its own set-up; nothing has to be typed first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
FRAMEWORKS := .venv-frameworks

.PHONY: help demo test test-frameworks test-gpu soak lint bench clean

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

test: $(VENV)/.dev ## The tests, in two processes: they wait much
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-frameworks: $(VENV)/.dev $(FRAMEWORKS)/.ready ## Unmodified scripts of torch, paddle, tensorflow and jax
	PACELINE_FRAMEWORKS_PYTHON=$(CURDIR)/$(FRAMEWORKS)/bin/python $(BIN)/python -m pytest -m frameworks

test-gpu: $(VENV)/.dev ## The tests that need an NVIDIA GPU
	$(BIN)/python -m pytest -m gpu

soak: $(VENV)/.dev ## Kill a training 200 times, and what it runs on 200 times; no sample may be lost or repeated
	PACELINE_SOAK_KILLS=200 $(BIN)/python -m pytest tests/train/loop/test_exactly_once.py
	PACELINE_SOAK=200 PACELINE_SOAK_SEED=$$(date +%s) $(BIN)/python -m pytest -s tests/lab/test_soak.py

lint: $(VENV)/.dev ## Style, types, and which room may import which
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

bench: $(VENV)/.dev ## paceline beside the others, as ratios
	$(BIN)/python -m benchmarks

clean: ## Remove the environments and caches
	rm -rf $(VENV) $(FRAMEWORKS) .mypy_cache .ruff_cache .pytest_cache .hypothesis
