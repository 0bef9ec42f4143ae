# `make demo` and `make test` are all that a fresh clone needs: each creates .venv, installs what requirements.lock pins,
# and runs. Another interpreter: make demo PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Newer than the lock and the project file: what is installed is what they ask for.
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test test-trackers survive rehearse test-nvme check fix bench docs

help:
	@echo "make demo    the whole road on this machine's CPU, in about two minutes after installing"
	@echo "make test    the whole test suite"
	@echo "make test-nvme  NVMe offload, after compiling what it needs"
	@echo "make test-trackers  the clients of four trackers, in a virtual environment of their own"
	@echo "make survive N=200   kills and bit flips, as many as you like"
	@echo "make rehearse  several hosts on this machine, at a real run's pace; needs root"
	@echo "make check   lint, formatting, types and the one-way imports: seconds"
	@echo "make fix     format, and mend what the linter can"
	@echo "make bench   the measurements in benchmarks/"
	@echo "make docs    write docs/recipe.md, the tables of docs/planner.md and what recipes cost anew"

$(INSTALLED): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"arriero needs Python 3.11 or newer, $(PYTHON) is {v[0]}.{v[1]}: make PYTHON=python3.11 …")'
	@# A venv without pip is one whose creation failed half-way, for example where Debian's python3-venv is missing.
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "installing requirements.lock into $(VENV): a minute or two where nothing is cached"
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet -r requirements.lock
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps -e .
	@touch $@

demo: $(INSTALLED)
	@$(BIN)/arriero demo

# A file's tests stay together and in order: they share launches. One thread for each process, since two threads beside
# another busy process take up to nine times as long; with both, the suite takes 6 minutes here instead of 11.
test: $(INSTALLED)
	@OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2 --dist loadfile --durations=5

# Needs a C++ compiler and libaio-dev. Its operation takes minutes to compile, so the suite leaves it out until it is there.
test-nvme: $(INSTALLED)
	@DS_ACCELERATOR=cpu $(BIN)/python -c \
		'from arriero.engine.ops import AsyncIOBuilder, build_op; build_op(AsyncIOBuilder(), "make test-nvme")'
	@OMP_NUM_THREADS=1 $(BIN)/pytest -q tests/parity/test_nvme.py

# Their dependencies would move versions of the lock (trackio: pillow; all of them: 250 MB), so they lie on top of it.
test-trackers: $(INSTALLED)
	@$(BIN)/python -m venv --clear $(VENV)/trackers
	@$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' \
		> "$$($(VENV)/trackers/bin/python -c 'import site; print(site.getsitepackages()[0])')/below.pth"
	@$(VENV)/trackers/bin/python -m pip install --disable-pip-version-check --quiet \
		'wandb>=0.31' 'swanlab>=0.10' 'mlflow-skinny>=3.17' 'trackio>=0.43'
	@PYTHONPATH=src $(VENV)/trackers/bin/python -m pytest -q tests/unit/test_trackers.py

# Prints how many kills, bit flips and pairs of layouts were tried and how many came back right: make survive N=200 takes
# ten minutes.
N ?= 200
survive: $(INSTALLED)
	@SURVIVE=$(N) $(BIN)/pytest -q -s tests/survival/test_kills.py tests/survival/test_pairs.py

# Network namespaces with ssh servers: needs root, and Debian's iproute2, pdsh, openssh-server and openssh-client.
rehearse: $(INSTALLED)
	@REHEARSE=1 OMP_NUM_THREADS=1 $(BIN)/pytest -v tests/multinode

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -q tests/test_layers.py

fix: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)
	@found=; for file in benchmarks/*.py; do \
		test -e "$$file" || continue; \
		found=yes; echo "== $$file"; $(BIN)/python "$$file" || exit 1; \
	done; test -n "$$found" || echo "benchmarks/ holds no measurement yet"

docs: $(INSTALLED)
	$(BIN)/python docs/make_recipe_page.py
	$(BIN)/python docs/make_planner_page.py
	$(BIN)/python docs/make_recipe_headers.py
