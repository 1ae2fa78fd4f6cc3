# `make demo` and `make test` set everything up by themselves; `make help` lists the rest.

# Interpreter for a new .venv, e.g. make PYTHON=/opt/python3.12/bin/python3. Unset: the first fit one on PATH.
PYTHON ?=
# Where the CPU build of torch is taken from when pip does not find it where it looks by itself. Empty: nowhere else.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# What `make breaking` compares the API with: the last release, else the main branch this clone came from.
BASE ?= $(shell git describe --tags --abbrev=0 2>/dev/null || git rev-parse --quiet --verify origin/main)
# Further arguments for pytest, e.g. make unit ARGS='-k rollout -x'
ARGS ?=

export PYTHON TORCH_INDEX
BIN := $(CURDIR)/.venv/bin
PYTEST := $(BIN)/python -m pytest
# In CI, a test that failed beside others gets one more run by itself, and both runs are printed: a machine that stood
# still for a minute is no reason to throw work away, and a test that fails twice is one to act on.
ALONE = $(if $(CI),|| { echo "again by themselves: the tests that failed"; $(PYTEST) -q --last-failed --last-failed-no-failures none $(1); })
# The alert rules' tests drive a real Prometheus, which no Python package index has. CI does not do without it.
PROMETHEUS := promtool prometheus prometheus-alertmanager
MISSING = $(strip $(foreach program,$(PROMETHEUS),$(if $(shell command -v $(program)),,$(program))))
FAST = not engine and not slow$(if $(CI),,$(if $(MISSING), and not prometheus))
ENGINE = engine and not slow$(if $(CI),,$(if $(MISSING), and not prometheus))
WITHOUT_ENGINE = --ignore tests/engine --ignore tests/e2e
LEFT_OUT = $(if $(CI),,$(if $(MISSING),@echo "left out for want of $(MISSING): tests of the alert rules (apt-get install prometheus prometheus-alertmanager)"))

.DEFAULT_GOAL := help
.PHONY: help demo test soak bench compat check unit engine-tests lint format types imports api breaking generate generated run dev all clean

help: ## Show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: run ## Two real vLLM replicas, load, and the three kinds of reset, measured
	@$(BIN)/kvctl demo $(ARGS)

test: all ## Every test: the fast suite, then real vLLM engines and the fleet end to end
	$(LEFT_OUT)
	$(PYTEST) -m "$(FAST)" -n 2 -q $(WITHOUT_ENGINE) $(ARGS) $(call ALONE,-m "$(FAST)" $(WITHOUT_ENGINE) $(ARGS))
	$(PYTEST) -m "$(ENGINE)" -q $(ARGS) $(call ALONE,-m "$(ENGINE)" $(ARGS))

unit: dev ## The fast suite, no vLLM needed
	$(LEFT_OUT)
	$(PYTEST) -m "$(FAST)" -n 2 -q $(WITHOUT_ENGINE) $(ARGS)

engine-tests: all ## Only the tests on real vLLM
	$(LEFT_OUT)
	$(PYTEST) -m "$(ENGINE)" -q $(ARGS)

soak: all ## The long runs: state machine, load, inference, random faults, everything slow; about an hour and a half
	KVCTL_STATE_MACHINE_RUNS=2000 timeout -k 60 7200 $(PYTEST) -q tests/engine/test_state_machine.py $(ARGS)
	KVCTL_LOAD_SECONDS=600 timeout -k 60 4800 $(PYTEST) -q tests/robustness/test_load.py $(ARGS)
	KVCTL_INFERENCE_SECONDS=300 timeout -k 60 2400 $(PYTEST) -q tests/e2e/test_real_inference.py $(ARGS)
	KVCTL_FAULT_SECONDS=600 timeout -k 60 5400 $(PYTEST) -q -s -m slow $(ARGS)

bench: all ## Every figure of docs/benchmarks.md, into build/bench, e.g. make bench ARGS='--only latency --write-docs'
	$(BIN)/python -m tests.bench $(ARGS)

compat: all ## The bridge's engine tests on vLLM 0.29 to 0.33, and the table that README carries
	$(BIN)/python -m tests.compat.run $(ARGS)

check: lint types imports api breaking generated ## Everything that is checked without running: style, types, imports, API

lint: dev ## ruff, lint and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: dev ## Let ruff and buf put things into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	cd proto && $(BIN)/buf format --write

types: dev ## mypy, strict
	$(BIN)/mypy

imports: dev ## The architecture, as import rules
	$(BIN)/lint-imports

api: dev ## buf, lint and format of the API
	cd proto && $(BIN)/buf lint && $(BIN)/buf format --diff --exit-code

breaking: dev ## No change that breaks clients of BASE
	@if [ -n "$(BASE)" ] && git cat-file -e "$(BASE):proto/buf.yaml" 2>/dev/null; then \
	  echo "buf breaking --against $(BASE)"; \
	  cd proto && $(BIN)/buf breaking --against '../.git#ref=$(BASE),subdir=proto'; \
	else \
	  echo "breaking: nothing to compare the API with (no release, no origin/main)"; \
	fi

generate: dev ## Generate proto/gen from proto/kvctl
	proto/generate.sh $(BIN)/python

generated: generate ## proto/gen is what the API generates
	@git diff --exit-code --stat -- proto/gen && test -z "$$(git status --porcelain -- proto/gen)" || \
	  { echo "proto/gen is not what proto/kvctl generates: commit what 'make generate' made" >&2; exit 1; }

run: ## Set up .venv with kvctl and vLLM on the CPU, for trying things by hand
	@.ci/setup $@

dev all: # to develop without vLLM; everything
	@.ci/setup $@

clean: ## Remove .venv and everything made here
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
