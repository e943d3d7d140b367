# `make quickstart` and `make test` are the two commands to know; both make .venv when it is missing or out of date.
# pip is called plainly, so its own configuration (an index behind a proxy, a certificate) is what counts.

VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

SUITABLE := import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
# A name on the path need not run (version managers leave shims for absent versions) nor be able to make a venv: try it.
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3 python; do \
	$$name -c '$(SUITABLE)' >/dev/null 2>&1 && { echo $$name; break; }; done)
# A venv breaks when the checkout moves, when its Python is removed, or when making it was interrupted: then it is remade.
HEALTHY := $(shell grep -qsF '$(CURDIR)/$(VENV)' $(BIN)/activate && $(BIN)/python -m pip --version 2>/dev/null)

.PHONY: help quickstart test test-all lint clean venv
.DELETE_ON_ERROR:

help:
	@echo "make quickstart   train an agent on this machine and write runs/quickstart/report.html"
	@echo "make test         what CI runs: lint, types, the test suite"
	@echo "make test-all     the slow and optional tests as well"
	@echo "make lint         ruff and pyright only"
	@echo "make clean        remove .venv and caches; runs/ stays"

quickstart: $(VENV)/.runtime
	$(BIN)/agentrl train configs/quickstart.py $(if $(wildcard runs/quickstart/config.json),--resume)

test: lint
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

test-all: lint
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m ""

lint: $(VENV)/.dev
	$(BIN)/python -m ruff check
	$(BIN)/python -m pyright

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

venv:
	@test -n "$(PYTHON)" || { echo "make: found no Python 3.11, 3.12 or 3.13 that can make a venv (on Debian that" \
	"needs its -venv package too). Install one, or type: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@"$(PYTHON)" -c '$(SUITABLE)' || { \
	echo "make: PYTHON=$(PYTHON) is not a Python 3.11, 3.12 or 3.13 that can make a venv" >&2; exit 1; }
	rm -rf $(VENV)
	"$(PYTHON)" -m venv $(VENV)

ifeq ($(HEALTHY),)
$(VENV)/.runtime: venv
endif

$(VENV)/.runtime: pyproject.toml constraints.txt
	$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(PIP_INSTALL) -e '.[dev]'
	@touch $@
