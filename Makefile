# Two environments, because llm-compressor and vLLM pin different releases of compressed-tensors:
#   .venv-compress  llm-compressor, this package, and the tools for tests
#   .venv-serve     vLLM (its CPU build where there is no NVIDIA card) and this package
# Everything is pinned in requirements/, whose files lock.py writes. PYTHON names the interpreter to build them with
# (3.11 or newer).

PYTHON ?= python3
COMPRESS := .venv-compress
SERVE := .venv-serve
HAS_GPU := $(shell nvidia-smi -L 2>/dev/null | head -n 1)
SERVE_LOCK := requirements/$(if $(HAS_GPU),serve-cuda.txt,serve-cpu.txt)
ARTIFACTS := .artifacts
# of ten files that pip would compile, one is ever imported
PIP := -m pip --disable-pip-version-check install --quiet --progress-bar off --no-compile

export TOKENIZERS_PARALLELISM := false
# dozens of processes import the same packages
unexport PYTHONDONTWRITEBYTECODE

# Two processes, files that take longest first, fixtures of a module made once
PYTEST := -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder
TEST_COMPRESS := $(COMPRESS)/bin/python $(PYTEST) tests --ignore tests/serving
TEST_SERVE := MOE_COVERAGE_ARTIFACTS=$(ARTIFACTS) $(SERVE)/bin/python $(PYTEST) tests/serving

QUICK := not slow and not engine and not browser

.PHONY: demo test check environments lint style types-compress types-serve checkpoints test-compress test-serve clean

## The main job, end to end: compress the mini-MoE by one recipe, then generate from the result with vLLM.
demo: $(COMPRESS)/.ready $(SERVE)/.ready
	$(COMPRESS)/bin/python examples/demo.py --output out/demo
	$(SERVE)/bin/python examples/generate.py out/demo/p_q4 --log out/demo/generate.log

## Everything that must hold: style, types, layers, both halves.
test:
	@# two targets at a time, each printing in one piece; where one fails, all of it does
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target environments
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target lint checkpoints
	@# one half after the other: more processes than cores slow each other down
	$(TEST_COMPRESS)
	$(TEST_SERVE)

## The inner loop: style, types, layers, and the tests that take neither an engine, a browser nor long.
check: environments
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target lint
	$(COMPRESS)/bin/python $(PYTEST) tests --ignore tests/serving -m "$(QUICK)"
	$(SERVE)/bin/python $(PYTEST) tests/serving -m "$(QUICK)"

environments: $(COMPRESS)/.ready $(SERVE)/.ready
	@:

lint: style types-compress types-serve

style: $(COMPRESS)/.ready
	$(COMPRESS)/bin/ruff check .
	$(COMPRESS)/bin/ruff format --check .
	$(COMPRESS)/bin/lint-imports

types-compress: $(COMPRESS)/.ready
	$(COMPRESS)/bin/pyright --pythonpath $(COMPRESS)/bin/python

types-serve: $(COMPRESS)/.ready $(SERVE)/.ready
	$(COMPRESS)/bin/pyright --pythonpath $(SERVE)/bin/python moe_coverage_plugin/serving benchmarks/kernels benchmarks/serving benchmarks/soak

# The models are tiny: more threads than processes only wait for each other
test check test-compress test-serve checkpoints: export OMP_NUM_THREADS := 1

test-compress: $(COMPRESS)/.ready
	$(TEST_COMPRESS)

# Serving is tested on checkpoints that the compressing half really wrote.
checkpoints: $(COMPRESS)/.ready
	PYTHONPATH=. TORCHDYNAMO_DISABLE=1 $(COMPRESS)/bin/python tests/serving/make_checkpoints.py $(ARTIFACTS)

test-serve: $(SERVE)/.ready checkpoints
	$(TEST_SERVE)

# A change of pyproject.toml repeats the last step, a change of a lock file all of them
$(COMPRESS)/.ready $(SERVE)/.ready: %/.ready: %/.packages pyproject.toml
	$*/bin/python $(PIP) --no-deps --no-build-isolation -e .
	@touch $@

$(COMPRESS)/.packages: requirements/compress.txt
	$(call make_venv,$(COMPRESS),$<)

$(SERVE)/.packages: $(SERVE_LOCK)
	$(call make_venv,$(SERVE),$<)

define make_venv
@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed, $(PYTHON) is " + sys.version.split()[0] + ": run make PYTHON=...")'
@echo "Setting up $(1) (pinned; downloads a few hundred MB the first time)"
@rm -rf $(1) && $(PYTHON) -m venv $(1)
@# torch first and with its dependencies: a CUDA build needs libraries that compress.txt and serve-cpu.txt do not pin
$(1)/bin/python $(PIP) --constraint $(2) torch
$(1)/bin/python $(PIP) --no-deps --no-build-isolation --requirement $(2)
@touch $(1)/.packages
endef

clean:
	rm -rf $(COMPRESS) $(SERVE) $(ARTIFACTS) out
