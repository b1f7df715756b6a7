# make demo    train a small transformer across two ranks, one of which overflows
# make test    every test, in two processes (JOBS= says how many; 14 minutes on two cores); without a GPU the kernels run
#   under Triton's interpreter
# make test-frameworks   all tests with Accelerate, Transformers and Lightning, also those that take long; and those with
#   Megatron-Core, DeepSpeed, Composer, timm, MONAI, mmengine and open_clip, which it installs into a folder of their own
# make test-oldest   those with the first three, in the oldest versions that are supported, in an environment of their own
# make lint    ruff and mypy
# make fuzz    10,000 random programs against torch; PROGRAMS= and SEED= choose how many and from where
# make soak    20,000 steps: memory, tensors and plans stay flat, the scale is what the rule says
# make simulate   the kernels as compiled for five GPUs, none of which is needed, pass the kernel tests (4 minutes)
# make pretend   the tests that need a GPU, those of ranks and of every device, on GPUs that are pretended: their memory
#   and operations are the CPU's; and python -m perf there, in small (15 minutes)
# make mutants   362 wrong versions of the code, each of which the tests must notice (about an hour)
# make coverage   lines and branches of host code that the whole suite runs, child processes included (half an hour)
# make docs    docs/ as HTML in out/docs; a warning is an error
# make perf    what it costs beside torch's scaler, as far as this machine can tell, three times over (12 minutes); fills
#   perf/README.md and the README
# make release   sdist and wheel into dist/, checked as an index would; the wheel in an empty environment runs the demo,
#   with triton and without
# make gpu     all of the next five, with the python3 and packages of a GPU machine; OUT names a folder
#   gpu-tests, gpu-ranks, gpu-tune, gpu-perf, gpu-sanitize: the suite natively; once more what ranks do, on the GPU, too;
#   tuned launch configurations; measurements; the kernels under compute-sanitizer; under 10 minutes each
PYTHON ?= python3
OUT ?= out
PROGRAMS ?= 10000
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin

GPU_PARTS := gpu-tests gpu-ranks gpu-tune gpu-perf gpu-sanitize

.PHONY: demo test test-frameworks test-oldest docs lint style fuzz soak simulate pretend mutants coverage perf release gpu has-gpu $(GPU_PARTS) sanitize clean

demo: $(VENV)/ready
	$(BIN)/python -m scaler_triton demo --out demo.png

test: $(VENV)/ready
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder

test-frameworks: $(VENV)/ready out/peers/ready
	HEAVY=1 $(BIN)/python -m pytest tests/frameworks --ignore tests/frameworks/peers --durations=20
	HEAVY=1 PYTHONPATH=$(CURDIR)/out/peers $(BIN)/python -m pytest tests/frameworks/peers

# Not into the environment, where other frameworks would find them; and without what they ask for, which would be CUDA.
out/peers/ready: $(VENV)/ready tests/frameworks/peers/packages.txt
	rm -rf out/peers
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --target out/peers \
		--requirement tests/frameworks/peers/packages.txt
	touch $@

test-oldest:
	$(PYTHON) -m venv out/oldest
	out/oldest/bin/pip install --quiet --constraint constraints-oldest.txt torch setuptools
	out/oldest/bin/pip install --quiet --constraint constraints-oldest.txt --no-build-isolation \
		--editable .[demo,frameworks] pytest hypothesis
	HEAVY=1 out/oldest/bin/python -m pytest tests/frameworks --ignore tests/frameworks/peers

fuzz: $(VENV)/ready
	SCALER_TRITON_FUZZ=$(PROGRAMS) $(if $(SEED),SCALER_TRITON_FUZZ_SEED=$(SEED)) OMP_NUM_THREADS=1 \
		$(BIN)/python -m pytest tests/fuzz -s --durations=5

soak: $(VENV)/ready
	SOAK=1 $(BIN)/python -m pytest tests/soak

simulate: $(VENV)/ready
	CONFIGS=all SIMULATE="sm_70 sm_75 sm_80 sm_90 sm_100" $(BIN)/python -m pytest tests/kernels/test_simulated.py

pretend: $(VENV)/ready
	PRETEND=all $(BIN)/python -m pytest tests/test_pretended_gpu.py

mutants: $(VENV)/ready
	$(BIN)/python tests/mutants/run.py

# The report comes also when tests failed.
coverage: $(VENV)/ready
	rm -rf out/coverage
	$(BIN)/python -m coverage run -m pytest; status=$$?; \
		$(BIN)/python -m coverage combine --quiet && $(BIN)/python -m coverage report && exit $$status

docs: $(VENV)/ready
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --fresh-env docs out/docs

perf: $(VENV)/ready
	$(BIN)/python -m perf --runs 3

release: $(VENV)/ready
	rm -rf dist out/release
	$(BIN)/python -m build --no-isolation --outdir dist
	$(BIN)/python -m twine check --strict dist/*
	$(PYTHON) -m venv out/release
	out/release/bin/pip install --quiet --constraint constraints.txt torch
	out/release/bin/pip install --quiet --constraint constraints.txt "$$(ls dist/*.whl)[demo]"
	cd out/release && bin/python -m scaler_triton demo --steps 10 --out demo.png
	out/release/bin/pip uninstall --quiet --yes triton
	cd out/release && bin/python -m scaler_triton demo --steps 10 --out demo.png

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

# Nothing is installed here, and no part waits for another's success.
gpu:
	status=0; for part in $(GPU_PARTS); do $(MAKE) $$part || status=1; done; exit $$status

# Tests end with the one that is running when TEST_SECONDS are over; one that hangs is interrupted, so that the report is
# written; a file that cannot be imported there stops no other. What packages that only that machine has call deprecated,
# when others import them, fails no test.
NATIVELY := -W ignore::DeprecationWarning -W ignore::FutureWarning --durations=20 --continue-on-collection-errors

# Without a GPU the parts would pass by skipping, or measure something else.
has-gpu:
	timeout 60 python3 -c "import torch; torch.ones(1, device='cuda').item()"

# What runs where is recorded first. What needs no GPU is tested beside what does.
gpu-tests: has-gpu
	mkdir -p $(OUT)
	timeout 100 python3 -m scaler_triton.demo.device 2>&1 | tee $(OUT)/ranks.txt
	python3 -c "import torch, triton; print(torch.__version__, triton.__version__, torch.cuda.get_device_name())" \
		| tee $(OUT)/versions.txt
	OUT=$(OUT) NEEDS_GPU=1 TEST_SECONDS=410 timeout --signal=INT --kill-after=10 430 python3 tests/in_shards.py $(NATIVELY)

# Ranks share the GPU, by gloo, which serves FSDP's own collectives there or does not: ranks.txt says so.
gpu-ranks: has-gpu
	OUT=$(OUT)/ranks RANKS_ON=cuda NEEDS_GPU=1 TEST_SECONDS=430 timeout --signal=INT --kill-after=10 450 \
		python3 tests/in_shards.py tests/distributed tests/fuzz/test_ranks.py $(NATIVELY)

# The kernel tests under compute-sanitizer, 240 s for each of two tools.
gpu-sanitize sanitize: has-gpu
	OUT=$(OUT) tests/kernels/sanitize.sh

# Begins nothing after 7 minutes. What hangs is interrupted here, too: what was measured by then is written.
gpu-perf: has-gpu
	timeout --signal=INT --kill-after=15 525 python3 -m perf --out $(OUT)

gpu-tune: has-gpu
	timeout 530 python3 -m scaler_triton tune --out $(OUT)/tuned

clean:
	rm -rf $(VENV) build dist out *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
