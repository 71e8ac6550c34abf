# `make demo`, `make test` and `make docs` each work as the first command: they create .venv and install what they need.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint types tests format docs figures package

demo: .venv/installed
	$(BIN)/gas demo

test: lint types tests

# Several processes of one thread each: these graphs are too small to gain from threads.
tests: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n logical

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed
	$(BIN)/mypy

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The site, in site/: open site/index.html. Broken links and anchors are errors (but not with --quiet).
docs: .venv/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The wheel and the source distribution, in dist/, each installed into a fresh environment where a small demo runs.
package: .venv/installed
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist
	for file in dist/*.whl dist/*.tar.gz; do $(BIN)/python tests/project/try_package.py $$file || exit 1; done

# Draws the site's figures again; they are kept in git.
figures: .venv/installed
	MPLBACKEND=agg $(BIN)/python docs/figures.py

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[dev]'
	touch $@
