# Two commands do everything: `make serve` and `make test`. Both set up .venv first; a second run starts at once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
SERVE_ARGS ?=
TEST_ARGS ?=
CHAOS_SEED ?= $(shell date +%s)
CHAOS_SECONDS ?= 120
TRAIN_ARGS ?=
CLIENTS := $(patsubst tests/contract/clients/%.txt,build/clients/%/.installed,$(wildcard tests/contract/clients/*.txt))

.PHONY: help setup serve test test-long chaos clients fuzz front lint format train train-video clean

help:  ## Show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(INSTALLED)  ## Create .venv and install Triptych with its development tools

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Triptych needs Python 3.11 or newer: $$($(PYTHON) --version) found; set PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

serve: setup  ## Serve the embedded model on two replicas at port 8000
	$(BIN)/triptych serve $(SERVE_ARGS)

test: setup clients  ## Run the test suite
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile $(TEST_ARGS)

test-long: setup  ## Run the tests that take minutes: short trainings of the embedded models
	$(BIN)/python -m pytest -m long $(TEST_ARGS)

clients: $(CLIENTS)  ## Install the other clients that the tests use, each in a folder that is put before .venv

build/clients/%/.installed: tests/contract/clients/%.txt | $(INSTALLED)
	rm -rf build/clients/$*
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --target build/clients/$* --requirement $<
	@touch $@

fuzz: setup  ## Send 10,000 requests that schemathesis makes of the OpenAPI document; takes minutes
	TRIPTYCH_FUZZ_EXAMPLES=380 TRIPTYCH_FUZZ_LEAST=10000 $(BIN)/python -m pytest -s tests/contract/test_openapi_document.py

chaos: setup  ## Run the chaos suite in its long form, some minutes; CHAOS_SEED=... CHAOS_SECONDS=... repeat a storm
	CHAOS_SEED=$(CHAOS_SEED) CHAOS_SECONDS=$(CHAOS_SECONDS) MEMORY_REQUESTS=10000 $(BIN)/python -m pytest tests/chaos -v

front: setup  ## Measure what the front costs and how close to ideal many replicas come; takes minutes
	$(BIN)/python benchmarks/front/front_cost.py --at-most 256x256=1.0 --at-most 1024x1024=0.5
	$(BIN)/python benchmarks/front/scaling.py counts --at-least 0.97
	$(BIN)/python benchmarks/front/scaling.py wide --at-least 0.95
	$(BIN)/python benchmarks/front/scaling.py rotation

lint: setup  ## Check style, types and the direction of dependencies
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: setup  ## Format the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

train: setup  ## Make the embedded picture model from nothing in build/shapes; a run that was stopped goes on
	$(BIN)/python -m training.shapes.train run $(TRAIN_ARGS)

train-video: setup  ## Make the embedded clip model from nothing in build/shapes-video, as above
	$(BIN)/python -m training.shapes_video.train run $(TRAIN_ARGS)

clean:  ## Remove what the targets made
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
