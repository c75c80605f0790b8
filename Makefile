# Everything a developer or a curious user types. `make` alone lists it.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
OLDEST_TORCH := $(HOME)/.cache/windlass/venv-torch-2.11
OLDEST_READY := $(OLDEST_TORCH)/.ready
PYTEST := $(BIN)/python -m pytest -q
# Modules stay together, for their fixtures, and in order, which puts long ones first: a long one that comes last runs alone.
BY_MODULE := --dist loadscope --no-loadscope-reorder
# Where real schedulers and processes are hurt on purpose, a failure is tried once more, and both are told;
# not in tests that start no training (tests/conftest.py).
AGAIN := --reruns 1
BESIDE ?=  # more targets for `make test` beside the cluster, each with a + after it
RUN ?= examples/demo.yaml
NAME ?= demo

.PHONY: help setup demo test test-fast test-campaigns test-slurm test-image test-cluster test-gpu test-architectures test-oldest-torch \
	lint docs bench bench-gpu bench-wheels bench-gpu-curves run stop logs-follow validate-setup validate-framework test-quick check-cluster debug-events

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */\1\t/' | awk -F'\t' '{printf "  make %-19s %s\n", $$1, $$2}'

setup: $(READY)  ## make .venv with everything in it

$(READY): pyproject.toml constraints.txt
	PYTHON=$(PYTHON) tools/setup $(VENV) -c constraints.txt -e '.[train,tensorboard,wandb,k8s,aws,image,ui,mcp,flash,dev]'
	@touch $@

demo: setup  ## train a small Llama on two processes, kill one, watch it recover
	$(BIN)/python examples/demo.py

# One more process than the two cores of CI: training tests wait for ranks, timeouts and deaths.
# The cluster's tests wait much of their time, so others go beside them, on what they leave of the cores; not beside
# Slurm's, whose time limits are real.
test: setup  ## all tests
	-$(BIN)/python tools/make_image_table.py --check  # says it where torch has a newer release; no failure of the tests
	$(PYTEST) -m "not slurm and not cluster and not image and not campaign_only" -n 3 $(BY_MODULE) $(AGAIN)
	$(MAKE) --no-print-directory test-slurm
	tools/run_tiers test-cluster idle:$(BESIDE)test-image

test-fast: setup  ## what starts no training, under two minutes
	$(PYTEST) -m "not train and not slow and not slurm and not cluster and not image" -n 2 $(BY_MODULE)

test-campaigns: setup  ## all cases of the long campaigns: faults, kills and spreads that make test tries a part of
	$(PYTEST) -m "campaign and not cluster and not slurm" -n 3 $(BY_MODULE) $(AGAIN)
	$(PYTEST) -m "campaign and slurm" tests/slurm $(AGAIN)
	$(PYTEST) -m "campaign and cluster" tests/cluster $(AGAIN)

test-slurm: setup  ## train on a real Slurm: four nodes on this machine (root, and the packages that .ci/run names)
	$(PYTEST) -m "slurm and not campaign_only" tests/slurm --durations=5 $(AGAIN)

test-image: setup  ## build, test and push real images (root, and the packages that .ci/run names)
	$(PYTEST) -m image tests/image --durations=10 -rP $(AGAIN)

test-cluster: setup  ## run on a real Kubernetes: three nodes on this machine (root), or the cluster that KUBECONFIG names
	$(PYTEST) -m "cluster and not campaign_only" tests/cluster --durations=10 $(AGAIN)

test-gpu: setup  ## the trainer on 1, 2 and 4 CUDA ranks, compared and hurt; ranks share a GPU where there are fewer
	$(BIN)/python -m tests.gpu

test-architectures: setup  ## every causal model that transformers registers, tiny, three steps each: works, refused and why
	$(BIN)/python -m tests.trainer.architectures

test-quick: setup  ## RUN=my.yaml: pods on the current cluster try its network and disks for it, and nothing is trained
	$(BIN)/windlass cluster check $(RUN) --deep --no-train

validate-framework: test-fast  ## the same as test-fast

test-oldest-torch: $(OLDEST_READY)  ## what depends on torch, on the oldest one that is supported
	$(OLDEST_TORCH)/bin/python -m pytest -q tests/trainer tests/targets -m "torch_floor and not campaign_only" -n 2 $(BY_MODULE)

$(OLDEST_READY): pyproject.toml constraints.txt
	@mkdir -p $(OLDEST_TORCH)
	grep -vE '^(torch|triton|transformers|tokenizers|huggingface_hub|nvidia-|cuda-|typer|hf-xet|setuptools)' constraints.txt > $(OLDEST_TORCH)/constraints.txt
	PYTHON=$(PYTHON) tools/setup $(OLDEST_TORCH) -c $(OLDEST_TORCH)/constraints.txt torch==2.11.0 transformers==5.17.0 -e '.[train,dev]'
	@touch $@

lint: setup  ## style, types, and which room may import which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict windlass
	$(BIN)/lint-imports

docs: setup  ## write the reference pages anew, from the code, and build the site; a dead link fails
	$(BIN)/python tools/make_docs.py
	$(BIN)/mkdocs build --quiet

bench: setup  ## measure: tokenizing, saving, training, resuming
	$(BIN)/python -m benchmarks

run: setup  ## windlass run RUN=my.yaml
	$(BIN)/windlass run $(RUN)

stop: setup  ## windlass stop NAME=my
	$(BIN)/windlass stop $(NAME)

logs-follow: setup  ## windlass logs NAME=my --follow
	$(BIN)/windlass logs $(NAME) --follow

check-cluster: setup  ## whether the current cluster can train
	$(BIN)/windlass cluster check

validate-setup: setup  ## whether this machine can train, and the current cluster where there is one
	$(BIN)/windlass doctor
	@[ ! -f "$${KUBECONFIG:-$$HOME/.kube/config}" ] || $(BIN)/windlass cluster check

debug-events: setup  ## NAME=my: what happened to it, and why it waits or failed
	$(BIN)/windlass show $(NAME) --history
	$(BIN)/windlass why $(NAME)

bench-gpu: setup  ## one GPU: windlass, torchtitan and plain transformers in one table (`make bench-wheels` fetches the peers)
	@[ -d bench-wheels/site/torchtitan ] || echo "the peers are not there: 'make bench-wheels' fills bench-wheels/site; they will be rows that say so"
	$(BIN)/python -m benchmarks.gpu

bench-wheels:  ## the peers that bench-gpu measures, into bench-wheels/site, beside what is installed
	$(PYTHON) -m pip install --quiet --no-deps --upgrade --target bench-wheels/site torchtitan==0.2.2 torchao==0.17.0

bench-gpu-curves: setup  ## loss curves of the trainer's fast paths and modes against a plain fp32 loop; tiny without a GPU
	$(BIN)/python -m benchmarks.gpu.curves
