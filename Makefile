.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin
RUN := .venv/run
READY := .venv/ready
OLDEST := .venv-oldest
LAUNCH := $(BIN)/accelerate launch --config_file accelerate_configs
ARGS ?=
MATPLOTLIB = $(BIN)/python -c "import matplotlib" 2>/dev/null || $(BIN)/pip install --constraint constraints.txt --editable '.[results]'
# The tests of a file share runs. Many of them wait: four files at a time keep two cores busy. By
# default the file with the fewest tests comes last, which is the one that waits longest.
WORKERS := --numprocesses 4 --dist loadfile --no-loadscope-reorder

# Words that make itself would ignore: copy=x.py, or a file's name without COPY=.
KNOWN := COPY ARGS RECIPE WITH SPLIT RUNS WORKERS PYTHON BIN RUN READY OLDEST
GIVEN := $(foreach name,$(.VARIABLES),$(if $(filter command,$(origin $(name))),$(name)))
$(foreach name,$(filter-out $(KNOWN),$(GIVEN)),$(error $(name)= is not a variable: $(KNOWN)))
$(foreach file,$(filter %.py,$(MAKECMDGOALS)),$(error $(file) is not a target: write COPY=$(file)))

# Measured per core: 10 images/s of ResNet-50 with the CIFAR stem in fp32, 450 of ResNet-20 in bf16,
# on a core that computes in bf16. An epoch has 50,000 images.
define NO_GPU
import os
cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
minutes = 50000 / (10 * cores) / 60
print(f"""No GPU on this machine. With the default flags (ResNet-50, CIFAR stem, 30 epochs) training takes
about {minutes:.0f} minutes per epoch on {cores} CPU core(s) in fp32, {minutes / 2:.0f} hours in all. Faster:
  make new COPY=../mine.py RECIPE=amp WITH=resnet20    ResNet-20, about {minutes / 45 * 50:.0f} minutes in all, on a CPU that has bf16
  make demo                                            synthetic data, a few minutes
  make train ARGS="--stem imagenet --epochs 1"         the ImageNet stem, a tenth of the time per epoch
  make train ARGS="--model simple_cnn --epochs 2"      two convolutions
Starting in 10 seconds; Ctrl-C stops.""")
endef
export NO_GPU

help:  ## list the targets
	@echo "to use:"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "to maintain:"
	@awk -F ':.*##m ' '/^[a-z-]+:.*##m / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(RUN)  ## train ResNet-50 with synthetic data on all GPUs, or on two CPU processes, a few minutes
	rm -rf runs/demo
	@gpus=$$($(BIN)/python -c 'import torch; print(torch.cuda.device_count())'); \
	how=1gpu.yaml; if [ $$gpus != 1 ]; then how=2gpu.yaml; fi; \
	if [ $$gpus -gt 2 ]; then how="$$how --num_processes $$gpus"; fi; \
	set -x; $(LAUNCH)/$$how recipes/ddp_cifar.py --data synthetic --stem imagenet \
		--epochs 2 --batch-size 32 --output-dir runs/demo

train: $(RUN)  ## train ResNet-50 on CIFAR-10 by amp on all GPUs of this machine; ARGS="--epochs 100" adds flags
	@gpus=$$($(BIN)/python -c 'import torch; print(torch.cuda.device_count())'); \
	how=1gpu.yaml; if [ $$gpus -gt 1 ]; then how="2gpu.yaml --num_processes $$gpus"; fi; \
	if [ $$gpus = 0 ]; then $(BIN)/python -c "$$NO_GPU"; sleep 10; fi; \
	set -x; $(LAUNCH)/$$how recipes/amp_cifar.py $(ARGS)

bench: $(RUN)  ## measure all recipes on this machine, about ten minutes; ARGS="--rounds 5" adds flags
	$(BIN)/python benchmarks/bench.py $(ARGS)

new: $(READY)  ## write your copy of a recipe: COPY=../mine.py RECIPE=ddp WITH="photos ema"; SPLIT=1: in two files; alone: lists examples
	@$(BIN)/python tools/new.py new $${COPY:+"$$COPY"} --recipe $(or $(RECIPE),ddp) $(if $(SPLIT),--split) --with $(WITH)

add: $(READY)  ## put examples into a copy: COPY=../mine.py WITH=lora
	@$(BIN)/python tools/new.py add $${COPY:+"$$COPY"} --with $(WITH)

check: $(RUN)  ## check that a copy trains the same in every way: COPY=../mine/train.py ARGS="--text a.txt"
	@if [ -z "$$COPY" ]; then set -- --data synthetic --model simple_cnn; fi; \
	$(BIN)/python tools/check.py "$${COPY:-recipes/ddp_cifar.py}" "$$@" $(ARGS)

plot: $(READY)  ## draw trainings into runs/plot.svg: RUNS="runs/a runs/b"; ARGS="--output mine.png": into another file
	$(MATPLOTLIB)
	$(BIN)/python tools/plot.py $(RUNS) $(ARGS)

results: $(READY)  ##m put the results into the pages; ARGS="--publish runs/bench/cpu-x2.json" copies them first
	$(MATPLOTLIB)
	$(BIN)/python benchmarks/make_results.py $(ARGS)

test: $(READY)  ##m run the tests but those marked redundant or cluster; ARGS="-k configs" selects some
	$(BIN)/python -m pytest $(WORKERS) -m "not redundant and not cluster" $(ARGS)

test-all: $(READY)  ##m run all tests, with redundant ones: cases that another recipe's case covers nearly whole
	$(BIN)/python -m pytest $(WORKERS) $(ARGS)

test-oldest: export ATEN_CPU_CAPABILITY := avx2
test-oldest: export ONEDNN_MAX_CPU_ISA := AVX2
test-oldest: export MKL_ENABLE_INSTRUCTIONS := AVX2
test-oldest: $(OLDEST)/ready  ##m run the tests with pyproject.toml's lower bounds, as on a CPU with AVX2 alone
	$(OLDEST)/bin/python -m pytest $(WORKERS) $(ARGS)

quick: $(READY)  ##m run the tests that are not marked slow or redundant
	$(BIN)/python -m pytest $(WORKERS) -m "not slow and not redundant" $(ARGS)

mutants: $(READY)  ##m change one thing of the recipes and tools at a time: which is missed by all tests? ARGS="--only Run --sample 20"
	$(BIN)/python tests/mutants.py $(ARGS)

sync:  ## copy the shared block of ddp_cifar.py into the other recipes; COPY=../mine/train.py: into your copy
	$(PYTHON) tools/sync.py $${COPY:+"$$COPY"}

lint: $(READY)  ##m check style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:  ## remove the virtual environments and caches; runs/ and data/ stay
	rm -rf .venv $(OLDEST) .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Done once, and again when the pins change. Training needs no test's packages.
$(RUN): PINS := constraints.txt
$(OLDEST)/run: PINS := constraints-oldest.txt
$(RUN) $(OLDEST)/run: pyproject.toml constraints.txt constraints-oldest.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --constraint $(PINS) --editable .
	touch $@

$(READY) $(OLDEST)/ready: %/ready: %/run
	$(@D)/bin/pip install --quiet --constraint $(if $(findstring oldest,$@),constraints-oldest.txt,constraints.txt) --editable '.[test,lint]'
	touch $@

.PHONY: help demo train bench new add check plot results test test-all test-oldest quick mutants sync lint clean
