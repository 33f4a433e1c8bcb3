# Everything is made from here; every target sets up what it needs in the project's own virtual environment (.venv).
#
#   PYTHON=python3.12 make test     which interpreter the environment is made from
#   WITH_TORCH=1 make test          also install torch (CPU is enough) and transformers, and run the tests that need them
#   KVCM_OPT=1 make test-compiled   compile faster; the wheel of `make compile` is meant to be built with 3
#   SOAK=2000000 SEED=7 make soak   operations of the simulation on each build, and its first seed (default: another one each day)
#   OPS=200000 EVERY=100 STREAMS=50000 make hunt    a shorter hunt: operations, every so many refused calls (of `faults` too), requests
#   PYTEST="-n 0 -k tree -x"        arguments of pytest in place of the default (two workers)

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules --no-print-directory

PYTHON ?= python3
KVCM_OPT ?= 3
PYTEST ?= -n 2
SOAK ?= 500000
OPS ?= 5000000
EVERY ?= 1
STREAMS ?= 1000000
SEED ?= $(shell date +%Y%m%d)
BENCH ?=
AB ?=
PEERS ?= ../shared/peers
ENGINES ?=
WITH_TORCH ?=
TORCH := torch==2.13.0 transformers==5.24.0

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
STUBS := stubs/kv_cache_manager_v2-stubs
STUB_FILES := $(sort $(shell cd $(STUBS) && find . -name '*.pyi' -printf '%P\n'))
TYPED := kv_cache_manager_v2 tests setup_mypyc.py generated_c.py stubs/generate.py $(wildcard examples bench)

SOURCES := $(sort $(shell find kv_cache_manager_v2 stubs -name '*.py' -o -name '*.pyi'))
BUILD_INPUTS := build/sources $(SOURCES) pyproject.toml setup_mypyc.py generated_c.py spare_objects.h LICENSE README.md

define FIND_GPU
import sys
from kv_cache_manager_v2.build import cuda_problem
print(problem := cuda_problem())
sys.exit(bool(problem))
endef
export FIND_GPU

ENV := $(VENV)/stamp $(if $(filter 1,$(WITH_TORCH)),$(VENV)/stamp-torch)
PURE := build/pure/.stamp
COMPILED := build/compiled/.stamp-O$(KVCM_OPT)
ON = KVCM_BACKEND=$$build PYTHONPATH=$(CURDIR)/build/compiled:$(CURDIR)

.PHONY: help
help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

.PHONY: test
test: lint typecheck stubtest test-pure test-compiled  ## lint, types, stubtest, and the suite on both builds

.PHONY: test-pure
test-pure: $(ENV) $(PURE)  ## the suite on the interpreted build
	PYTHONPATH=$(CURDIR)/build/pure $(BIN)/pytest --expect-build=pure $(PYTEST)

.PHONY: test-compiled
test-compiled: $(ENV) $(COMPILED)  ## the suite on the compiled build
	PYTHONPATH=$(CURDIR)/build/compiled $(BIN)/pytest --expect-build=compiled $(PYTEST)

.PHONY: test-engines
test-engines: $(ENV) $(VENV)/stamp-torch $(COMPILED)  ## every model family of transformers over our pages, on both builds
	for build in interpreted compiled; do \
	    KVCM_FAMILIES=all $(ON) $(BIN)/pytest $(PYTEST) tests/extras/transformers || exit 1; \
	done

.PHONY: test-versions
test-versions: $(ENV)  ## the suite on both builds, and a wheel in dist/, under every CPython from 3.10 on that is installed (half an hour)
	$(BIN)/python tests/packaging/versions.py

.PHONY: lint
lint: $(ENV)  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

.PHONY: typecheck
typecheck: $(ENV)  ## mypy --strict over the package, the tests and the tools; the stubs are what `make stubs` writes
	$(BIN)/python stubs/generate.py --check
	$(BIN)/mypy $(TYPED)

.PHONY: stubtest
stubtest: $(ENV) $(PURE)  ## the public stubs against the interpreted package, and for themselves
	PYTHONPATH=build/pure MYPYPATH=build/pure $(BIN)/stubtest --mypy-config-file pyproject.toml \
	    --allowlist stubs/stubtest_allowlist.txt kv_cache_manager_v2
	cd build && MYPYPATH=pure:../stubs ../$(BIN)/mypy --strict --config-file= --cache-dir=../.mypy_cache/stubs \
	    $(addprefix pure/kv_cache_manager_v2/,$(STUB_FILES))

.PHONY: stubs
stubs: $(ENV)  ## write the public stubs from the sources
	$(BIN)/python stubs/generate.py

.PHONY: demo
demo: $(ENV) $(COMPILED)  ## the example: two small models served from our pages, compared to the bit
	PYTHONPATH=build/compiled $(BIN)/python examples/serve_tiny_llm.py
	PYTHONPATH=build/compiled $(BIN)/python examples/serve_tiny_llm.py --model hybrid

.PHONY: demo-transformers
demo-transformers: $(ENV) $(VENV)/stamp-torch $(COMPILED)  ## a hybrid model of transformers serves more conversations than fit; every answer is compared
	PYTHONPATH=build/compiled $(BIN)/python examples/serve_transformers.py

.PHONY: bench
bench: $(ENV) $(COMPILED)  ## what the operations cost, compiled and interpreted, and how that grows (BENCH="micro --only probe")
	$(BIN)/python -m bench $(BENCH)

.PHONY: bench-quick
bench-quick: $(ENV) $(COMPILED)  ## the same at small sizes, in under a minute: whether it runs, not how fast
	$(BIN)/python -m bench --quick

.PHONY: bench-ab
bench-ab: $(ENV) $(COMPILED)  ## a simulated engine around the manager, 100,000 requests on each build (AB="--requests 5000")
	$(BIN)/python -m bench.ab $(AB)

.PHONY: bench-against
bench-against: $(ENV) $(COMPILED)  ## this tree beside another checkout with a build of its own, in interleaved pairs (OTHER=DIR)
	$(BIN)/python -m bench.against $(OTHER)

.PHONY: bench-peers
bench-peers: $(ENV) $(COMPILED)  ## other cache managers beside ours; PEERS names the folder with the scripts that drive them
	$(BIN)/python -m bench.peers --scripts $(PEERS)

.PHONY: bench-engines
bench-engines: $(ENV) $(COMPILED)  ## vLLM's scheduler over our manager and over its own: same schedules, cost of a step (ENGINES="check")
	$(BIN)/python -m bench.engines $(ENGINES)

.PHONY: test-cuda
test-cuda: $(ENV) $(VENV)/stamp-cuda $(COMPILED)  ## the tests that need a real GPU, or a line that says they were skipped
	@if problem=$$(PYTHONPATH=build/compiled $(BIN)/python -c "$$FIND_GPU"); then \
	    PYTHONPATH=$(CURDIR)/build/compiled $(BIN)/pytest --expect-build=compiled -m cuda -n 0; \
	else \
	    echo "test-cuda: SKIPPED, no CUDA device here: $$problem"; \
	fi

.PHONY: bench-cuda
bench-cuda: $(ENV) $(VENV)/stamp-cuda $(COMPILED)  ## the benchmark on a real GPU, or a line that says it was skipped
	@if problem=$$(PYTHONPATH=build/compiled $(BIN)/python -c "$$FIND_GPU"); then \
	    $(BIN)/python -m bench micro --build compiled --device cuda; \
	    PYTHONPATH=build/compiled $(BIN)/python bench/device_costs.py; \
	else \
	    echo "bench-cuda: SKIPPED, no CUDA device here: $$problem"; \
	fi

.PHONY: soak
soak: $(ENV) $(COMPILED)  ## the simulation at length on both builds, then the properties with many examples (tens of minutes)
	for build in interpreted compiled; do \
	    (cd build/compiled && $(ON) ../../$(BIN)/python -m tests.simulation --ops $(SOAK) --seed $(SEED)) || exit 1; \
	done
	KVCM_HYPOTHESIS=nightly PYTHONPATH=$(CURDIR)/build/compiled $(BIN)/pytest --expect-build=compiled $(PYTEST)

.PHONY: hunt
hunt: $(ENV) $(COMPILED)  ## the hunt for wrong bytes and lost slots on both builds: OPS operations, every refused call, a million streams (hours)
	for build in interpreted compiled; do \
	    hunt="env $(ON) ../../$(BIN)/python -m tests.hunt --seed $(SEED)"; \
	    (cd build/compiled && $$hunt --ops $(OPS) && $$hunt --count $(EVERY) && $$hunt --streams $(STREAMS) && \
	        $$hunt --ops $$(($(OPS) / 50)) --interrupts timer --faults no && \
	        $$hunt --ops $$(($(OPS) / 50)) --per-run 500 --interrupts calls --faults no && \
        $$hunt --starve $$(($(OPS) / 10000))) || exit 1; \
	done
	cd build/compiled && build=interpreted && $(ON) ../../$(BIN)/python -m tests.hunt --seed $(SEED) \
	    --ops 100000 --per-run 500 --interrupts places --faults no

.PHONY: faults
faults: $(ENV) $(COMPILED)  ## every call that the manager makes of its device refused, alone and with another, on both builds
	for build in interpreted compiled; do \
	    (cd build/compiled && $(ON) ../../$(BIN)/python -m tests.hunt --seed $(SEED) --count $(EVERY)) || exit 1; \
	done

.PHONY: compile
compile: $(ENV) $(COMPILED)  ## the compiled wheel, in dist/
	mkdir -p dist
	cp build/wheels/compiled/*.whl dist/
	@ls dist/*.whl

.PHONY: clean
clean:  ## remove everything that was made, the environment too
	rm -rf build dist $(VENV) *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- the environment: pip resolves the extras by installing the interpreted package, which then goes again

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/stamp: pyproject.toml | $(VENV)/bin/python
	$(PIP) install 'setuptools>=77'
	KVCM_PURE=1 $(PIP) install --no-build-isolation '.[dev,cli,plot]'
	$(PIP) uninstall --yes kv-cache-manager-v2
	touch $@

$(VENV)/stamp-torch: $(VENV)/stamp
	$(PIP) install $(TORCH)
	touch $@

$(VENV)/stamp-cuda: $(VENV)/stamp
	$(PIP) install 'cuda-bindings>=12.9'
	touch $@

# --- the builds: each wheel is unpacked into a directory of its own, and tested there

# the list of the sources: it changes, and so its time, only when a file is added or removed
.PHONY: always
build/sources: always
	@mkdir -p build
	@echo '$(SOURCES)' | cmp -s - $@ || echo '$(SOURCES)' > $@

$(PURE): $(BUILD_INPUTS) | $(VENV)/stamp
	rm -rf build/pure build/wheels/pure
	KVCM_PURE=1 $(PIP) wheel --no-deps --no-build-isolation --wheel-dir build/wheels/pure .
	$(BIN)/python -m zipfile -e build/wheels/pure/*.whl build/pure
	touch $@

$(COMPILED): $(BUILD_INPUTS) | $(VENV)/stamp
	rm -rf build/compiled build/wheels/compiled
	KVCM_PURE=0 KVCM_OPT=$(KVCM_OPT) $(PIP) wheel --no-deps --no-build-isolation --wheel-dir build/wheels/compiled .
	$(BIN)/python -m zipfile -e build/wheels/compiled/*.whl build/compiled
	touch $@
