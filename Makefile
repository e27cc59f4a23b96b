# Everything here sets itself up: `make demo` and `make test` work on a fresh clone.
# Stamps under .venv/ keep a warm run short; an interrupted step leaves no stamp and is done again.
SHELL := /bin/bash
# --norc: over ssh, Debian's bash would read its start file, which -u does not like.
.SHELLFLAGS := --norc -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory
# A test run starts hundreds of interpreters: where bytecode may not be written, each of them compiles the sources.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
EXTRAS := sandbox,env,farm,otel,mcp,dev
PIP_ARGS ?=
PYTEST_ARGS ?=
TEST_PROCESSES ?= 6
DEMO_ARGS ?=
BENCH_ARGS ?=
SECONDS ?= 600
SEED ?=
HARBOR ?=
GUEST ?=
PYTHONS ?=
HARNESSES ?=
ARGS ?=
HOSTS_ARGS ?=
BACKEND ?=
NOMAD_PORT ?= 4646
SLOTAGENT := src/agentenv/sandbox/slotagent

.PHONY: help setup system testing containers as-root slotagent image nomad-dev nomad-dev-down nomad-dev-status
.PHONY: demo agents test test-quick sweep harnesses hosts check check-bare check-pythons format bench doctor clean

help: ## Say what can be made
	@printf 'agentenv: a farm of sandbox slots for reinforcement learning of LLM agents\n\n'
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@printf '\nVariables: PYTHON (interpreter for .venv), BACKEND, NOMAD_PORT,\n           PYTEST_ARGS, TEST_PROCESSES, SECONDS, SEED, HARBOR, PYTHONS, GUEST, HOSTS_ARGS, DEMO_ARGS, BENCH_ARGS\n'

setup: system $(STAMPS)/python ## Install system packages (root on Debian) and the virtual environment

# -- installed once -------------------------------------------------------------------------------

$(STAMPS)/venv: scripts/make-venv
	@scripts/make-venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

system:
	@scripts/system-packages core

testing:
	@scripts/system-packages tests

containers:
	@scripts/system-packages nomad

$(STAMPS)/python: pyproject.toml constraints.txt scripts/install-python | $(STAMPS)/venv
	@echo "installing the Python packages of constraints.txt into $(VENV) (minutes when cold)"
	@scripts/install-python $(VENV) $(PIP_ARGS) -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

# -- what people run ------------------------------------------------------------------------------

slotagent: setup ## Compile the static C programs that start slots and run inside them
	@echo "compiling the C programs of slots, unless they are current, into $(SLOTAGENT)/bin"
	@$(BIN)/python -m agentenv.sandbox.slotagent.build >/dev/null
	@$(BIN)/python -m compileall -q src/agentenv # a container's server may write no bytecode: it would compile at every start

image: slotagent containers ## Build the image of the farm's containers, unless it is there and current
	@exec $(BIN)/agentenv image build

nomad-dev: as-root slotagent ## A Nomad cluster on this machine: engine, image, agent; root (NOMAD_PORT)
	@$(BIN)/agentenv dev nomad # an engine is not installed where there is no Nomad to be had
	@scripts/system-packages nomad
	@exec $(BIN)/agentenv dev up --port $(NOMAD_PORT)

as-root:
	@[ "$$(id -u)" = 0 ] || { echo "it needs root, to start a Docker engine and a Nomad client, or to make the disks of machines" >&2; exit 1; }

nomad-dev-down: setup ## Stop that cluster and leave nothing of it
	@exec $(BIN)/agentenv dev down

nomad-dev-status: setup ## Say what of it runs
	@$(BIN)/agentenv dev status || test $$? = 1

demo: slotagent ## Repair real programs in a farm; writes out/demo/report.html (BACKEND=nomad: on that cluster)
	@exec $(BIN)/agentenv demo $(if $(BACKEND),--backend $(BACKEND)) $(DEMO_ARGS)

agents: slotagent ## Agent programs of others repair real packages (ARGS='--program codex'); writes out/agents
	@scripts/agent-programs >/dev/null
	@exec $(BIN)/python -m examples.agents $(ARGS)

test: slotagent testing containers ## Run every test
	@exec $(BIN)/python -m pytest --color=no -n $(TEST_PROCESSES) --no-loadscope-reorder --max-worker-restart 1000 $(PYTEST_ARGS)

# No container of its own kernel, cluster or compiler: `make test` has those. Contract tests run on the fake backend.
QUICK := golden contract/executor/test_executor_bash.py contract/executor/test_executor_files.py \
  contract/executor/test_executor_large.py \
  $(addprefix unit/,agent api containers executor farm farm_client image_placement metrics report sdk sessions slots store \
  tools wire)

test-quick: slotagent ## Run the tests that need no cluster, image or compiler: about a minute
	@exec $(BIN)/python -m pytest --color=no -q -n 2 -k "(not contract or (fake and not farm)) and not random and not simulated and not fuzz" $(addprefix tests/,$(QUICK)) $(PYTEST_ARGS)

sweep: slotagent testing ## Compare with independent programs: random cases of SEED for SECONDS; HARBOR: a virtual environment with harbor
	@if [ -n "$(HARBOR)" ]; then "$(HARBOR)/bin/python" -m tests.golden.harbor_answers --check; fi
	@if [ -n "$(HARBOR)" ]; then "$(HARBOR)/bin/python" tests/golden/atif_check.py; fi
	@seed="$(SEED)"; seed="$${seed:-$$RANDOM}"; echo "seed $$seed, $(SECONDS) s"; \
	  SWEEP_SECONDS=$(SECONDS) SWEEP_SEED="$$seed" exec $(BIN)/python -m pytest --color=no -n $(TEST_PROCESSES) -m sweep tests $(PYTEST_ARGS)

harnesses: slotagent ## Run other people's harnesses on agentenv, each in an environment of its own (HARNESSES, ARGS, EVERY_PYTHON)
	@HARNESSES="$(HARNESSES)" ARGS="$(ARGS)" EVERY_PYTHON="$(EVERY_PYTHON)" exec scripts/harnesses

hosts: as-root slotagent containers ## Boot whole Debian machines in QEMU and try agentenv on each; root (GUEST, HOSTS_ARGS)
	@scripts/system-packages hosts
	@exec $(BIN)/python -m hosts $(GUEST) $(HOSTS_ARGS)

check: setup ## Format, lint, strict types, import contracts, pins, generated code; changes nothing
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache
	@$(BIN)/python scripts/pins.py check
	@$(BIN)/python scripts/blocking_sdk.py check

check-bare: ## Set up and use a copy as a bare machine would: the system's Python, an empty environment
	@scripts/check-bare

check-pythons: testing ## Set up and test a copy with every Python of this machine (PYTHONS)
	@scripts/check-pythons $(PYTHONS)

format: setup ## Generate the blocking SDK, format the code and apply the linter's fixes
	@$(BIN)/python scripts/blocking_sdk.py
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: slotagent ## Measure the targets; writes out/bench/results.json
	@exec $(BIN)/agentenv bench $(BENCH_ARGS)

doctor: slotagent ## What works on this machine, what is weaker, how to cure it
	@exec $(BIN)/agentenv doctor

clean: ## Remove everything the targets made, the virtual environment included
	@rm -rf $(VENV) out build dist src/*.egg-info $(SLOTAGENT)/bin .cache
	@rm -rf .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	@find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
