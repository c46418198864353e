.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
LAUNCH := $(BIN)/accelerate launch --config_file accelerate_configs
ARGS ?=

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-7s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(READY)  ## train ResNet-50 on two processes with synthetic data: a minute and a half on two cores
	rm -rf runs/demo
	$(LAUNCH)/2gpu.yaml recipes/ddp_cifar.py --data synthetic --stem imagenet --cpu \
		--epochs 2 --batch-size 32 --output-dir runs/demo

train: $(READY)  ## train ResNet-50 on CIFAR-10 on all GPUs of this machine; ARGS="--epochs 100" passes flags on
	gpus=$$($(BIN)/python -c 'import torch; print(torch.cuda.device_count())'); \
	for n in 8 4 2 1; do if [ $$gpus -ge $$n ] || [ $$n = 1 ]; then break; fi; done; \
	$(LAUNCH)/$${n}gpu.yaml recipes/ddp_cifar.py $(ARGS)

bench: $(READY)  ## measure all recipes on this machine, under ten minutes; ARGS="--rounds 5" passes flags on
	$(BIN)/python recipes/bench.py $(ARGS)

results:  ## make tables and curve of what is in bench_results/ and put them into the README
	$(PYTHON) tests/results.py

test: $(READY)  ## run the tests; ARGS="-k configs" selects some
	$(BIN)/python -m pytest $(ARGS)

sync:  ## carry the shared blocks of ddp_cifar.py over into the other recipes
	$(PYTHON) tests/sync.py

lint: $(READY)  ## check style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:  ## remove the virtual environment and caches; runs/ and data/ stay
	rm -rf .venv .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Done once, and again when the pins change.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[test,lint]'
	touch $@

.PHONY: help demo train bench results test sync lint clean
