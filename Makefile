# Everything from a clone to a green test-suite. `make help` lists it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
DEMO_SECONDS ?=
# How many tests run at once. Much of their time is spent waiting, for disks, processes and browsers.
WORKERS ?= 4
# Also where the environment asks for no bytecode: each process that a test starts would compile all modules again.
export PYTHONDONTWRITEBYTECODE :=
# Paths of what is marked `fast`, the longest first: each worker imports all modules of the paths that it is given.
FAST := tests/end_to_end/test_quick_start.py tests/unit
# A file's tests share servers and databases, so a worker runs all of a file; those of tests/frameworks share nothing.
PARALLEL = -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Another package index for torch alone: PyPI has only a CUDA build of it for Linux x86-64.
TORCH_INDEX ?=
TORCH := $(shell grep '^torch==' constraints.txt)

# Benchmarks have an environment of their own, with the libraries they compare with. A Python that is named here is
# used as it is, with those of them that it has.
BENCH := .venv-bench
BENCH_PYTHON ?= $(BENCH)/bin/python
BENCH_READY := $(if $(filter $(BENCH)/bin/python,$(BENCH_PYTHON)),$(BENCH)/.installed)
BENCH_PIP = $(BENCH)/bin/python -m pip install -qq -c constraints.txt -c benchmarks/constraints.txt
BENCH_INGEST := .venv-bench-ingest
FRAMEWORKS := .venv-frameworks
# Helm as a library, and the schemas of Kubernetes.
CHARTS := .venv-charts
# torchtitan has an environment of its own: it needs Triton, and its pins conflict with those of other frameworks.
TORCHTITAN := .venv-torchtitan
AUDIT := .venv-audit
PEERS := safetensors torch_checkpointing torchsnapshot nvidia-resiliency-ext lightning zipnn
DEVICE ?= cpu
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-full test-long lint format cuda-check bench-checkpoint bench-pacing bench-ingest bench-capacity bench-dashboard bench-mix bench-restore bench-codecs bench-protection bench-integrations bench-torchtitan bench-series bench-ranks soak docs bundle pictures wheel audit clean

help:  ## list what there is to make
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | awk -F '\t' '{printf "  make %-16s %s\n", $$1, $$2}'

setup: $(VENV)/.installed  ## build .venv with all dependencies; quick if it exists

demo: $(VENV)/.product  ## server, dashboard and a training run; DEMO_SECONDS=120 kills it, restores it and prints a summary
	@exec $(BIN)/python tools/demo.py $(if $(DEMO_SECONDS),--seconds $(DEMO_SECONDS))

test: lint  ## lint, types, unit tests on SQLite, and one job that is killed, resumed and restored: about 5 minutes
	$(BIN)/pytest -m fast $(PARALLEL) $(FAST)

test-full: setup browser tracer database proxy azure $(FRAMEWORKS)/.installed $(CHARTS)/.installed  ## the rest of the tests: PostgreSQL, browser, processes, ranks, faults
	$(BIN)/pytest -m "not fast and not long" $(PARALLEL)
	$(FRAMEWORKS)/bin/python -m pytest tests/frameworks -n $(WORKERS) --dist worksteal
	$(CHARTS)/bin/python -m pytest tests/charts

test-long: setup tracer database $(TORCHTITAN)/.installed  ## every crash point, hundreds of power cuts and kills, torchtitan
	$(BIN)/pytest -m long -s
	$(TORCHTITAN)/bin/python -m pytest tests/torchtitan

lint: setup  ## ruff, mypy, and the import directions of the packages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup  ## format and fix with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# A Python that is named with CUDA_PYTHON is used as it is, without a download; docs/cuda.md says what it needs. In the
# environment of the benchmarks, torch is a CUDA build unless TORCH_INDEX names another one.
CUDA_PYTHON ?= $(BENCH_PYTHON)
CUDA_MINUTES ?= 9
CUDA_RESULTS ?= cuda.jsonl
cuda-check: $(if $(filter $(BENCH)/bin/python,$(CUDA_PYTHON)),$(BENCH)/.installed)  ## on a machine with a GPU: exact resume, copies, stalls, other libraries, in CUDA_MINUTES; RESUME=cuda.jsonl goes on
	$(CUDA_PYTHON) -m benchmarks.cuda --minutes $(CUDA_MINUTES) $(if $(RESUME),--resume $(RESUME),--results $(CUDA_RESULTS)) $(ARGS)

bench-checkpoint: $(BENCH_READY)  ## Holdfast and other libraries, interleaved; DEVICE=cuda, ARGS='--quick'
	$(BENCH_PYTHON) -m benchmarks.checkpoint --device $(DEVICE) $(ARGS)

bench-pacing: setup  ## overhead and budget, reactions of the interval, quality of plans; ARGS='--minutes 20'
	$(BIN)/python -m benchmarks.pacing $(ARGS)

bench-ingest: setup $(BENCH_INGEST)/.installed  ## ingest and queries of the server, and of MLflow and Trackio
	$(BIN)/python -m benchmarks.ingest --peers $(BENCH_INGEST)/bin/python $(ARGS)

bench-capacity: setup  ## CPU, memory and disk of a server with 100, 1,000 and 10,000 agents; ARGS='--postgresql'
	$(BIN)/python -m benchmarks.ingest.capacity $(ARGS)

bench-dashboard: setup browser  ## a job's page in Chromium: bytes, paint, frames, memory, 200 readers; ARGS='--no-hour'
	$(BIN)/python -m benchmarks.dashboard $(ARGS)

bench-mix: setup  ## orders and pages on a server with open pages, long polls and exports; ARGS='--other CHECKOUT'
	$(BIN)/python -m benchmarks.dashboard.load_mix $(ARGS)

bench-restore: $(FRAMEWORKS)/.installed  ## time of restores: after a kill, in place, by order, from memory; ARGS='--rounds 3'
	$(FRAMEWORKS)/bin/python -m benchmarks.restore $(ARGS)

bench-codecs: setup $(BENCH_READY)  ## sizes and costs of encoded and of incremental checkpoints of real training states
	$(BENCH_PYTHON) -m benchmarks.codecs --incremental $(BIN)/python $(ARGS)

bench-protection: setup  ## what bit errors and lost blocks do to a resumed training; ARGS='--seeds 3 --plot FILE'
	$(BIN)/python -m benchmarks.bit_errors $(ARGS)

bench-integrations: $(FRAMEWORKS)/.installed  ## resume after kills by each framework itself and by Holdfast
	$(FRAMEWORKS)/bin/python -m benchmarks.integrations $(ARGS)

bench-torchtitan: $(TORCHTITAN)/.installed  ## the same for torchtitan, whose environment takes 1 GB
	$(TORCHTITAN)/bin/python -m benchmarks.integrations --only torchtitan $(ARGS)

bench-series: setup  ## gradients of a wave inversion from compressed states, and by recomputation; ARGS='--plot f.svg'
	$(BIN)/python -m benchmarks.series $(ARGS)

bench-ranks: setup  ## what rank 0 does for a checkpoint of 64 to 4,096 simulated ranks; ARGS='--ranks 64 256'
	$(BIN)/python -m benchmarks.ranks $(ARGS)

MINUTES ?= 90
soak: setup $(FRAMEWORKS)/.installed  ## eight jobs under random kills, full disks and orders for MINUTES=90; ARGS='--results FILE'
	$(BIN)/python -m benchmarks.soak --minutes $(MINUTES) --framework-python $(FRAMEWORKS)/bin/python $(ARGS)

docs: $(VENV)/.docs  ## build the guide: docs/_build/html, and what a server shows under /guide; fails at a broken link
	$(BIN)/python -m sphinx -b html -W --keep-going -q docs docs/_build/html
	$(BIN)/python -m tools.guide

bundle: setup  ## rebuild static/built from the scripts and styles of pages; needs Node.js and npm
	$(BIN)/python -m tools.bundle

pictures: setup browser  ## retake the pictures in README and docs
	$(BIN)/python -m tools.pictures

wheel: setup docs  ## build dist/holdfast-*.whl, with the guide, and dist/holdfast_series-*.whl
	$(BIN)/python -m build --wheel --no-isolation
	$(BIN)/python -m build --wheel --no-isolation --outdir dist series

audit: setup $(AUDIT)/.installed  ## licences and, with a network, known vulnerabilities of the pinned dependencies
	$(AUDIT)/bin/pip-licenses --python $(BIN)/python --from mixed --partial-match --ignore-packages text-unidecode \
	  --fail-on 'AGPL;GPL-2;GPL-3.0-or;GNU Affero;GNU General Public' --summary
	$(AUDIT)/bin/pip-audit --requirement constraints.txt --no-deps --disable-pip

clean:  ## remove build outputs, .venv and .demo
	rm -rf $(VENV) $(BENCH) $(BENCH_INGEST) $(FRAMEWORKS) $(TORCHTITAN) $(CHARTS) $(AUDIT) docs/_build web/holdfast_web/guide/built.json .bench-* .demo dist build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

.PHONY: browser tracer database proxy azure
browser: setup
	@tools/prerequisites chromium

tracer:
	@tools/prerequisites strace

database:
	@tools/prerequisites postgres

proxy:
	@tools/prerequisites nginx

azure: setup
	@tools/prerequisites azurite

$(VENV)/bin/python:
	tools/prerequisites python $(PYTHON)
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade 'pip>=25.1'

# torch first and by itself: its build is chosen here, and nothing after it may choose another.
$(VENV)/.torch: constraints.txt | $(VENV)/bin/python
	@echo 'Installing torch into $(VENV).'
	$(PIP) install --quiet $(TORCH) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	touch $@

# What a user installs, which is all that the demo needs.
$(VENV)/.product: pyproject.toml constraints.txt $(VENV)/.torch
	@echo 'Installing Holdfast with its server.'
	$(PIP) install --quiet -c constraints.txt hatchling editables
	$(PIP) install --quiet -c constraints.txt --no-build-isolation -e '.[torch,server]'
	touch $@

$(VENV)/.installed: $(VENV)/.product series/pyproject.toml
	@echo 'Installing the tools of the tests.'
	$(PIP) install --quiet -c constraints.txt --no-build-isolation -e './series[codecs]' --group dev
	touch $@

# torch first and by itself here, too. A library that cannot be had for a machine is left out of the comparison.
$(BENCH)/.installed: pyproject.toml constraints.txt benchmarks/constraints.txt
	tools/prerequisites python $(PYTHON)
	$(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/python -m pip install -qq --upgrade 'pip>=25.1'
	$(BENCH)/bin/python -m pip install -qq $(TORCH) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(BENCH_PIP) hatchling editables numpy
	$(BENCH_PIP) --no-build-isolation -e .
	$(BENCH_PIP) $(PEERS) || for peer in $(PEERS); do $(BENCH_PIP) $$peer || echo "no $$peer here"; done
	touch $@

$(VENV)/.docs: docs/requirements.txt $(VENV)/.installed
	$(PIP) install -qq -r docs/requirements.txt
	touch $@

# The frameworks of the adapters and what checks the chart, on top of what .venv has.
.venv-%/.installed: tests/%/requirements.txt tests/%/requirements-no-deps.txt $(VENV)/.installed
	$(PYTHON) -m venv $(@D)
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')')" \
	  > $$($(@D)/bin/python -c 'import site; print(site.getsitepackages()[0])')/_holdfast_venv.pth
	$(@D)/bin/python -m pip install --quiet -c constraints.txt -r tests/$*/requirements.txt
	$(@D)/bin/python -m pip install --quiet --no-deps -r tests/$*/requirements-no-deps.txt
	touch $@

$(BENCH_INGEST)/.installed: benchmarks/ingest/constraints.txt
	tools/prerequisites python $(PYTHON)
	$(PYTHON) -m venv $(BENCH_INGEST)
	$(BENCH_INGEST)/bin/python -m pip install -qq -c benchmarks/ingest/constraints.txt mlflow trackio
	touch $@

$(AUDIT)/.installed:
	$(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/python -m pip install -qq pip-audit==2.10.1 pip-licenses==5.5.5
	touch $@
