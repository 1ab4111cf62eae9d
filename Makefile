# Sets up and runs; every target works on a fresh clone.
#
#   make demo                 train the demo into runs/demo (WORKDIR=... to choose)
#   make test                 all tests but the slow ones
#   make test-slow            the slow ones
#   make check                lint, formatting, types, import directions
#   make benchmark            what H-SADMM costs per local step
#   PYTHON=python3.13         the interpreter the environment is made with

PYTHON ?= python3
VENV ?= .venv
WORKDIR ?= runs/demo
# Two test processes; files are not split, so that their runs are shared.
WORKERS ?= -n 2 --dist loadfile

BIN := $(VENV)/bin
BASE := $(VENV)/.installed
TEST := $(VENV)/.installed-test

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow check format benchmark clean

help:
	@sed -n 's/^# \{0,1\}//p' Makefile

demo: $(BASE)
	$(BIN)/python -m prunex_jax.train \
	    --config=configs/digits_resnet20_hsadmm.py --workdir='$(WORKDIR)'

test: $(TEST)
	$(BIN)/python -m pytest -q -m "not slow" $(WORKERS)

test-slow: $(TEST)
	$(BIN)/python -m pytest -q -m slow $(WORKERS)

check: $(TEST)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(TEST)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

benchmark: $(BASE)
	$(BIN)/python -m tests.benchmark_local_step

clean:
	rm -rf '$(VENV)' build *.egg-info

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "error: $(PYTHON) is not Python 3.11 or newer; make PYTHON=... names one"; \
	      exit 2; }
	$(PYTHON) -m venv '$(VENV)'

$(BASE): $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(TEST): $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	@touch $@
