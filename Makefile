# Every target sets up what it needs: a fresh machine needs only Python 3.11 or newer and make.

BIN   := .venv/bin
READY := .venv/.ready
PYTHON ?= $(shell for python in python3.11 python3; do \
	$$python -c '' 2>/dev/null && echo $$python && break; done)
BENCHMARKS = $(filter-out benchmarks/harness.py benchmarks/__init__.py,$(wildcard benchmarks/*.py))

# The ready file is written last and holds the path of its tree. An environment whose install was
# cut short, whose Python is gone, or that was copied from another tree does not match.
ifneq ($(shell $(BIN)/python -c '' 2>/dev/null && cat $(READY) 2>/dev/null),$(CURDIR))
SETUP = $(PYTHON) -m venv --clear .venv
.PHONY: $(READY)
else
SETUP = rm $(READY)
endif

.DEFAULT_GOAL := help
.PHONY: help demo test test-all check bench docs clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY) ## Run the demo
	@$(BIN)/python examples/hello_select.py
	@$(BIN)/keyhole demo

test: $(READY) ## Run the fast tests, on two cores
	@$(BIN)/python -m pytest -n 2 --dist loadfile

test-all: $(READY) ## Run all tests, the slow ones too
	@for program in nginx redis-server varnishd; do \
		PATH="$$PATH:/usr/sbin" command -v $$program >/dev/null || missing="$$missing $$program"; done; \
		test -z "$$missing" || echo "tests and benchmarks that need$$missing are skipped: \
	apt install nginx redis-server varnish"
	@$(BIN)/python -m pytest -m ""

check: $(READY) ## Lint, check the format, check the types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: $(READY) ## Run the benchmarks and hold them to their goals
	@failed=; for benchmark in $(BENCHMARKS); do \
		echo "== $$benchmark"; \
		$(BIN)/python $$benchmark --check || failed="$$failed $$benchmark"; \
	done; \
	test -z "$$failed" || { echo "failed:$$failed" >&2; exit 1; }

docs: $(READY) ## Write the generated pages of docs/
	@$(BIN)/python docs/generate.py

clean: ## Remove .venv, caches and build output
	@rm -rf .venv build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache src/*.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "keyhole needs Python 3.11 or newer: no python3 found" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "keyhole needs \
	Python 3.11 or newer, $(PYTHON) is older: install one or run make PYTHON=..." >&2; exit 1; }
	@echo "setting up .venv (a minute or two, only when dependencies change)"
	@$(SETUP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@echo "$(CURDIR)" > $@
