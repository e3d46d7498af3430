# Needs Python >= 3.11, make and git, nothing else. `make demo` shows it; `make test` is the whole gate.
PYTHON  ?= python3
JOBS    ?= 2
VENV    := .venv
BIN     := $(VENV)/bin
STAMP   := $(VENV)/.installed
TYPED   := src tests benchmarks examples docs
SOURCES := $(TYPED) tutorials

.PHONY: setup demo explore test lint format docs clean
setup: $(STAMP)

# torch first and alone: its pin decides which build the rest is resolved against.
# PIP_CONSTRAINT, unlike -c, also holds for the packages that build this one.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "lazyscope needs Python 3.11 or later; say which with: make PYTHON=python3.12"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check torch
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $@

demo: $(STAMP)
	$(BIN)/lazyscope reproduce --scale quick

explore: $(STAMP)
	$(BIN)/lazyscope explore

# The tests build the documentation too, and run its code.
test: lint
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup

lint: $(STAMP)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy $(TYPED)

format: $(STAMP)
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

docs: $(STAMP)
	$(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) site .mypy_cache .pytest_cache .ruff_cache
