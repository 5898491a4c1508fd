# `make demo` and `make test` set up all they need. One virtual environment can serve several clones: make VENV=... test
VENV ?= .venv
VENV_OLDEST ?= .venv-oldest
PYTHON ?= python3.11
BIN = $(VENV)/bin
APT = apt-get install --yes --quiet --no-install-recommends chromium texlive-latex-recommended
export PYTHONPATH := $(CURDIR)/src

.PHONY: setup programs demo test lint types contracts check oldest clean

setup: $(VENV)/.lopsided-stamp

$(VENV)/.lopsided-stamp: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

demo: setup
	$(BIN)/python -m lopsided demo

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

contracts: setup
	$(BIN)/lint-imports

# Pages of reports are tested in Debian's chromium, tables in its LaTeX. Where these cannot be installed, those tests say so
# and are skipped.
programs:
	@{ command -v chromium || command -v chromium-browser || command -v google-chrome; } && command -v pdflatex || { \
	  test "$$(id -u)" = 0 && command -v apt-get && { $(APT) || { apt-get update --quiet && $(APT); }; }; \
	} || echo "No chromium or no pdflatex, and they could not be installed: tests that need them will be skipped."

# Each worker has one thread of its own. Three keep two cores busy, for many tests wait for processes that they started.
check: setup programs
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile

test: lint types contracts check

# The same tests with the oldest versions that pyproject.toml admits, in an environment of their own.
$(VENV_OLDEST)/.lopsided-stamp: pyproject.toml constraints-oldest.txt
	test -x $(VENV_OLDEST)/bin/python || $(PYTHON) -m venv $(VENV_OLDEST)
	$(VENV_OLDEST)/bin/python -m pip install --quiet --upgrade pip
	$(VENV_OLDEST)/bin/python -m pip install --quiet --constraint constraints-oldest.txt --editable ".[dev,umap]"
	touch $@

oldest: $(VENV_OLDEST)/.lopsided-stamp programs
	OMP_NUM_THREADS=1 $(VENV_OLDEST)/bin/python -m pytest -n 3 --dist loadfile

clean:
	rm -rf $(VENV) $(VENV_OLDEST) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
