# Everything here works from a clean clone: each target installs what it needs, once.
#
#   make setup        virtual environment, whence with its tools, both embedded models
#   make demo         what whence finds in a text, with a real trained model and no hub
#   make test         the test suite                make lint         ruff, formatting, mypy --strict
#   make bench        the benchmarks                make studies      the studies of docs/
#   make docs         the documentation as a site    make figures      its pictures, made again
#   make gallery      the gallery's pages, every number made again (needs espeak-ng: apt-get install espeak-ng)
#   make conformance  every model family that transformers knows, read and proved
#   make torture      odd calls to the core, kills, failures in threads, a crowd at the server: long
#   make mutate       change core one operator at a time: do the tests notice? MUTATE="core/attention/bounds.py --most 20"
#   make test-lowest  core, reading and mixing on the lowest versions that pyproject.toml allows
#   make test-newest  the test suite on the newest versions, but for torch
#   make lock         requirements.lock made again (LOCK=--upgrade: with the newest versions)
#   make audit        its packages, looked up for known holes
#   make dist         the wheel, the source and the software bill of materials, in dist/
#   make clean        remove the virtual environment and the caches
#
# Another interpreter: make test PYTHON=python3.12 VENV=.venv-3.12

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.installed

# Versions are those of the lock, so that every machine tests what CI tests; torch is pinned besides (constraints.txt).
CONSTRAINTS ?= requirements.lock
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -c $(CONSTRAINTS)
ASKED := $(if $(filter-out file default undefined,$(origin PYTHON)),asked)

DEMO_TEXT ?= The old doctor told the nurse that she would not leave the ward before the storm was over, because the \
roads to the village had been closed since noon and nobody knew when they would open again, so the two of them made \
tea, sat down by the window, and waited for the snow to stop falling on the silent hills.

.DEFAULT_GOAL := help
.PHONY: help venv setup demo docs figures gallery test lint bench studies conformance torture mutate test-lowest test-newest lock audit \
	dist wheel clean

help:
	@sed -n 's/^#   //p' Makefile

# --- installing, once per change of pyproject.toml or constraints.txt ------------------------------------------------

venv:
	@scripts/venv "$(PYTHON)" "$(VENV)" $(ASKED)

$(STAMPS)/base: pyproject.toml constraints.txt $(CONSTRAINTS) | venv
	$(INSTALL) -e .
	@mkdir -p $(@D) && touch $@

$(STAMPS)/dev: pyproject.toml constraints.txt $(CONSTRAINTS) | venv
	$(INSTALL) -e '.[dev]'
	@mkdir -p $(@D) && touch $@ $(STAMPS)/base

$(STAMPS)/docs: pyproject.toml constraints.txt $(CONSTRAINTS) | venv
	$(INSTALL) -e '.[docs]'
	@mkdir -p $(@D) && touch $@ $(STAMPS)/base

$(STAMPS)/studies: pyproject.toml constraints.txt $(CONSTRAINTS) | venv
	$(INSTALL) -e '.[dev,train,explain]'
	@mkdir -p $(@D) && touch $@ $(STAMPS)/dev $(STAMPS)/base

# --- targets ---------------------------------------------------------------------------------------------------------

setup: $(STAMPS)/dev
	@$(BIN)/whence get minilm smollm2

demo: $(STAMPS)/base
	@$(BIN)/whence get minilm >/dev/null
	@$(BIN)/whence look '$(DEMO_TEXT)'

# Without the models their tests are skipped, and pytest says so.
test: $(STAMPS)/dev
	@scripts/system-packages browser || echo "Going on without a browser: the tests of the page will be skipped." >&2
	@$(BIN)/whence get minilm smollm2 >/dev/null || echo "Going on without the embedded models." >&2
	$(BIN)/python -m pytest -n auto

docs: $(STAMPS)/docs
	$(BIN)/python -m mkdocs build --strict --site-dir site

# Every picture of the documentation, made again.
figures: $(STAMPS)/docs $(STAMPS)/dev
	@$(BIN)/whence get minilm >/dev/null
	@set -e; for file in docs/make_*.py; do echo "== $$file"; $(BIN)/python "$$file"; done

gallery: $(STAMPS)/dev
	@$(BIN)/whence get minilm smollm2 whisper rxnmapper antiberty >/dev/null
	OMP_NUM_THREADS=1 $(BIN)/python -m gallery

lint: $(STAMPS)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMPS)/dev
	@$(BIN)/whence get minilm rxnmapper whisper >/dev/null
	@set -e; for file in benchmarks/[a-z]*.py; do echo "== $$file"; $(BIN)/python "$$file"; done

studies: $(STAMPS)/studies
	@$(BIN)/whence get minilm smollm2 >/dev/null
	@set -e; for file in studies/[a-z]*.py; do echo "== $$file"; $(BIN)/python "$$file"; done

conformance: $(STAMPS)/dev
	$(BIN)/python -m conformance
	$(BIN)/python -m conformance.random_part

torture: $(STAMPS)/dev
	$(BIN)/python scripts/fuzz_core.py --calls 20000
	$(BIN)/python -m torture.kills
	$(BIN)/python -m torture.soak
	$(BIN)/python -m torture.load
	$(BIN)/python -m pytest -m long

# Three mutants of every file of core by default; a whole file takes minutes, all of core hours (MUTATE=). Survivors that
# docs/mutants.md does not explain make it fail.
MUTATE ?= --most 3
mutate: $(STAMPS)/dev
	OMP_NUM_THREADS=1 $(BIN)/python scripts/mutate.py $(MUTATE)

# The lowest versions, in an environment of their own.
LOWEST := .venv-lowest
LOW_TESTS ?= tests/core tests/reading tests/mixing
test-lowest:
	@scripts/venv "$(PYTHON)" $(LOWEST) $(ASKED)
	@$(PYTHON) scripts/lowest > $(LOWEST)/lowest.txt
	$(LOWEST)/bin/python -m pip install --disable-pip-version-check -q -c constraints.txt -c $(LOWEST)/lowest.txt \
		-e '.[web,plot,explain,train]' pytest pytest-xdist hypothesis networkx psutil httpx
	$(LOWEST)/bin/python -m pytest -n auto -m "not slow and not long" $(LOW_TESTS)

test-newest:
	$(MAKE) test VENV=.venv-newest CONSTRAINTS=constraints.txt

lock: | venv
	$(BIN)/python -m pip install --disable-pip-version-check -q uv
	scripts/lock $(BIN)/uv $(LOCK)

audit: | venv
	$(BIN)/python -m pip install --disable-pip-version-check -q pip-audit
	$(BIN)/python -m pip_audit --strict --no-deps --disable-pip -r requirements.lock

dist wheel: $(STAMPS)/dev
	$(BIN)/python -m pip install --disable-pip-version-check -q build
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python scripts/sbom > dist/whence.cdx.json

clean:
	rm -rf $(VENV) .venv-lowest .venv-newest dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
