# One command each. Every target makes its own virtual environment in .venv first.
#
#   make demo     a healthy Vision Transformer, then the same one without residual connections
#   make check    format, lint and the fast tests
#   make test     everything that must pass: format, lint, types, all tests, doctests, examples, docs
#
# PYTHON    the Python (3.11 or newer) to build .venv with
# TORCH     the torch to install, for example TORCH=torch
# PIP_ARGS  more arguments for pip, for example an --extra-index-url for a CPU-only torch (see README.md)

PYTHON ?= python3
TORCH ?= -r requirements-dev.txt
PIP_ARGS ?=
WORKERS ?= 2

BIN := .venv/bin
# Tests run in parallel processes: one thread each, or they fight over the cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS)

.DEFAULT_GOAL := help
.PHONY: help demo check test lint types docs clean

help:
	@sed -n '/^#   make/s/^#   //p' Makefile

.venv/.created:
	$(PYTHON) -m venv .venv
	@touch $@

.venv/.demo: pyproject.toml requirements-dev.txt | .venv/.created
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) $(TORCH) -e ".[demo]"
	@touch $@

.venv/.dev: pyproject.toml requirements-dev.txt | .venv/.created
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) $(TORCH) -e ".[demo,dev,zoo,docs]"
	@touch $@ .venv/.demo

demo: .venv/.demo
	$(BIN)/python -m collapse_monitor.cli demo

lint: .venv/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: .venv/.dev
	$(BIN)/mypy

docs: .venv/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

check: lint
	$(PYTEST) -m "not slow and not zoo"

test: lint types docs
	$(PYTEST)

clean:
	rm -rf .venv build dist site logs .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
