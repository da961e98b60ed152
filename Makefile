# The two commands: `make demo` and `make test`. Both set themselves up; nothing but Python 3.11–3.13 and make is needed.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export JAX_PLATFORMS ?= cpu

.PHONY: help demo test test-slow test-meshes test-processes test-tpu test-tpu-all lint types format clean

help:
	@echo "make demo       train and compare positional schemes on real text (about 8 minutes on 2 cores)"
	@echo "make test       the test suite"
	@echo "make test-slow  the tests that the suite leaves out (about an hour on 2 cores)"
	@echo "make test-meshes  every scheme on every mesh against one device (about 15 minutes on 2 cores)"
	@echo "make test-processes  2 and 4 real processes train together, are killed, go on (about 3 minutes)"
	@echo "make VENV=build/venv-tpu test-tpu       compile the TPU kernels and the named models' steps ahead of time (test-tpu-all: more)"
	@echo "make lint types format"

$(VENV)/.run: requirements.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else f"bampath needs Python 3.11 to 3.13, but $(PYTHON) is {v[0]}.{v[1]}: make PYTHON=python3.11 …")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

$(VENV)/.dev: requirements-dev.txt requirements.txt $(VENV)/.run
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@

demo: $(VENV)/.run
	$(BIN)/python -m experiments.extrapolation.run

# A file stays with one worker: its tests share compiled programs and trained models, which two would make twice.
test: $(VENV)/.dev
	$(BIN)/python -m pytest -m "not slow and not gpu and not aot and not processes" -n 2 --dist loadfile

test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m "slow and not gpu and not aot and not processes" -n 2

test-meshes: $(VENV)/.dev
	$(BIN)/python -m pytest tests/scale -m "slow and not gpu and not aot and not processes" -n 2

# Each of these tests starts up to four processes, so it runs alone.
test-processes: $(VENV)/.dev
	$(BIN)/python -m pytest tests -m processes

# libtpu compiles for TPU topologies on an ordinary machine; it needs an environment of its own and one process.
test-tpu: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-tpu.txt
	$(BIN)/python -m pytest tests -m "aot and not slow"

test-tpu-all: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-tpu.txt
	$(BIN)/python -m pytest tests -m aot

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
