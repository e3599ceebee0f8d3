# make demo   set up, fetch the default model, answer a prompt with EAGLE-2 beside plain decoding
# make test   set up, then lint, types and every test
#
# Both need Python 3.11 or later and a C++20 compiler (without one only the transformers engine is there), and make
# their own environment in .venv.

PYTHON ?= python3

# One tested version, so that every machine runs the same arithmetic. With an accelerator, or from another index:
#   make test TORCH="torch==2.13.0 --index-url URL"
TORCH ?= torch==2.13.0

FUZZ_SECONDS ?= 60

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
NATIVE := $(wildcard CMakeLists.txt src/eyas/native/csrc/* src/eyas/native/csrc/kernels/*)

.PHONY: demo test lint types pytest format sanitize fuzz clean

demo: $(STAMP)
	$(BIN)/eyas pull
	$(BIN)/eyas generate "Explain how rain forms, in five short steps." --max-tokens 160 --compare --show-tree --stream

test: lint types pytest

lint: $(STAMP)
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks

types: $(STAMP)
	$(BIN)/mypy

pytest: $(STAMP)
	$(BIN)/python -m pytest

format: $(STAMP)
	$(BIN)/ruff check --fix src tests benchmarks
	$(BIN)/ruff format src tests benchmarks

$(STAMP): pyproject.toml $(NATIVE)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Eyas needs Python 3.11 or later, $(PYTHON) is older; try: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing PyTorch: a download of a few hundred MB"
	$(BIN)/python -m pip install --quiet $(TORCH)
	@echo "installing Eyas and what it needs, and compiling its engine: a few minutes on two cores"
	$(BIN)/python -m pip install --quiet --editable '.[torch,plots,dev]'
	touch $@

# The native engine's tests on builds with address, undefined-behaviour and thread sanitizers; minutes.
sanitize: $(STAMP)
	$(BIN)/python -m pip install --quiet cmake nanobind
	.ci/sanitize $(BIN)/python

# Damaged model files, read for FUZZ_SECONDS; guided by coverage where atheris can be installed.
fuzz: $(STAMP)
	$(BIN)/python -m pip install --quiet atheris || echo "without atheris: damage by chance"
	cd tests && ../$(BIN)/python fuzz_readers.py --seconds $(FUZZ_SECONDS)

clean:
	rm -rf $(VENV) build .mypy_cache .pytest_cache .ruff_cache .hypothesis
