SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
UV := $(VENV)/bin/uv
STAMP := $(VENV)/.installed

$(STAMP): pyproject.toml constraints.txt
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	test -x $(UV) || $(VENV)/bin/python -m pip install --quiet uv
	$(UV) pip install --python $(VENV)/bin/python --constraint constraints.txt --editable '.[dev]'
	touch $@
