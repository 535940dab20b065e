# One command does all the set-up it needs: `make demo` trains the tiny memory agent, `make test` passes the tests.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
VENV ?= .venv
BIN := $(VENV)/bin
# Where pip finds PyTorch's CPU build, if your pip is not set up for it already: a URL or folder of wheels.
TORCH_WHEELS ?=
PYTEST_ARGS ?=
# `make gpu`: where its environment goes, and a folder of wheels in place of the package index.
GPU_VENV ?= .venv-gpu
GPU_WHEELS ?=
export GPU_VENV GPU_WHEELS

.PHONY: help setup constraints demo gpu gpu-setup gpu-wheels gpu-lock test test-long test-cluster test-fast test-parts lint docs format types clean

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

gpu: gpu-setup  ## Train SmolLM2-135M on a GPU of this machine; installs SGLang and CUDA's PyTorch into .venv-gpu
	bash scripts/gpu.sh train

gpu-setup:  ## Only install what `make gpu` needs
	bash scripts/gpu.sh

gpu-wheels:  ## Download those packages into GPU_WHEELS=FOLDER, for a GPU host without a network
	bash scripts/gpu.sh wheels

gpu-lock: setup  ## Write requirements-gpu.txt, the versions and hashes that `make gpu` installs
	$(BIN)/python scripts/gpu_lock.py

test: test-parts  ## Run all tests but the long ones: real training, real crashes, and (as root) real hosts on this machine
	$(BIN)/python scripts/run_tests.py $(PYTEST_ARGS)

test-long: test-parts  ## Run the tests that take long: the tiny preset learns, many kills, every fault of hosts, images, dispatched runs
	$(BIN)/python scripts/run_tests.py --long $(PYTEST_ARGS)

test-parts: setup  # What the tests want beside the virtual environment
	bash scripts/test-tools.sh
	$(BIN)/python scripts/vllm_cpu.py

test-cluster: test-parts  ## Only set-up, images, Ray and dispatched runs on three real hosts on this machine (root)
	CLUSTERKIT_REQUIRE_REAL=1 $(BIN)/python -m pytest tests/cluster $(PYTEST_ARGS)

test-fast: setup  ## Run the tests that take no training
	$(BIN)/python -m pytest tests/unit $(PYTEST_ARGS)

lint: setup  ## Style, shellcheck over all shell (what is sent to hosts included), and which room may import which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/lint_shell.py
	$(BIN)/lint-imports --no-logo

docs: setup  ## Build the pages of documentation as a site, in site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

format: setup  ## Put the style right
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: setup  ## Strict types
	$(BIN)/mypy

clean:  ## Remove caches (never runs, checkpoints or the environment)
	rm -rf .pytest_cache .mypy_cache .ruff_cache dist build
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
