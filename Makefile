# `make help` explains every target.
PY := .venv/bin/python
# Byte code written once saves a minute at every later start of vLLM.
unexport PYTHONDONTWRITEBYTECODE
.DEFAULT_GOAL := help

.PHONY: help
help: ## Show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  \033[1m%-14s\033[0m %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: install ## One engine, one router and two coding agents on this machine (KEEP=1 leaves it running)
	$(PY) -m coda_cli demo

.PHONY: test
test: install-dev ## Every check and test that this machine can run; says at the end what ran
	$(PY) scripts/test.py

.PHONY: test-long
test-long: install-dev ## The same suites with more points, seeds, kills and time
	CODA_TEST_LONG=1 $(PY) scripts/test.py

.PHONY: unit
unit: install-dev ## Tests that need neither vLLM nor a cluster (at most 60 s)
	$(PY) scripts/test.py unit

.PHONY: check
check: install-dev ## Linters, types, layers, generated files
	$(PY) scripts/test.py check

.PHONY: e2e
e2e: install-dev ## End-to-end cases in the lab, or in your cluster with KUBECONFIG=...
	$(PY) scripts/test.py cluster

.PHONY: format
format: install-dev ## Put every Python file into the house's format
	.venv/bin/ruff check --fix --quiet .
	.venv/bin/ruff format --quiet .

.PHONY: crds
crds: install-dev ## Write crds/ and the chart's copy from the declaration in operator/coda_operator
	$(PY) -m coda_operator.crd

.PHONY: guides
guides: install-dev ## Write the tables of docs/guides from the declarations that they describe
	$(PY) -m coda_engine.vllm_adapter.telemetry.guide

.PHONY: lab-up
lab-up: ## Start a real Kubernetes node as plain processes (root; builds its binaries when absent)
	e2e/lab/lab up

.PHONY: lab-down
lab-down: ## Stop the lab and remove all that it left
	e2e/lab/lab down

.PHONY: install
install: ## Install what the demo needs into .venv
	@scripts/install

.PHONY: install-dev
install-dev: ## Install what development needs into .venv
	@scripts/install --dev

.PHONY: clean
clean: ## Remove caches and build output (.venv stays)
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
