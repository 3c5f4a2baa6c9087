# Everything here sets itself up: a virtual environment in .venv, pinned packages, the project with its compiled
# extension, the demo model. All that is needed beforehand is make and Python 3.11 or newer; a C compiler makes it fast.
#
#   make demo    a real model answers, streamed
#   make serve   the same model for OpenAI's and Anthropic's clients, with a chat page
#   make test    the test suite            make check   style, types, import arrows
#   make lock    resolve requirements/ anew from pyproject.toml
#
# Choices: BACKEND=cpu|cuda12|cuda13|darwin   PYTHON=...   VENV=...   JOBS=2   MODEL=...   PROMPT=...   PORT=8000   TESTS=tests/cli

SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV ?= .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input

# The first interpreter that is new enough and can make a virtual environment.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14 python; do \
	if $$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; \
	then echo $$p; break; fi; done)

# macOS brings Metal with MLX itself; on Linux an NVIDIA driver decides, by the CUDA version it says it supports.
CUDA = $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\([0-9][0-9]*\).*/\1/p')
ifeq ($(shell uname -s),Darwin)
BACKEND ?= darwin
else ifeq ($(CUDA),12)
BACKEND ?= cuda12
else ifneq ($(filter 13 14 15,$(CUDA)),)
BACKEND ?= cuda13
else
BACKEND ?= cpu
endif

# Progress goes to standard error: standard output is the answer's.
SAY := printf 'make: %s\n' >&2

JOBS ?= 2
MODEL ?= smollm2-135m
PORT ?= 8000
PROMPT ?= Explain in three sentences why the sky is blue.
TESTS ?= tests
SOURCES := $(shell find polytoken/kernels polytoken/oracle/canary -name '*.[ch]' -o -name '*.cpp' -o -name '*.inc' 2>/dev/null)

.PHONY: help demo serve test check lint types imports lock setup setup-server setup-dev model clean

help:
	@sed -n '/^# /s/^# //p; /^#$$/s/.*//p; /^SHELL/q' $(firstword $(MAKEFILE_LIST))

demo: setup model
	@$(SAY) "loading $(MODEL); then its answer to: $(PROMPT)"
	@$(BIN)/polytoken generate --model $(MODEL) --stream --verbose --max-new-tokens 160 --prompt "$(PROMPT)"

serve: setup-server model
	@$(BIN)/polytoken serve --model $(MODEL) --port $(PORT)

test: setup-dev model
	$(BIN)/python -m pytest -n $(JOBS) $(TESTS)

check: lint types imports

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup-dev
	$(BIN)/mypy

imports: setup-dev
	$(BIN)/lint-imports

model: setup
	@$(SAY) "looking for $(MODEL) (the first time it is fetched and converted: 93 MB, about a minute)"
	@$(BIN)/polytoken pull $(MODEL) --verbose >/dev/null

lock:
	$(PYTHON) requirements/lock.py

clean:
	rm -rf $(VENV) build *.egg-info polytoken/kernels/_products*.so polytoken/kernels/_fused*.so \
		polytoken/oracle/canary/_watchdog*.so

setup: $(STAMPS)/project
setup-server: setup $(STAMPS)/server
setup-dev: setup $(STAMPS)/dev

$(STAMPS)/venv:
	@[ -n "$(PYTHON)" ] || { echo "make: no Python 3.11 or newer with venv was found; install one (Debian: apt install \
	python3 python3-venv) or say PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(SAY) "making a virtual environment in $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/runtime-$(BACKEND): requirements/runtime.lock requirements/build.lock requirements/backend-$(BACKEND).lock \
		| $(STAMPS)/venv
	@$(SAY) "installing the pinned packages for $(BACKEND) (a minute or two, a few hundred MB the first time)"
	@$(PIP) install -qq -r requirements/runtime.lock -r requirements/build.lock -r requirements/backend-$(BACKEND).lock
	@touch $@

$(STAMPS)/server: requirements/server.lock $(STAMPS)/runtime-$(BACKEND)
	@$(SAY) "installing what the server needs"
	@$(PIP) install -qq -r requirements/runtime.lock -r requirements/server.lock
	@touch $@

$(STAMPS)/dev: requirements/dev.lock $(STAMPS)/runtime-$(BACKEND)
	@$(SAY) "installing the tools for tests and checks"
	@$(PIP) install -qq -r requirements/runtime.lock -r requirements/dev.lock
	@touch $@

$(STAMPS)/project: pyproject.toml setup.py $(SOURCES) $(STAMPS)/runtime-$(BACKEND)
	@$(SAY) "building the project and its compiled products"
	@$(PIP) install -qq --no-deps --no-build-isolation --editable .
	@$(BIN)/python -c 'import polytoken.kernels._products' 2>/dev/null || echo "make: note: the compiled products were \
	not built (they need a C compiler and Python's headers); all works, but slowly: see docs/troubleshooting.md" >&2
	@touch $@
