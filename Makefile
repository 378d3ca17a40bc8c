# Two commands matter: `make demo` and `make test`. Each sets everything up by itself.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
export OMP_NUM_THREADS := 1
export MKL_NUM_THREADS := 1

AXE := 4.14.0

.PHONY: demo test test-slow test-rounding check docs bench clean browser data screens

PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.venv/demo-ready: pyproject.toml constraints.txt  ## what the demo needs, and no tools of tests and documentation
	@echo "installing (a few minutes) …"
	$(PYTHON) -m venv .venv
	$(PIP) torch numpy
	$(PIP) -e '.[demo,pandas]'
	$(BIN)/python -m compileall -q src
	touch $@

.venv/ready: .venv/demo-ready
	@echo "installing the tools of tests and documentation …"
	$(PIP) -e '.[dev]'
	touch $@

demo: .venv/demo-ready  ## train, record, embed, query, retrain; writes demo/report.html
	$(BIN)/backstory demo --out demo

browser: .venv/ready  ## Chromium and axe-core for the tests of the page, where they can be had
	@command -v chromium > /dev/null || { apt-get update -qq && apt-get install -y -qq chromium; } > /dev/null 2>&1 \
		|| echo "chromium is not here and could not be installed: the page is not tested in a browser"
	@test -f .venv/axe/package/axe.min.js || { mkdir -p .venv/axe && cd .venv/axe \
		&& npm pack --silent --ignore-scripts axe-core@$(AXE) > /dev/null 2>&1 && tar xzf axe-core-$(AXE).tgz; } \
		|| echo "axe-core could not be fetched with npm: the page's accessibility is not tested"

data: .venv/ready  ## the demos' data, for the tests of the page on the demos' own runs
	@$(BIN)/python -c "from backstory.demo.data import corpus, mnist_5k; mnist_5k(); corpus()" 2> /dev/null \
		|| echo "the demos' data could not be fetched: the page is not tested on the demos' runs"

test: .venv/ready browser  ## everything but the marks `slow` and `gpu`
	$(BIN)/python -m pytest -q -n 2 -m "not slow and not gpu"

test-slow: .venv/ready browser data  ## everything that an issue names
	$(BIN)/python -m pytest -q -n 2 -m "not gpu"

test-rounding: .venv/ready  ## the same without tests/web, most products and sums with a random last bit
	ROUNDING=noisy $(BIN)/python -m pytest -q -n 2 -m "not slow and not gpu" --ignore=tests/web

screens: .venv/ready browser data  ## screenshots of the demos' runs in build/screenshots
	SCREENSHOT_RUNS=demo:demo-text $(BIN)/python -m pytest -q -m slow tests/web/browser/test_browser.py -k screens

check: .venv/ready  ## linters and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/ready  ## the site in build/docs; warnings are errors
	$(BIN)/sphinx-build -W --keep-going -n -q docs build/docs
	@echo "open build/docs/index.html"

bench: .venv/ready  ## writes experiments/results/benchmarks.md; the rivals' environments are made in .peers
	$(BIN)/python -m experiments bench all --venvs .peers --write experiments/results/benchmarks.md

clean:
	rm -rf .venv .peers build demo demo-text runs .pytest_cache .mypy_cache .ruff_cache
