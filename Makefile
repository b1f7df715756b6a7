# make demo    train a small transformer across two ranks, one of which overflows
# make test    every test; without a GPU the kernels run under Triton's interpreter
# make lint    ruff and mypy
# make fuzz    10,000 random programs against torch; PROGRAMS= and SEED= choose how many and from where
# make soak    20,000 steps: memory, tensors and plans stay flat, the scale is what the rule says
# make mutants   about 60 wrong versions of the code, each of which the tests must notice (10 minutes)
# make gpu     the whole suite natively, with the python3 and packages of a GPU machine; OUT names a folder
PYTHON ?= python3
OUT ?= out
PROGRAMS ?= 10000
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint style fuzz soak mutants gpu sanitize clean

demo: $(VENV)/ready
	$(BIN)/python -m scaler_triton demo --out demo.png

test: $(VENV)/ready
	$(BIN)/python -m pytest

fuzz: $(VENV)/ready
	SCALER_TRITON_FUZZ=$(PROGRAMS) $(if $(SEED),SCALER_TRITON_FUZZ_SEED=$(SEED)) OMP_NUM_THREADS=1 \
		$(BIN)/python -m pytest tests/fuzz -s --durations=5

soak: $(VENV)/ready
	SOAK=1 $(BIN)/python -m pytest tests/soak

mutants: $(VENV)/ready
	$(BIN)/python tests/mutants/run.py

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

style: $(VENV)/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch comes first and alone: a looser request would fetch the largest build there is.
$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch setuptools
	$(BIN)/pip install --quiet --constraint constraints.txt --no-build-isolation --editable .[dev]
	touch $@

# Nothing is installed here. What runs where is recorded first; 600 s is the limit of the whole.
gpu:
	mkdir -p $(OUT)
	python3 -m scaler_triton.demo.device 2>&1 | tee $(OUT)/ranks.txt
	python3 -c "import torch, triton; print(torch.__version__, triton.__version__, torch.cuda.get_device_name())" \
		| tee $(OUT)/versions.txt
	bash -o pipefail -c 'timeout 570 python3 -m pytest --durations=20 --junitxml=$(OUT)/junit.xml 2>&1 | tee $(OUT)/tests.log'

# The kernel tests under compute-sanitizer, 240 s for each of two tools.
sanitize:
	OUT=$(OUT) tests/kernels/sanitize.sh

clean:
	rm -rf $(VENV) build dist out *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
