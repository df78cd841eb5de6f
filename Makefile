# Every target makes its own environment in .venv first; after the first time that costs nothing.
# PYTHON=... chooses the interpreter (3.11 or later); ARGS=... is passed on to the command.

PYTHON ?= $(shell for python in python3.11 python3 python3.12 python3.13; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
VENV := .venv
INSTALLED := $(VENV)/installed
.DEFAULT_GOAL := help
.PHONY: help install demo test lint bench reproduce clean

help:  ## show this list
	@awk -F':.*## ' '/^[a-z]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' Makefile

install: $(INSTALLED)  ## make the environment in .venv and install mnemic into it

demo: $(INSTALLED)  ## train a small model with and without memory, compare them, write a report
	$(VENV)/bin/mnemic demo $(ARGS)

test: $(INSTALLED)  ## run all tests on two cores
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 2 $(ARGS)

lint: $(INSTALLED)  ## style, formatting and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

bench: $(INSTALLED)  ## speed and memory, side by side with peers
	for script in $(filter-out %/harness.py,$(wildcard benchmarks/*.py)); do $(VENV)/bin/python $$script $(ARGS) || exit 1; done

reproduce: $(INSTALLED)  ## a table of a paper: make reproduce PAPER=trime ROW=table10
	$(VENV)/bin/python reproductions/run.py $(PAPER) $(ROW) $(SIZE) $(ARGS)

clean:  ## remove the environment and everything that was built
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "make: Python 3.11 or later was not found; give its path: make PYTHON=..."; exit 1; }
	test -x $(VENV)/bin/pip || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $(INSTALLED)
