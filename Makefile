# Every target does its own set-up; nothing has to be typed first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check
TORCH := torch==2.13.0
OF_TORCH := filelock fsspec jinja2 'networkx>=2.5.1' 'setuptools>=77.0.3' 'sympy>=1.13.3' 'typing-extensions>=4.10'
BUILD := hatchling==1.32.4 'editables>=0.3'
AUDIT := .venv-audit
LOCK := .venv-lock
DOCS := .venv-docs
MATERIAL := .venv-docs-material
SITE := build/docs
FRAMEWORKS := .venv-frameworks
PYTEST := $(BIN)/python -m pytest
FOUR := -n 4 --dist worksteal
SIX := -n 6 --dist loadfile --no-loadscope-reorder
MANY = PACELINE_SOAK=1000 PACELINE_SOAK_SEED=$(SEED) PACELINE_SOAK_KILLS=200 PACELINE_SOAK_STREAMS=20 \
	PACELINE_CHECKPOINT_KILLS=200 PACELINE_PASS_PROGRAMS=5000 PACELINE_SIMULATED=1000000
LAB := tests/lab tools/fake_kubernetes
SOAK := tests/lab/test_soak.py
ALL := tests --ignore tests/frameworks tools/fake_kubernetes
HERE := tests --ignore tests/lab --ignore tests/frameworks
VENDOR := src/paceline/web/static/vendor
FETCHED := .vendor
GPU := .venv-gpu
WHEELS_MADE := build/wheels
FOR = $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
FOR_TESTS := pytest pytest-timeout pytest-xdist hypothesis
GPU_TESTS := tests/test_gpu.py tests/train/test_on_gpu.py tests/node/machine/test_nvml.py \
	tests/train/checkpoint/test_checkpoint.py tests/train/data/test_loader.py
SEED := $(or $(SEED),$(shell date +%s))

.PHONY: help environments demo test quick test-lab test-frameworks test-gpu nightly test-costs faults lint lint-style lint-types bench wheels docs docs-material audit constraints web-vendor web-screens release clean

help: ## What can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Stamps: an environment is set up again when what it is made of has changed.
# A demo takes the versions, and only what it needs; what the gate installs is checked by its hashes as well.
$(VENV)/.examples: $(BIN)/python pyproject.toml requirements/constraints.txt Makefile
	sed -n 's/^\([a-z][^\\]*[^ \\]\) *\\$$/\1/p' requirements/constraints.txt > $(VENV)/versions.txt
	$(PIP) -c $(VENV)/versions.txt $(TORCH) -e '.[examples]'
	@touch $@

# The last line finds nothing to install, unless requirements/constraints.txt lacks what pyproject.toml asks for.
$(VENV)/.dev: $(BIN)/python pyproject.toml requirements/constraints.txt tests/lab/web/requirements.txt Makefile
	$(PIP) --require-hashes --no-deps -r requirements/constraints.txt -r tests/lab/web/requirements.txt
	$(PIP) $(TORCH)
	$(PIP) --no-index --no-build-isolation -e '.[examples,dev,bench]'
	@touch $@

$(FRAMEWORKS)/.ready: pyproject.toml tests/frameworks/requirements.txt
	$(PYTHON) -m venv $(FRAMEWORKS)
	$(FRAMEWORKS)/bin/pip install --quiet --disable-pip-version-check -r tests/frameworks/requirements.txt -e .
	@touch $@

environments: $(VENV)/.dev $(FRAMEWORKS)/.ready $(DOCS)/.ready ## What all tests need; `make -j2` sets two up at once

demo: $(VENV)/.examples ## Train on real data with two ranks
	$(BIN)/paceline run -n 2 examples/digits.py

test: $(VENV)/.dev ## The tests that need no other host, in four processes: they wait much
	$(PYTEST) $(FOUR) $(HERE)

quick: $(VENV)/.dev ## Those of them that start no process
	$(PYTEST) $(FOUR) --quick $(HERE)

test-lab: $(VENV)/.dev ## The tests with hosts over ssh, Slurm and Kubernetes, which need root, and those in a browser; each file in one process, six at a time: they wait most of the time
	$(PYTEST) $(SIX) $(LAB)

test-frameworks: $(VENV)/.dev $(FRAMEWORKS)/.ready ## Scripts of torch, paddle, tensorflow and jax, and the examples
	PACELINE_FRAMEWORKS_PYTHON=$(CURDIR)/$(FRAMEWORKS)/bin/python $(PYTEST) -m frameworks tests/frameworks

# A machine with a GPU often has its own torch and no network: it gets the rest as wheels, in a folder beside its own
# packages. Without WHEELS, the tests run in the environment of the others.
wheels: $(VENV)/.dev ## What test-gpu needs on a machine without network that has torch, in build/wheels; FOR=3.12 for its Python
	rm -rf $(WHEELS_MADE)
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir $(WHEELS_MADE) .
	sed -n 's/^\([a-z][^\\]*[^ \\]\) *\\$$/\1/p' requirements/constraints.txt > $(VENV)/versions.txt
	$(BIN)/pip download --quiet --disable-pip-version-check --dest $(WHEELS_MADE) --only-binary :all: \
		--python-version $(FOR) --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 \
		--find-links $(WHEELS_MADE) -c $(VENV)/versions.txt paceline $(FOR_TESTS)

ifdef WHEELS
test-gpu: ## The tests that need an NVIDIA GPU; PYTHON=python3 WHEELS=build/wheels: with the torch of that Python
	rm -rf $(GPU)
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-index --find-links $(WHEELS) --target $(GPU) \
		paceline $(FOR_TESTS)
	PYTHONPATH=$(CURDIR)/$(GPU) $(PYTHON) -m pytest -m gpu $(GPU_TESTS)
else
test-gpu: $(VENV)/.dev
	$(PYTEST) -m gpu $(GPU_TESTS)
endif

nightly: $(VENV)/.dev ## A thousand faults, many kills, a million simulated jobs, whole matrices, convergence; SEED=NUMBER repeats the faults
	@echo "the seed is $(SEED)"
	$(MANY) $(PYTEST) $(FOUR) -m 'nightly or soak' -rA $(HERE)
	$(MANY) $(PYTEST) $(SIX) -m 'nightly or soak' -rA --ignore $(SOAK) $(LAB)
	$(MANY) $(PYTEST) $(FOUR) -m nightly -rA $(SOAK)  # its jobs side by side, which those of one file are not above

test-costs: $(VENV)/.dev ## CPU seconds and processes of each test, and a table by folder in docs/testing.md; TESTS=FOLDER for less
	$(PYTEST) $(FOUR) --costs costs.jsonl $(or $(TESTS),$(ALL))
	$(BIN)/python -m tests.costs costs.jsonl $(if $(TESTS),,docs/testing.md)

faults: $(VENV)/.dev ## Plant each fault of tests/faults.toml in a copy of the source, and see whether tests find it; AGAIN=FILE: only those that a former faults.json says were found
	$(BIN)/python tools/faults.py --jobs 2 $(if $(AGAIN),--again $(AGAIN))

lint: lint-style lint-types ## Style, types, which room may import which, and how large it may be; `make -j2 -O lint` checks types meanwhile

lint-style: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tools/rooms.py
	$(BIN)/mypy --config-file tests/typing/project/pyproject.toml tests/typing/project
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --pythonpath $(BIN)/python --project tests/typing/project

lint-types: $(VENV)/.dev
	$(BIN)/mypy

bench: $(VENV)/.dev ## paceline beside the others, as ratios
	$(BIN)/python -m benchmarks

$(DOCS)/.ready: requirements/docs.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements/docs.txt
	@touch $@

docs: $(DOCS)/.ready ## The documentation as a site in build/docs, which needs no network: open build/docs/index.html; needs Python 3.11
	$(DOCS)/bin/zensical build --clean --strict
	$(PYTHON) -m tools.handbook.site $(SITE)

# Zensical is young: this shows that the way back to Material for MkDocs is open. Its support has ended.
docs-material: ## The same site, built by Material for MkDocs into build/docs-material
	test -d $(MATERIAL) || $(PYTHON) -m venv $(MATERIAL)
	$(MATERIAL)/bin/pip install --quiet --disable-pip-version-check mkdocs-material==9.7.7
	$(MATERIAL)/bin/mkdocs build --quiet --strict --site-dir $(SITE)-material
	$(PYTHON) -m tools.handbook.site $(SITE)-material

audit: ## Known vulnerabilities of the versions in requirements/constraints.txt, but those in requirements/audit.txt, which are accepted
	test -d $(AUDIT) || $(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/pip install --quiet --disable-pip-version-check pip-audit==2.10.1
	@$(AUDIT)/bin/pip-audit --strict --disable-pip --require-hashes -r requirements/constraints.txt \
		$$(sed -n 's/^\(CVE-[^ ]*\) .*/--ignore-vuln \1/p' requirements/audit.txt) \
		|| { echo "make audit: not all is known to be sound; what was known last:"; cat requirements/audit.txt; exit 1; } >&2

constraints: ## requirements/constraints.txt and docs.txt anew: as pyproject.toml asks; UPGRADE=--upgrade takes the newest versions
	test -d $(LOCK) || $(PYTHON) -m venv $(LOCK)
	$(LOCK)/bin/pip install --quiet --disable-pip-version-check uv==0.13.9
	grep '^#' requirements/constraints.txt > $(LOCK)/head.txt
	echo "torch ; python_version < '3'" > $(LOCK)/without.txt
	printf '%s\n' $(BUILD) $(OF_TORCH) > $(LOCK)/more.in
	$(LOCK)/bin/uv pip compile --quiet --universal --python-version 3.10 --generate-hashes --no-header --no-annotate \
		$(UPGRADE) --all-extras --override $(LOCK)/without.txt pyproject.toml $(LOCK)/more.in -o requirements/constraints.txt
	cat $(LOCK)/head.txt requirements/constraints.txt > $(LOCK)/new.txt
	mv $(LOCK)/new.txt requirements/constraints.txt
	grep '^#' requirements/docs.txt > $(LOCK)/new.txt
	echo zensical==0.0.73 | $(LOCK)/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
		--no-header --no-annotate - >> $(LOCK)/new.txt
	mv $(LOCK)/new.txt requirements/docs.txt

# A package that is not the one of vendor/VERSIONS is refused. Imports by name become relative: a browser has no node_modules.
web-vendor: ## The libraries of the page anew, from npm, of the versions in vendor/VERSIONS
	rm -rf $(FETCHED) && mkdir $(FETCHED)
	cd $(FETCHED) && npm pack --silent $$(sed -n 's/^[0-9a-f]* *\(.*\)-\(.*\)\.tgz$$/\1@\2/p' ../$(VENDOR)/VERSIONS)
	cd $(FETCHED) && sha512sum --check --strict ../$(VENDOR)/VERSIONS
	for name in preact htm uplot; do \
		mkdir $(FETCHED)/$$name && tar -xzf $(FETCHED)/$$name-[0-9]*.tgz -C $(FETCHED)/$$name --strip-components 1 \
		&& cp $(FETCHED)/$$name/LICENSE $(VENDOR)/$$name.LICENSE || exit 1; done
	sed '/^\/\/# sourceMappingURL/d' $(FETCHED)/preact/dist/preact.mjs > $(VENDOR)/preact.js
	sed '/^\/\/# sourceMappingURL/d; s/from"preact"/from".\/preact.js"/' $(FETCHED)/preact/hooks/dist/hooks.mjs > $(VENDOR)/hooks.js
	cp $(FETCHED)/htm/dist/htm.mjs $(VENDOR)/htm.js
	{ cat $(FETCHED)/uplot/dist/uPlot.iife.min.js; echo 'export default uPlot;'; } > $(VENDOR)/uplot.js
	cp $(FETCHED)/uplot/dist/uPlot.min.css $(VENDOR)/uplot.css
	rm -rf $(FETCHED)

web-screens: $(VENV)/.dev ## Pictures of the page: those in docs/web.md, and of all views in build/web-screens; needs chromium
	$(BIN)/python -m tests.lab.web.screens

release: $(VENV)/.dev ## What a release publishes, in dist/: built twice, tried in an empty environment, with its components and sums
	$(BIN)/python tools/release.py

clean: ## Remove the environments and caches
	rm -rf $(VENV) $(FRAMEWORKS) $(AUDIT) $(LOCK) $(DOCS) $(MATERIAL) $(GPU) build .mypy_cache .ruff_cache .pytest_cache .hypothesis
