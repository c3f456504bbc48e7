# Every target sets up what it needs: a fresh machine needs only Python 3.11 or newer and make.

BIN := .venv/bin
ifndef PYTHON  # := looks once; ?= would look at every use
PYTHON := $(shell for python in python3.11 python3; do \
	$$python -c '' 2>/dev/null && echo $$python && break; done)
endif
BENCHMARKS = $(filter-out benchmarks/harness.py benchmarks/__init__.py,$(wildcard benchmarks/*.py))

# The site is built offline; Material for MkDocs would print an advertisement of its successor.
BUILD_SITE = NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# Demo and tests start Python often: it keeps compiled modules, whatever the shell asks for.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-all check bench figures docs wheel sbom lock clean train full
# Targets share .venv, and two installs into it at once would break it.
.NOTPARALLEL:

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: train ## Run the demo
	@$(BIN)/python examples/hello_select.py
	@$(BIN)/keyhole demo

test: full ## Run the fast tests, on two cores
	@$(BIN)/python -m pytest -n 2

test-all: full ## Run all tests, the slow ones too, on two cores
	@for program in nginx redis-server varnishd chromium chromedriver; do \
		PATH="$$PATH:/usr/sbin" command -v $$program >/dev/null || missing="$$missing $$program"; done; \
		test -z "$$missing" || echo "tests and benchmarks that need$$missing are skipped: \
	apt install nginx redis-server varnish chromium chromium-driver"
	@$(BIN)/python -m pytest -n 2 -m ""

check: full ## Lint, check the format, the types, for unsafe calls and the links of the docs
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/bandit --quiet --recursive --configfile pyproject.toml src tools
	@$(BUILD_SITE) --strict

bench: full ## Run the benchmarks and hold them to their goals
	@failed=; for benchmark in $(BENCHMARKS); do \
		echo "== $$benchmark"; \
		$(BIN)/python $$benchmark --check || failed="$$failed $$benchmark"; \
	done; \
	test -z "$$failed" || { echo "failed:$$failed" >&2; exit 1; }

figures: full ## Draw the figures of docs/results.md and docs/growth.md, and write their numbers, from kept JSON
	@$(BIN)/python docs/results.py
	@$(BIN)/python docs/growth.py

docs: full ## Write the generated pages of docs/ and build the site in build/site
	@$(BIN)/python docs/generate.py
	@$(BIN)/python docs/pictures.py
	@RUN_NOTEBOOKS=1 $(BUILD_SITE) --strict
	@echo "built build/site; to read it: python3 -m http.server -d build/site"

wheel: full ## Build the wheel in dist/, with the same bytes for the same tree
	@$(BIN)/python tools/build_wheel.py

sbom: full ## Write what keyhole is made of to dist/, as a CycloneDX file
	@$(BIN)/python tools/sbom.py

lock: full ## Write requirements.lock; UPGRADE=1 takes the newest versions
	@$(BIN)/python tools/lock.py write $(if $(UPGRADE),--upgrade)

clean: ## Remove .venv, caches and build output
	@rm -rf .venv build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache src/*.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# What the demo needs, and what everything else needs on top; either is quick once it is there.
train full:
	@test -n "$(PYTHON)" || { echo "keyhole needs Python 3.11 or newer: no python3 found" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "keyhole needs \
	Python 3.11 or newer, $(PYTHON) is older: install one or run make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) tools/environment.py $@
