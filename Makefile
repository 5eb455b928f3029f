# Everything from a clone to a green test-suite. `make help` lists it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
DEMO_SECONDS ?=
# Another package index for torch alone, where the usual one has only a CUDA build that is not wanted.
TORCH_INDEX ?=
TORCH := $(shell grep '^torch==' constraints.txt)

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format bench wheel clean

help:  ## list what there is to make
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | awk -F '\t' '{printf "  make %-8s %s\n", $$1, $$2}'

setup: $(VENV)/.installed  ## build .venv with all that the house needs; quick when it is there already

demo: setup  ## server, dashboard and a training run; DEMO_SECONDS=120 breaks it, restores it and sums up
	@exec $(BIN)/python tools/demo.py $(if $(DEMO_SECONDS),--seconds $(DEMO_SECONDS))

test: lint browser  ## lint, then every test
	$(BIN)/pytest

lint: setup  ## ruff, mypy on all packages, and the walls between them
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup  ## what checkpoints cost on this machine, beside torch.save
	$(BIN)/python benchmarks/overhead.py

wheel: setup  ## build dist/holdfast-*.whl
	$(BIN)/python -m build --wheel --no-isolation

clean:  ## remove what was built, .venv and .demo included
	rm -rf $(VENV) .demo dist build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

.PHONY: browser
browser: setup
	@tools/prerequisites chromium

$(VENV)/bin/python:
	tools/prerequisites python $(PYTHON)
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade 'pip>=25.1'

# torch first and by itself: its build is chosen here, and nothing after it may choose another.
$(VENV)/.torch: constraints.txt | $(VENV)/bin/python
	$(PIP) install $(TORCH) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	touch $@

$(VENV)/.installed: pyproject.toml constraints.txt $(VENV)/.torch
	$(PIP) install -c constraints.txt hatchling editables
	$(PIP) install -c constraints.txt --no-build-isolation --group dev -e '.[torch,server]'
	touch $@
