# Each target sets up what it needs: a virtual environment with the pinned requirements.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Compiled modules are kept: the processes of the tests read them.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: train test test-fast lint format bench clean

train: $(READY)  ## Trains the embedded default and says what it learnt.
	$(BIN)/python -m mogrifier_jax.main --config=experiments/pydoc.py --workdir=runs/pydoc

test: $(READY)  ## All tests.
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

test-fast: $(READY)  ## For the edit loop.
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "not slow"

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

$(READY): requirements.txt setup.cfg pyproject.toml
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python %d.%d is too old: mogrifier_jax needs 3.11 or newer; set PYTHON=" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -r requirements.txt
	$(BIN)/pip install -q --no-deps -e .
	touch $(READY)

clean:
	rm -rf $(VENV) build dist *.egg-info
