# make train   the default pretraining run, NVFP4 by emulation (sets up .venv first)
# make train-2 the same model on two ranks of this machine (gloo), its weights cut over them
# make test    the tests, the linter, the type checker and the import layers (sets up .venv first)
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
# The order of the tests, made of the commit's hash: make pytest SEED=… repeats one.
SEED ?= $(shell printf %d 0x$$(git rev-parse HEAD 2>/dev/null | cut -c 1-7))
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: train train-2 test check pytest clean

train: $(VENV)/.ready
	$(BIN)/fp4train

train-2: $(VENV)/.ready
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 2 -m fp4train run.name=two-ranks device=cpu $(RUN)

# Beside each other: tests of several ranks leave a core idle for a while.
test: $(VENV)/.ready
	$(MAKE) --no-print-directory -j 2 check pytest

# One worker more than cores: tests wait a good part of their time, for runs of several ranks and killed processes.
# The bytecode that pytest makes of the tests is kept, also where the environment asks Python to keep none: to make it
# takes half of the time in which a worker collects the tests.
pytest: $(VENV)/.ready
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n 3 --dist worksteal --durations=10 --randomly-seed=$(SEED)

check: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# What pip names by its extras, without the project: its C extension is compiled while they are installed.
EXTRAS := dev triton integrations lm-eval
REQUIRED = import sys, tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
print(*p["dependencies"], *(r for e in sys.argv[1:] for r in p["optional-dependencies"][e]), sep="\n")

# The project is built beside the downloads; where that failed, it is built once more, and says why it fails.
# torch first: what comes after it then finds its requirement met and does not pull another build.
# transformer_engine without its dependencies: the recipe classes alone, which need no GPU.
# Bytecode is compiled last, on all cores, and of the tree as well, which an environment with PYTHONDONTWRITEBYTECODE
# would compile in each process again. What this Python cannot compile (torch has some for later ones) it never imports.
$(VENV)/.ready: pyproject.toml constraints.txt setup.py $(wildcard fp4train/kernels/cpu/csrc/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "fp4train needs Python 3.11 or newer; say which with PYTHON=…" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c '$(REQUIRED)' $(EXTRAS) > $(VENV)/requirements.txt
	$(BIN)/python -m pip install -q --no-deps -e . & \
	$(BIN)/python -m pip install -q --no-compile -c $(CONSTRAINTS) torch setuptools && \
	$(BIN)/python -m pip install -q --no-compile -c $(CONSTRAINTS) -r $(VENV)/requirements.txt && \
	{ wait $$! || $(BIN)/python -m pip install --no-deps -e .; }
	$(BIN)/python -m pip install -q --no-compile -c $(CONSTRAINTS) --no-deps transformer_engine
	$(BIN)/python -m compileall -qq -j 0 -x '/tests?/|/testing/_internal/' $(VENV)/lib fp4train scripts tests/helpers || true
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info fp4train/kernels/cpu/*.so
