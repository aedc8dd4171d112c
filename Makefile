# Every target creates .venv with what it needs; nothing else is required but Python >= 3.11.
#   make demo    the whole loop on real models, about five minutes after install
#   make test    every test (make check is part of it in .ci/run)
PYTHON ?= python3
VENV   ?= .venv
# Any build >= 2.6 works; this is the version the figures were measured with. Override to choose another build.
TORCH  ?= torch==2.13.0

BIN := $(VENV)/bin
export PYTHONUNBUFFERED = 1

.PHONY: demo test check bench smollm2 format clean

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Lenity needs Python >= 3.11; run: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[worker,postgres,otel,dev]"
	touch $@

demo: $(VENV)/.installed
	$(BIN)/lenity demo $(ARGS)

test: $(VENV)/.installed
	$(BIN)/python -m pytest $(ARGS)

check: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.installed
	$(BIN)/python -m bench $(ARGS)

smollm2: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet gguf
	$(BIN)/python -m bench.smollm2

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) run build dist
