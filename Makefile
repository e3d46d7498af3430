# Needs Python >= 3.11, make and git, nothing else. `make demo` shows it; `make test` is the whole gate.
PYTHON  ?= python3
JOBS    ?= 2
VENV    := .venv
BIN     := $(VENV)/bin
STAMP   := $(VENV)/.installed
PIP     := $(BIN)/python -m pip --quiet --disable-pip-version-check
PINS    ?= supply/hashes.txt
TYPED   := src tests benchmarks examples docs supply
SOURCES := $(TYPED) tutorials

.PHONY: setup demo explore test slow lint format docs hashes licences bill clean
setup: $(STAMP)

# Everything is downloaded first, and installed only if its hash is known. `make PINS=constraints.txt` skips that check,
# for a build of torch from another index. What torch's CUDA build needs beside itself, torch pins, and the last line
# installs. setuptools is among the packages, so that nothing else is fetched to build this one.
$(STAMP): pyproject.toml constraints.txt $(PINS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "lazyscope needs Python 3.11 or later; say which with: make PYTHON=python3.12"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) download --no-deps --dest $(VENV)/wheels --requirement constraints.txt
	$(PIP) install --no-deps --no-index --find-links $(VENV)/wheels --requirement $(PINS)
	rm -rf $(VENV)/wheels
	PIP_CONSTRAINT=constraints.txt $(PIP) install --no-build-isolation -e ".[dev]"
	touch $@

demo: $(STAMP)
	$(BIN)/lazyscope reproduce --scale quick --workers $(JOBS)

explore: $(STAMP)
	$(BIN)/lazyscope explore

# The tests run the code of the documentation too. Many of them start processes, which compiled files make faster.
test: lint
	$(BIN)/python -m compileall -q src
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup

# The longer tests: more cases, the site with its tutorials, workers that are killed.
slow: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup -m slow

lint: $(STAMP)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy $(TYPED)

format: $(STAMP)
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

docs: $(STAMP)
	$(BIN)/mkdocs build --strict --quiet

# After a change of constraints.txt: the hashes of what it pins, from PyPI, and the licences of what is installed.
hashes:
	$(BIN)/python -m supply.hashes

licences: $(STAMP)
	$(BIN)/python -m supply.licences

# The bill of materials of a release, CycloneDX, into dist.
bill: $(STAMP)
	$(BIN)/python -m supply.bill

clean:
	rm -rf $(VENV) site .mypy_cache .pytest_cache .ruff_cache
