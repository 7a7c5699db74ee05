# Switchboard's commands. `make run` is all that a user needs; `make help` lists the rest.
#
#   make run ARGS="--model …"   flags for app.py
#   make run PORT=7900          another port
#   make setup PYTHON=python3.12

SHELL := /bin/sh
.DEFAULT_GOAL := help
.PHONY: help setup setup-dev run run-ray test test-ray soak check format bench screenshots clean

PORT ?=
ARGS ?=
BENCH ?=
VENV := .venv
BIN := $(VENV)/bin
PIP_ARGS ?=
# What `make test` runs beside all other tests; both take about as long.
BESIDE := tests/api tests/engine

# The first Python that is new enough and can make virtual environments.
IS_USABLE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))
PYTHON ?= $(firstword $(foreach name,python3 python3.13 python3.12 python3.11 python3.10 python,$(shell \
	$(name) -c '$(IS_USABLE)' >/dev/null 2>&1 && echo $(name))))

# A stamp's name holds a checksum of the requirement files: nothing is installed again until one of them changes.
checksum = $(shell cat $(1) | cksum | cut -d ' ' -f 1)
RUN_FILES := requirements.txt constraints.txt
DEV_FILES := $(RUN_FILES) requirements-dev.txt
RUN_STAMP := $(VENV)/.setup-$(call checksum,$(RUN_FILES))
DEV_STAMP := $(VENV)/.setup-dev-$(call checksum,$(DEV_FILES))
RAY_STAMP := $(VENV)/.setup-ray-$(call checksum,$(RUN_FILES) deploy/requirements-ray.txt)

help:
	@echo "make run      install what is needed and start the app on http://127.0.0.1:7860  (ARGS=, PORT=)"
	@echo "make run-ray  the same with several replicas under Ray Serve, which it installs  (ARGS=, PORT=)"
	@echo "make setup    install only"
	@echo "make test     install what tests need and run all that this machine can run  (ARGS=)"
	@echo "make test-ray run the tests that need Ray, which it installs  (ARGS=)"
	@echo "make soak     half an hour of mixed work on a server  (ARGS=\"--minutes 5\")"
	@echo "make check    format, lint, types, layering"
	@echo "make format   format the code"
	@echo "make bench    run a quick set of benchmarks, or one of them  (BENCH=decode, ARGS=)"
	@echo "make screenshots  take the pictures of the documentation anew"
	@echo "make clean    remove $(VENV) and caches"

$(BIN)/python:
	@if [ -z "$(PYTHON)" ] || ! "$(PYTHON)" -c '$(IS_USABLE)' >/dev/null 2>&1; then \
		echo "Python 3.10 or newer with the venv module is needed, and $(or $(PYTHON),no command) is not that."; \
		echo "Install one (Debian, Ubuntu: apt-get install python3 python3-venv) or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3"; \
		exit 1; \
	fi
	"$(PYTHON)" -m venv --clear $(VENV)

$(RUN_STAMP): | $(BIN)/python
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip # a setup that was cut off lacks pip
	$(BIN)/python -m pip install $(PIP_ARGS) --requirement requirements.txt --constraint constraints.txt
	@rm -f $(VENV)/.setup-[0-9]* && touch $@

$(DEV_STAMP): | $(RUN_STAMP)
	$(BIN)/python -m pip install $(PIP_ARGS) --requirement requirements-dev.txt --constraint constraints.txt
	@rm -f $(VENV)/.setup-dev-* && touch $@

$(RAY_STAMP): | $(RUN_STAMP)
	$(BIN)/python -m pip install $(PIP_ARGS) --requirement deploy/requirements-ray.txt --constraint constraints.txt
	@rm -f $(VENV)/.setup-ray-* && touch $@

setup: | $(RUN_STAMP)

setup-dev: | $(DEV_STAMP)

run: | $(RUN_STAMP)
	@exec $(BIN)/python app.py $(if $(PORT),--port $(PORT)) $(ARGS)

run-ray: | $(RAY_STAMP)
	@exec $(BIN)/python -m deploy.ray_serve $(if $(PORT),--port $(PORT)) $(ARGS)

test: | $(DEV_STAMP)
	@sh tests/install_browser.sh
ifdef ARGS
	$(BIN)/python -m pytest $(ARGS)
else
	@# Two processes, for machines of two cores: one thread each, as tiny models are fastest. What the first prints comes last.
	@export OMP_NUM_THREADS=1; \
	$(BIN)/python -m pytest $(BESIDE) > $(VENV)/beside.log 2>&1 & beside=$$!; \
	$(BIN)/python -m pytest $(addprefix --ignore=,$(BESIDE)); others=$$?; \
	wait $$beside; status=$$?; cat $(VENV)/beside.log; test $$others = 0 && test $$status = 0
endif

# Ray's own warnings are no errors; its processes are slow to start where cores are few.
test-ray: | $(DEV_STAMP) $(RAY_STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -W ignore --timeout 600 $(or $(ARGS),tests/ray)

soak: | $(DEV_STAMP)
	$(BIN)/python -m tests.soak $(ARGS)

check: | $(DEV_STAMP)
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy
	$(BIN)/python -m pytest -q --noconftest tests/test_layering.py

format: | $(DEV_STAMP)
	$(BIN)/python -m ruff check --fix-only --quiet .
	$(BIN)/python -m ruff format .

ifeq ($(BENCH),)
bench: | $(DEV_STAMP)
	$(BIN)/python -m benchmarks.decode --shape tiny --quick --batch 1,8,32 --adapters 0,1,8,32
	$(BIN)/python -m benchmarks.scale --shape tiny --registered 0,1,10,100 --slots 8 --cpu-loras 16 --requests 16 --streams 8 --seconds 2
	$(BIN)/python -m benchmarks.cpu_vs_peft --repeat 2
else
bench: | $(DEV_STAMP)
	$(BIN)/python -m benchmarks.$(BENCH) $(ARGS)
endif

screenshots: | $(DEV_STAMP)
	@sh tests/install_browser.sh
	$(BIN)/python -m tests.ui.screenshots

clean:
	rm -rf $(VENV) .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
