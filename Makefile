# Sets up and runs; every target works on a fresh clone.
#
#   make demo                 train the demo into runs/demo (WORKDIR=... to choose)
#   make test                 the quick tests; TESTS='tests/comm ...' takes some of them
#   make test-slow            the slow ones, of cases that take turns one in four, which
#                             SAMPLE=... draws; SINCE=COMMIT: those above what changed
#   make test-all             all tests there are, in hours; they become what CI starts from
#   make test-zoo             networks of other packages, which it installs
#   make test-torch           the PyTorch peers of studies, which it installs
#   make test-weights         weights of other packages, which it installs
#   make test-pytorch         modules of PyTorch, ONNX; it installs torch and jax2onnx
#   make test-torchvision     networks of torchvision and timm, beside Torch-Pruning
#   make test-drills          60 random faults over runs of every method (half an hour)
#   make test-gpu-programs    programs compiled for GPUs, by a compiler that it installs;
#                             GPU_TESTS='-k ...' takes some of them
#   make launchers            Slurm and Open MPI for the slow tests, by apt-get as root
#   make check                lint, formatting, types, import directions
#   make docs                 the documentation as a site in build/site;
#                             NOTEBOOKS=quickstart runs one of them
#   make wheel                the files of a release in dist/
#   make benchmark            what H-SADMM costs per local step
#   make benchmark-shrunk-step   what half of the channels saves per training step
#   make benchmark-start      from the command to the first step: where the time goes
#   make benchmark-compression   what each method computes per exchange
#   make benchmark-freed-memory  what keeping freed memory saves per CPU step
#   make benchmark-memory    bytes per H100 that large networks take, compiled for them
#   make benchmark-gpu       steps, compaction and memory on a GPU of this machine
#   make benchmark-many-hosts    a run on 64 simulated hosts (HOSTS=...), in 23 GB
#   make benchmark-heartbeat  what watching over processes costs a step
#   make benchmark-loops      what loops around convolutions cost on CPU
#   make bench-digits         every method on digits with three seeds: accuracy, bytes
#   make bench-bytes          every method over 2 real hosts: interfaces against traces
#   make benchmark-trace      finding groups against Torch-Pruning (TORCH_PYTHON=...)
#   make benchmark-torch-step  a step of ResNet-18 against PyTorch's (TORCH_PYTHON=...)
#   PYTHON=python3.13         the interpreter the environment is made with

PYTHON ?= python3
VENV ?= .venv
WORKDIR ?= runs/demo
DIGITS_WORKDIR ?= runs/digits
BYTES_WORKDIR ?= runs/bytes
DRILLS_WORKDIR ?= runs/drills
MEMORY_WORKDIR ?= runs/memory
MANY_WORKDIR ?= runs/many_hosts
HOSTS ?= 64
# An environment of its own, because torch and jax want other packages.
TORCH_VENV ?= .venvs/torch
TORCH_PYTHON ?= $(TORCH_VENV)/bin/python
# torch, torchvision, timm and transformers beside jax.
WEIGHTS_VENV ?= .venvs/weights
# torch of the version that torchax knows, torchvision, timm and Torch-Pruning.
PYTORCH_VENV ?= .venvs/pytorch
# Its packages want older ones than the tests use.
ZOO_VENV ?= .venvs/zoo
# Two test processes; files are not split, so that their runs are shared.
WORKERS ?= -n 2 --dist loadfile --no-loadscope-reorder
# Sets of tests with targets of their own.
OTHERS := zoo or weights or pytorch or gpu_programs
TESTS ?=
# What cases are drawn by, and the commit that what changed is found by; all if empty.
SLOW = --sample='$(SAMPLE)' --since='$(SINCE)'

BIN := $(VENV)/bin
BASE := $(VENV)/.installed
TEST := $(VENV)/.installed-test
ZOO := $(ZOO_VENV)/.installed
TORCH := $(VENV)/.installed-torch
WEIGHTS := $(WEIGHTS_VENV)/.installed
PYTORCH := $(PYTORCH_VENV)/.installed
GPU := $(VENV)/gpu
DOCS := $(VENV)/.installed-docs

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-all test-zoo test-torch test-weights test-pytorch \
    test-torchvision test-drills \
    test-gpu-programs launchers check docs wheel format \
    benchmark benchmark-shrunk-step \
    benchmark-start benchmark-trace benchmark-compression benchmark-freed-memory \
    benchmark-gpu benchmark-memory benchmark-many-hosts benchmark-heartbeat \
    benchmark-loops benchmark-torch-step bench-digits bench-bytes clean

help:
	@sed -n 's/^# \{0,1\}//p' Makefile

demo: $(BASE)
	$(BIN)/python -m prunex_jax.train \
	    --config=configs/digits_resnet20_hsadmm.py --workdir='$(WORKDIR)'

test: $(TEST)
	$(BIN)/python -m pytest -q -m "not (slow or $(OTHERS))" $(WORKERS) $(TESTS)

test-slow: SAMPLE ?= $(shell git rev-parse --short=8 HEAD 2>/dev/null || echo none)
test-slow: $(TEST)
	$(BIN)/python -m pytest -q -m "slow and not ($(OTHERS))" --durations=20 \
	    --durations-min=10 $(SLOW) $(WORKERS) $(TESTS)

# Of a commit as it is; writes the file that CI reads, to be committed.
test-all:
	@test -z "$$(git status --porcelain)" || { echo 'error: commit first'; exit 2; }
	git rev-parse HEAD > .tested
	$(MAKE) check test docs wheel
	$(MAKE) test-slow test-gpu-programs SAMPLE= SINCE=
	$(MAKE) test-zoo test-torch test-weights test-pytorch
	mv .tested .ci/tested

test-zoo: $(ZOO)
	$(ZOO_VENV)/bin/python -m pytest -q -m zoo -n 2 tests/channels/test_zoo.py \
	    tests/pruner/test_haiku.py

test-torch: $(TORCH)
	$(BIN)/python -m pytest -q tests/benchmarks/test_torch.py

test-weights: $(WEIGHTS)
	$(WEIGHTS_VENV)/bin/python -m pytest -q -m weights tests/models/test_published.py

test-pytorch: $(PYTORCH)
	$(PYTORCH_VENV)/bin/python -m pytest -q -m pytorch \
	    tests/models/test_pytorch.py tests/train/test_pytorch.py \
	    tests/pruner tests/export tests/test_docs.py

# Of all of them, or of NETWORKS='resnet18 ...'; writes docs/coverage_pytorch.md.
test-torchvision: $(PYTORCH)
	$(PYTORCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
	    timm==1.0.31 torch-pruning==1.6.1
	$(PYTORCH_VENV)/bin/python -m benchmarks coverage_pytorch $(NETWORKS)

test-drills: $(BASE)
	$(BIN)/python -m prunex_jax drill --random=60 --workdir='$(DRILLS_WORKDIR)'

# The compiler lies in a folder of its own, so that all else stays without GPUs.
test-gpu-programs: $(GPU)/.installed
	PYTHONPATH=$(GPU) $(BIN)/python -m pytest -q -m gpu_programs $(SLOW) $(GPU_TESTS) \
	    tests/train

# Tests of launchers are skipped where this has no root, no apt-get or no packages.
APT := DEBIAN_FRONTEND=noninteractive apt-get -qq -o Acquire::Retries=0 \
    -o Acquire::http::Timeout=20
launchers:
	@if { command -v slurmctld && command -v slurmd && command -v munged && \
	    command -v mpirun; } >/dev/null; then \
	    echo 'launchers: Slurm and Open MPI are here'; \
	elif [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
	    echo 'launchers: not root, or no apt-get: install slurm-wlm, munge and' \
	        'openmpi-bin by hand'; \
	    exit 1; \
	else \
	    $(APT) update && \
	    $(APT) install -y --no-install-recommends slurm-wlm munge openmpi-bin \
	        iproute2 util-linux >/dev/null; \
	fi

check: $(TEST)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Offline: the notebooks run in a quick form, and warnings are errors.
NOTEBOOKS ?=
docs: $(DOCS)
	$(BIN)/python docs/draw/pictures.py --check
	$(BIN)/python docs/notebooks.py $(NOTEBOOKS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo 'the site is in build/site/index.html'

wheel: $(BASE)
	rm -rf dist
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps \
	    --wheel-dir dist .

format: $(TEST)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

benchmark: $(TEST)
	$(BIN)/python -m benchmarks local_step

benchmark-shrunk-step: $(TEST)
	$(BIN)/python -m benchmarks shrunk_step

benchmark-start: $(TEST)
	$(BIN)/python -m benchmarks start

benchmark-compression: $(TEST)
	$(BIN)/python -m benchmarks compression

benchmark-freed-memory: $(TEST)
	$(BIN)/python -m benchmarks freed_memory

# On a GPU of this machine, for which the environment needs `jax[cuda13]`.
benchmark-gpu: $(TEST)
	$(BIN)/python -m benchmarks gpu --workdir=runs/gpu

benchmark-memory: $(GPU)/.installed
	PYTHONPATH=$(GPU) $(BIN)/python -m benchmarks memory_table \
	    --workdir='$(MEMORY_WORKDIR)'

benchmark-many-hosts: $(TEST)
	$(BIN)/python -m benchmarks many_hosts \
	    --hosts=$(HOSTS) --workdir='$(MANY_WORKDIR)'

benchmark-heartbeat: $(TEST)
	$(BIN)/python -m benchmarks heartbeat

benchmark-loops: $(TEST)
	$(BIN)/python -m benchmarks loops

bench-digits: $(TEST)
	$(BIN)/python -m prunex_jax sweep --sweep=configs/sweeps/digits.py \
	    --workdir='$(DIGITS_WORKDIR)'

bench-bytes: $(TEST)
	$(BIN)/python -m benchmarks links \
	    --study=benchmarks/studies/digits.py --workdir='$(BYTES_WORKDIR)'

benchmark-trace: $(TEST) $(TORCH_PYTHON)
	$(BIN)/python -m benchmarks trace --torch-python='$(TORCH_PYTHON)'

benchmark-torch-step: $(TEST) $(TORCH_PYTHON)
	$(BIN)/python -m benchmarks torch_step --torch-python='$(TORCH_PYTHON)'

$(TORCH_VENV)/bin/python:
	$(PYTHON) -m venv '$(TORCH_VENV)'
	$@ -m pip install --quiet --disable-pip-version-check 'torch>=2.13' \
	    torch-pruning==1.6.1

$(DOCS): $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	@touch $@

$(TORCH): $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test,torch]'
	@touch $@

$(WEIGHTS): pyproject.toml
	test -x '$(WEIGHTS_VENV)/bin/python' || $(PYTHON) -m venv '$(WEIGHTS_VENV)'
	$(WEIGHTS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
	    -e '.[test,weights]'
	@touch $@

$(PYTORCH): pyproject.toml
	test -x '$(PYTORCH_VENV)/bin/python' || $(PYTHON) -m venv '$(PYTORCH_VENV)'
	$(PYTORCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
	    -e '.[export,onnx,test,pytorch]'
	$(PYTORCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
	    --no-deps jax2onnx==0.17.1
	@touch $@

clean:
	rm -rf '$(VENV)' '$(TORCH_VENV)' '$(WEIGHTS_VENV)' '$(PYTORCH_VENV)' '$(ZOO_VENV)' build dist *.egg-info

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

$(GPU)/.installed: $(TEST)
	version=$$($(BIN)/python -c 'import jax; print(jax.__version__)') && \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
	    --upgrade --target $(GPU) \
	    jax-cuda13-plugin==$$version jax-cuda13-pjrt==$$version
	@touch $@

$(ZOO): pyproject.toml
	test -x '$(ZOO_VENV)/bin/python' || $(PYTHON) -m venv '$(ZOO_VENV)'
	$(ZOO_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
	    -e '.[test,zoo]'
	@touch $@
