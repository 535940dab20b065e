# One command does all the set-up it needs: `make demo` trains the tiny memory agent, `make test` passes the tests.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
VENV ?= .venv
BIN := $(VENV)/bin
# Where pip finds PyTorch's CPU build, if your pip is not set up for it already: a URL or folder of wheels.
TORCH_WHEELS ?=
PYTEST_ARGS ?=

.PHONY: help setup constraints demo test test-cluster test-fast lint format types clean

help:  ## What can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(VENV)/.ready  ## Make the virtual environment with everything in it

$(VENV)/.ready: pyproject.toml constraints.txt scripts/setup.sh
	VENV="$(VENV)" TORCH_WHEELS="$(TORCH_WHEELS)" bash scripts/setup.sh
	@touch $@

constraints: setup  ## Write constraints.txt, the versions that `make setup` installs, from the environment as it is
	$(BIN)/python scripts/constraints.py
	@touch $(VENV)/.ready

demo: setup  ## Train the tiny memory agent here: minutes, no GPU
	$(BIN)/clusterkit train --preset tiny

test: setup  ## Run every test: real training, real crashes, and (as root) real hosts on this machine
	bash scripts/test-tools.sh
	$(BIN)/python scripts/vllm_cpu.py
	CLUSTERKIT_REQUIRE_REAL=$${CLUSTERKIT_REQUIRE_REAL:-} $(BIN)/python scripts/run_tests.py --durations=15 $(PYTEST_ARGS)

test-cluster: setup  ## Only set-up, images, Ray and dispatched runs on three real hosts on this machine (root)
	bash scripts/test-tools.sh
	CLUSTERKIT_REQUIRE_REAL=1 $(BIN)/python -m pytest tests/cluster $(PYTEST_ARGS)

test-fast: setup  ## Run the tests that take no training
	$(BIN)/python -m pytest tests/unit $(PYTEST_ARGS)

lint: setup  ## Style, shellcheck over all shell (what is sent to hosts included), and which room may import which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/lint_shell.py
	$(BIN)/lint-imports --no-logo

format: setup  ## Put the style right
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: setup  ## Strict types
	$(BIN)/mypy

clean:  ## Remove caches (never runs, checkpoints or the environment)
	rm -rf .pytest_cache .mypy_cache .ruff_cache dist build
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
