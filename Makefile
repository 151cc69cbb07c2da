# make demo   the quickstart on the shipped tiny model, in an environment of its own
# make test   all tests, in the same environment
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export HF_HUB_OFFLINE ?= 1
export HF_HUB_DISABLE_TELEMETRY ?= 1
# Waiting threads that spin make two slower than one where something else takes a core.
export OMP_WAIT_POLICY ?= passive

.PHONY: demo test lint format test-gpu clean

demo:
	@start=$$(date +%s) && $(MAKE) --no-print-directory $(VENV)/.installed && ready=$$(date +%s) && \
	$(BIN)/sparsepack run recipes/quickstart.yaml && \
	echo "seconds: installation $$((ready - start)), run $$(($$(date +%s) - ready))"

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# On a machine with a CUDA device, with the packages that it has: only files with GPU tests are imported.
test-gpu:
	$(PYTHON) -m pytest -m gpu $$(grep -rlw gpu tests --include="test_*.py") $(PYTEST_ARGS)

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,lint]'
	touch $@

clean:
	rm -rf $(VENV) work .pytest_cache .mypy_cache .ruff_cache .hypothesis
