# `make train` and `make test` need nothing before them: each sets up .venv on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup train test test-gpu check format bench chaos figures settings clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

train: setup
	$(BIN)/lockstep train quickstart --ranks 2

test: setup
	$(BIN)/python -m pytest -n 3 -m 'not gpu'

# A machine with a GPU often has PyTorch already and no network: nothing is installed for this one, and tests run six at a
# time where pytest-xdist is there. pytest-benchmark would warn of that, which is an error here.
GPU_PYTHON = $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
test-gpu:
	$(GPU_PYTHON) -m pytest -m gpu $$($(GPU_PYTHON) -c 'import xdist' 2>/dev/null && echo '-p no:benchmark -n 6')

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy --implicit-reexport tests examples
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup
	$(BIN)/lockstep bench step --against bare
	$(BIN)/lockstep bench step

# Kills, stops, starves and cuts off real runs; nothing may be lost, hang or be left behind. This seed has most kinds.
chaos: setup
	$(BIN)/lockstep bench chaos --faults 25 --seed 372

# The pictures of README and docs, from stated results and from a run that is trained for it.
figures: setup
	$(BIN)/python docs/figures/draw.py

# The reference of every setting, from the configuration itself.
settings: setup
	$(BIN)/lockstep recipes settings --markdown > docs/settings.md

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
