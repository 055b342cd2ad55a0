# Each target sets up what it needs: a virtual environment with the pinned requirements.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The version is part of the name, so that another PYTHON gets an environment of its own.
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
READY := $(VENV)/.ready-$(VERSION)
PYTEST := $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder
# The same targets with the newest Python of this machine and the newest packages, without the pins.
WITH_NEWEST = $(MAKE) VENV=.venv-newest PYTHON="$$(.ci/newest_python)" PINNED=no
PINNED ?= yes
# What to train on: cpu, cuda12, cuda13 or tpu. By default it is what this machine has.
DEVICE ?= $(shell .ci/device)
# Compiled modules are kept: the processes of the tests read them.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: train test test-fast test-newest test-newest-fast lint format bench docs clean

train: device := $(DEVICE)
train: $(READY)  ## Trains the embedded default on what this machine has, and says what it learnt.
	@echo "training on $(device) (DEVICE=cpu, cuda12, cuda13 or tpu chooses another)"
	$(if $(filter-out cpu,$(device)),test -e $(READY)-$(device) || $(BIN)/pip install -q -c $(VENV)/requirements.txt -e '.[$(device)]')
	$(if $(filter-out cpu,$(device)),touch $(READY)-$(device))
	$(if $(filter cpu,$(device)),JAX_PLATFORMS=cpu )$(BIN)/python -m mogrifier_jax.main --config=experiments/pydoc.py --workdir=runs/pydoc

test: $(READY)  ## All tests.
	$(PYTEST)

test-fast: $(READY)  ## For the edit loop.
	$(PYTEST) -m "not slow"

test-newest:  ## All tests, with the newest Python and packages.
	$(WITH_NEWEST) test

test-newest-fast:
	$(WITH_NEWEST) test-fast

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)  ## Speed, as ratios measured in one run.
	$(BIN)/pip install -q torch==2.13.0
	$(BIN)/python -m benchmarks.recurrence

docs: $(READY)  ## The documentation as a site in build/site; a warning is an error.
	test -e $(READY)-docs || $(BIN)/pip install -q -r docs/requirements.txt -c $(VENV)/requirements.txt
	touch $(READY)-docs
	JAX_PLATFORMS=cpu $(BIN)/python -m sphinx -q -W --keep-going -c docs -d build/doctrees . build/site
	@echo "build/site/index.html is the first page"

$(READY): requirements.txt setup.cfg pyproject.toml
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python %d.%d is too old: mogrifier_jax needs 3.11 or newer; set PYTHON=" % sys.version_info[:2])'
	$(PYTHON) -m venv --clear $(VENV)
	sed '$(if $(filter no,$(PINNED)),s/==[^;]*//)' requirements.txt > $(VENV)/requirements.txt
	$(BIN)/pip install -q -r $(VENV)/requirements.txt
	$(BIN)/pip install -q --no-deps -e .
	touch $(READY)

clean:
	rm -rf $(VENV) .venv-newest build dist *.egg-info
