# `make demo`, `make quick` and `make test` set up all they need, with the first of PYTHONS that runs and is recent enough;
# make PYTHON=... names another. One virtual environment can serve several clones: make VENV=... test
VENV ?= .venv
VENV_OLDEST ?= .venv-oldest
PYTHONS = python3 python3.14 python3.13 python3.12 python3.11 python
BIN = $(VENV)/bin
FASHION = /usr/share/datasets/fashion-mnist
APT = apt-get install --yes --quiet --no-install-recommends chromium texlive-latex-recommended dataset-fashion-mnist strace
export PYTHONPATH := $(CURDIR)/src
# Where it is set, each of the many processes of the tests would compile all sources and rewrite all assertions anew.
unexport PYTHONDONTWRITEBYTECODE

define make_venv
for python in $(or $(PYTHON),$(PYTHONS)); do \
  if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then exec $$python -m venv $(1); fi; \
done; \
echo "Python must be 3.11 or newer, got no such program among $(or $(PYTHON),$(PYTHONS))." \
  "Install one, or name it: make PYTHON=/path/to/python." >&2; \
exit 1
endef

.PHONY: setup programs demo quick test lint types contracts check oldest sbom wheel-check clean

setup: $(VENV)/.lopsided-stamp

$(VENV)/.lopsided-stamp: pyproject.toml constraints.txt
	@test -x $(BIN)/python || { $(call make_venv,$(VENV)); }
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

# Pages of reports are tested in Debian's chromium, tables in its LaTeX, and the embedded images against its copy of
# Fashion-MNIST. Where these cannot be installed, those tests say so and are skipped.
programs:
	@{ command -v chromium || command -v chromium-browser || command -v google-chrome; } && command -v pdflatex \
	  && command -v strace && test -e $(FASHION) || { \
	  test "$$(id -u)" = 0 && command -v apt-get && { $(APT) || { apt-get update --quiet && $(APT); }; }; \
	} || echo "No chromium, pdflatex or Fashion-MNIST, and they could not be installed: tests of them will be skipped."

# axe-core checks whether people who use a keyboard or a screen reader can use the pages. It is no part of the package.
AXE = build/axe/package/axe.min.js

$(AXE):
	@mkdir -p build/axe && cd build/axe && npm pack --silent axe-core@4.14.0 > /dev/null && tar xzf axe-core-4.14.0.tgz \
	  || echo "No axe-core from npm: the tests of accessibility will be skipped."

# Each worker has one thread of its own. Three keep two cores busy, for some tests wait for processes that they started;
# a fourth would only import everything once more. Where a test asks for two threads, one that waits sleeps: spinning, it
# would keep a core from the other workers. tests/conftest.py says in which order files are tested.
check: setup programs $(AXE)
	LOPSIDED_AXE=$(CURDIR)/$(AXE) OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

# For work in progress: no test that takes long, starts many processes or needs a program of the system. These wait for
# nothing, so that a third worker would only import everything once more.
quick: lint contracts
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

# mypy and the site need one core for a minute, which they share with the tests.
test: lint contracts
	$(MAKE) --jobs=3 types docs check

# The same tests with the oldest versions that pyproject.toml admits, in an environment of their own. Old versions have no
# wheels for a new Python, so that the oldest Python is tried first.
$(VENV_OLDEST)/.lopsided-stamp: PYTHONS = python3.11 python3.12 python3.13 python3.14 python3 python
$(VENV_OLDEST)/.lopsided-stamp: pyproject.toml constraints-oldest.txt
	@test -x $(VENV_OLDEST)/bin/python || { $(call make_venv,$(VENV_OLDEST)); }
	$(VENV_OLDEST)/bin/python -m pip install --quiet --upgrade pip
	$(VENV_OLDEST)/bin/python -m pip install --quiet --constraint constraints-oldest.txt --editable ".[dev,notebook,umap]"
	touch $@

oldest: $(VENV_OLDEST)/.lopsided-stamp programs
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(VENV_OLDEST)/bin/python -m pytest -n 3 --dist loadfile

# The components of this environment, as a CycloneDX list.
sbom: setup
	mkdir -p build
	$(BIN)/python scripts/sbom.py build/sbom.json

# Builds the wheel, installs it in a new environment, and runs the start page from there. make HOME_PAGE=https://... sets the
# links of the page of a package index.
wheel-check: setup
	$(BIN)/python scripts/wheel.py build/dist --check build/wheel-environment $(if $(HOME_PAGE),--home $(HOME_PAGE))

clean:
	rm -rf $(VENV) $(VENV_OLDEST) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist

# The site, in build/site. `docs` runs no example and is part of `make test`; `docs-full` runs the gallery, which takes
# several minutes, and needs $LOPSIDED_DATA for its page on skin lesions.
SPHINX = $(BIN)/python -m sphinx --builder html --fail-on-warning --keep-going --nitpicky --quiet

.PHONY: docs docs-full docs-pictures

docs: setup
	$(SPHINX) --doctree-dir build/doctrees docs build/site
	$(BIN)/python scripts/check_site.py build/site

docs-full: setup
	LOPSIDED_DOCS_FULL=1 $(SPHINX) --doctree-dir build/doctrees-full docs build/site-full
	$(BIN)/python scripts/check_site.py build/site-full

# Pictures and terminal output that the pages show. They need chromium.
docs-pictures: setup
	$(BIN)/python scripts/site_figures.py
	$(BIN)/python scripts/start_page.py

.PHONY: clean-docs

clean-docs:
	rm -rf docs/gallery docs/reference/generated docs/sg_execution_times.rst

clean: clean-docs
