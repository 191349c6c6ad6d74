# make demo: compare ten methods on real data.  make test: the whole suite.
# make notebooks: run the notebooks again, from their sources.
# make smoke: a part of the suite on newer versions of JAX, where there is a Python for them.
# make targets: every method compiled for TPU slices and a cluster of GPUs, without any.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint smoke targets notebooks clean

demo: $(READY)
	$(BIN)/python -m experiments.compare --out runs/demo-$$(date +%Y%m%d-%H%M%S)

test: $(READY)
	$(BIN)/python -m pytest -n 2

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

smoke:
	.ci/smoke

targets:
	PYTHON=$(PYTHON) .ci/targets

notebooks: $(READY)
	$(BIN)/python notebooks/build.py

# Installed once, from pinned versions; again when they change.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "lowcomm needs Python 3.11 or newer: make PYTHON=python3.12 ..."; exit 1; }
	@echo "installing pinned versions into $(VENV) ..."
	@if command -v uv >/dev/null 2>&1; then \
		uv venv --quiet --allow-existing --python $(PYTHON) $(VENV) && \
		uv pip install --quiet --python $(BIN)/python -e '.[experiments,dev]' -c constraints.txt; \
	else \
		$(PYTHON) -m venv $(VENV) && \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[experiments,dev]' -c constraints.txt; \
	fi
	@touch $(READY)

clean:
	rm -rf $(VENV) $(VENV)-jax* $(VENV)-targets
