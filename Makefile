# make quick     lint, types and the unit tests on torch's path, in 90 s on two cores; T=flag: only those of flag.py
# make test      every test but the nightly ones, in JOBS= processes; without a GPU under Triton's interpreter
# make lint, style, docs, demo, perf, release, clean
# Each night: make fuzz (PROGRAMS= random programs from SEED= on), soak, faults, mutants (wrong versions of the code),
#   simulate (kernels as compiled for five GPUs), pretend (what needs a GPU, on one that is pretended), without-fp64
#   (unit tests on a pretended GPU of Apple's),
#   test-frameworks, test-oldest (with all of them, at length; in the oldest versions)
# make optimizers   runs the optimizers of other packages and writes docs/optimizers.md; NAMES= of libraries: only prints
# On a GPU machine, with its python3 and packages: make gpu, or its parts, each under 10 minutes. OUT= names a folder.
PYTHON ?= python3
OUT ?= out
PROGRAMS ?= 10000
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
SPREAD := --numprocesses $(JOBS) --dist loadfile

NIGHTLY := fuzz soak faults mutants simulate pretend without-fp64 test-frameworks test-oldest
GPU_PARTS := gpu-tests gpu-ranks gpu-ranks-gloo gpu-tune gpu-perf gpu-sanitize
.PHONY: quick test lint style docs demo perf optimizers release clean $(NIGHTLY) gpu has-gpu $(GPU_PARTS)

quick: $(VENV)/ready
ifdef T
	$(PYTEST) -q $$(find tests/unit -name 'test_$(T)*.py' | grep .)
else
	$(MAKE) --no-print-directory lint
	PLACES=torch $(PYTEST) -q $(SPREAD) tests/unit --ignore tests/unit/kernels
endif

test: $(VENV)/ready
	$(PYTEST) $(SPREAD) tests --ignore tests/nightly

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
style: $(VENV)/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
docs: $(VENV)/ready
	$(BIN)/sphinx-build -qEW --keep-going docs out/docs
demo: $(VENV)/ready
	$(BIN)/python -m scaler_triton demo --out demo.png
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
clean:
	rm -rf $(VENV) build dist out *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

# torch comes first and alone: a looser request would fetch the largest build there is.
$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch setuptools
	$(BIN)/pip install --quiet --constraint constraints.txt --no-build-isolation --editable .[dev]
	touch $@

fuzz soak faults mutants simulate pretend without-fp64: $(VENV)/ready
fuzz:
	SCALER_TRITON_FUZZ=$(PROGRAMS) $(if $(SEED),SCALER_TRITON_FUZZ_SEED=$(SEED)) $(PYTEST) tests/fuzz --durations=5
soak faults:
	$(PYTEST) $(SPREAD) tests/nightly/$@
pretend:
	$(PYTEST) tests/nightly/pretended_gpu
without-fp64:
	PLACES=mps $(PYTEST) -q $(SPREAD) tests/unit --ignore tests/unit/kernels
mutants:
	$(BIN)/python tests/nightly/mutants/run.py
simulate:
	CONFIGS=all SIMULATE="sm_70 sm_75 sm_80 sm_90 sm_100" $(PYTEST) tests/nightly/simulator
test-frameworks: $(VENV)/ready out/peers/ready out/optimizers/ready out/notebook/ready
	HEAVY=1 $(PYTEST) tests/frameworks $(OF_THEIR_OWN) --durations=20
	HEAVY=1 PYTHONPATH=$(CURDIR)/out/peers $(PYTEST) tests/frameworks/peers
	HEAVY=1 PYTHONPATH=$(CURDIR)/out/optimizers $(PYTEST) tests/frameworks/optimizers
	HEAVY=1 PYTHONPATH=$(CURDIR)/out/notebook/site-packages $(PYTEST) tests/frameworks/notebook
OF_THEIR_OWN = $(addprefix --ignore tests/frameworks/,peers optimizers notebook)
optimizers: $(VENV)/ready out/optimizers/ready
	PYTHONPATH=.:tests/frameworks/peers:out/optimizers $(BIN)/python tests/frameworks/optimizers/page.py $(NAMES)
# Not into the environment, where other frameworks would find them; and without what they ask for, which would be CUDA.
out/peers/ready out/optimizers/ready: out/%/ready: tests/frameworks/%/packages.txt
	rm -rf out/$*
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --target out/$* --requirement $<
	touch $@
# In a folder of that name: elsewhere dill, which names data sets for TRL, would take pyarrow for a module of the user's.
out/notebook/ready: tests/frameworks/notebook/packages.txt
	rm -rf out/notebook
	$(BIN)/pip install --quiet --no-deps --target out/notebook/site-packages --requirement $<
	touch $@
test-oldest: # downloads some gigabytes: this torch comes with CUDA
	$(PYTHON) -m venv out/oldest
	out/oldest/bin/pip install -qc constraints-oldest.txt torch triton setuptools
	out/oldest/bin/pip install -qc constraints-oldest.txt --no-build-isolation -e .[demo,frameworks] pytest pytest-xdist hypothesis
	out/oldest/bin/python -m pytest $(SPREAD) tests --ignore tests/nightly --ignore tests/frameworks
	HEAVY=1 out/oldest/bin/python -m pytest tests/frameworks $(OF_THEIR_OWN)

gpu: # nothing is installed, and no part waits for another's success
	status=0; for part in $(GPU_PARTS); do $(MAKE) $$part || status=1; done; exit $$status
has-gpu: # without one the parts would pass by skipping, or measure something else
	mkdir -p $(OUT)
	timeout 60 python3 -c "import torch; print(torch.__version__, torch.ones(1, device='cuda').device)" > $(OUT)/versions.txt
# Tests begin with what needs a GPU and end when TEST_SECONDS are over; one that hangs is interrupted, so that the report
# is written. Where pytest-xdist is there, several processes share the GPU; pytest-benchmark would warn of them, which is
# an error.
NATIVELY = NEEDS_GPU=1 TEST_SECONDS=430 timeout --signal=INT --kill-after=15 470 python3 -m pytest -p no:cacheprovider -p no:benchmark \
	$$(python3 -c 'import xdist' 2> /dev/null && echo --numprocesses auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder) \
	-W ignore::DeprecationWarning -W ignore::FutureWarning --durations=20 --continue-on-collection-errors
gpu-tests: has-gpu
	$(NATIVELY) --junitxml=$(OUT)/junit.xml tests --ignore tests/nightly --ignore tests/ranks --ignore tests/fuzz
gpu-ranks: has-gpu # over NCCL, two and four ranks, which share the GPU if there is one
	RANKS_ON=cuda RANKS_OVER=nccl $(NATIVELY) --junitxml=$(OUT)/junit-ranks.xml tests/ranks
# Groups of gloo on a GPU. Not FSDP2: over bare gloo it dies within torch there, with torch's scaler, too.
gpu-ranks-gloo: has-gpu
	RANKS_ON=cuda $(NATIVELY) --junitxml=$(OUT)/junit-ranks-gloo.xml tests/ranks/test_process_group.py \
		tests/ranks/test_rank_faults.py tests/ranks/test_report.py
gpu-tune: has-gpu
	timeout 530 python3 -m scaler_triton tune --out $(OUT)/tuned
gpu-perf: has-gpu # interrupted, it writes what was measured
	timeout --signal=INT --kill-after=15 525 python3 -m perf --out $(OUT)
gpu-sanitize: has-gpu # 240 s for each of two tools
	OUT=$(OUT) tests/nightly/simulator/sanitize.sh
