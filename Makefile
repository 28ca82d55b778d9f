# `make demo` and `make test` each do all of their set-up on a fresh clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: demo test lint style types suite install dev clean

demo: install
	$(BIN)/metaplastic demo --output runs/demo

# The type checker has one thread: beside the tests it costs no time of its own.
test: style
	+$(MAKE) --no-print-directory -j 2 types suite

lint: style types

style: dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: dev
	$(BIN)/pyright

suite: dev  # worksteal: tests of a file stay in one process, with what they share
	$(BIN)/python -m pytest -q -n 2 --dist worksteal --durations=10

install: $(VENV)/.installed
dev: $(VENV)/.installed-dev

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: install Python >= 3.11, or pass PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python >= 3.11 needed, $(PYTHON) is older; pass PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

# --no-compile: Python compiles what is imported when it is first imported, a small part of what comes along.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing metaplastic and its dependencies into $(VENV) (a few minutes on a first run)"
	$(BIN)/python -m pip install -q --no-compile -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing metaplastic, its dependencies and the tools into $(VENV) (a few minutes on a first run)"
	$(BIN)/python -m pip install -q --no-compile -c constraints.txt -e '.[dev]'
	@touch $(VENV)/.installed $@

clean:
	rm -rf $(VENV) runs dist .pytest_cache .ruff_cache
