# What a newcomer, a developer or CI needs. VENV=. uses the environment that is active instead of making one.
PYTHON ?= python3
VENV   ?= .venv
# The torch that the tests ran with; any from 2.11 on will do: make quickstart TORCH="torch>=2.11"
TORCH  ?= torch==2.13.0

ifeq ($(VENV),.)
BIN =
else
BIN = $(VENV)/bin/
endif

# What machine.precision=auto stands for in tests, where a test does not choose: make test PRECISION=fp32
export MEGATOKEN_PRECISION := $(PRECISION)

.PHONY: quickstart test test-fast faults check docs dist soak bench race bench-gpu harness clean

quickstart: $(VENV)/.user
	$(BIN)megatoken quickstart

# Everything that CI runs.
test: check
	$(BIN)pytest -n 2

# While you edit: configuration, model, loss, optimizer, step, data order, commit protocol, API, house rules: under 90 s.
FAST = tests/config tests/model tests/optim tests/train tests/objectives tests/checkpoint tests/data/test_permutation.py \
	tests/data/test_dataloader.py \
	$(filter-out tests/test_packaging.py tests/test_docs.py,$(wildcard tests/test_*.py)) \
	--ignore tests/train/test_pretrain.py

test-fast: $(VENV)/.dev
	$(BIN)pytest -n 2 $(FAST)

# Every row of docs/faults.md: kills, full disks, damaged files, hung ranks, ...
faults: $(VENV)/.dev
	$(BIN)pytest -n 2 -m "fault and not slow"

check: $(VENV)/.dev
	$(BIN)ruff format --check .
	$(BIN)ruff check .
	$(BIN)mypy

# The pages of docs/ as a site: build/site/index.html.
docs: $(VENV)/.dev
	$(BIN)python -m pip install -q -e ".[docs]"
	$(BIN)python docs/build_site.py

# A wheel of HEAD for a package index, where relative links lead nowhere: make dist URL=https://HOST/OWNER/megatoken/blob/main
dist: $(VENV)/.dev
	test -n "$(URL)" || (echo "error: no URL — make dist — give URL=, where the files of this repository are shown"; exit 2)
	rm -rf build/dist && mkdir -p build/dist dist && git archive HEAD | tar x -C build/dist
	sed -i 's#](\(docs/\|records\|examples\|src/\|[A-Z]*\.md\)#]($(URL)/\1#g' build/dist/README.md
	$(BIN)python -m pip wheel -q --no-deps --no-build-isolation -w dist build/dist

RECORD = $(BIN)python tests/soak/record.py

# Kills, faults for an hour, damage, memory: CONTRIBUTING.md says how long each takes. Every line ends in a JSON line that
# is kept in records/. SINKS=a Python with this package, tensorboard, wandb and trackio adds their soak, TRL=one with trl
# its losses.
soak: $(VENV)/.dev
	$(BIN)pytest -m slow
	$(RECORD) commit-soak -- $(BIN)python tests/soak/commit_soak.py
	$(RECORD) kills -- $(BIN)python -m tests.soak.kill_soak --state runs/kills.json
	$(RECORD) chaos -- $(BIN)python -m tests.soak.chaos_soak --work runs/chaos
	$(RECORD) hash-cost -- $(BIN)python -m tests.soak.hash_cost
	$(RECORD) train-soak -- $(BIN)python -m tests.soak.train_soak
	$(RECORD) muon-overhead -- $(BIN)python -m tests.soak.muon_overhead
	$(RECORD) muon-sweep -- $(BIN)python -m tests.soak.muon_sweep
	$(RECORD) flips -- $(BIN)python -m tests.soak.flip_soak
	$(RECORD) prepare-kills -- $(BIN)python -m tests.soak.prepare_soak kills
	$(RECORD) prepare-calls -- $(BIN)python -m tests.soak.prepare_soak calls
	$(RECORD) config-soak -- $(BIN)python -m tests.soak.config_soak
	$(RECORD) launch-soak -- $(BIN)python -m tests.soak.launch_soak
	$(RECORD) terminal-soak -- $(BIN)python -m tests.soak.terminal_soak
	$(RECORD) sweep -- $(BIN)python -m tests.soak.sweep_soak
	$(RECORD) scaling -- $(BIN)python -m tests.soak.scaling_soak --work runs/scaling --plot records/scaling.png
	$(RECORD) report -- $(BIN)python -m tests.soak.report_soak
	$(RECORD) serve -- $(BIN)python -m tests.soak.serve_soak
	$(if $(TRL),$(RECORD) trl-oracle -- $(TRL) tests/soak/trl_oracle.py)
	$(BIN)megatoken quickstart --out runs/quickstart --json
	$(RECORD) rl-answers -- $(BIN)python -m tests.soak.rl_answers --base runs/quickstart --state runs/rl
	$(RECORD) hacked-reward -- $(BIN)python -m tests.soak.hacked_reward --base runs/quickstart --state runs/hacked
	$(RECORD) native-loss -- $(BIN)python -m tests.soak.native_loss
	$(if $(SINKS),$(RECORD) sink-soak -- $(SINKS) -m tests.soak.sink_soak)
	$(RECORD) guard-soak -- $(BIN)python -m tests.soak.guard_soak
	$(RECORD) prepare-memory -- $(BIN)python -m tests.soak.prepare_soak memory
	$(RECORD) dryrun -- $(BIN)megatoken dryrun gpt3-175b --gpus 1024 --tp 8 --json

# Speeds, side by side with what they are compared to; an hour on two cores. NANOGPT=CHECKOUT adds nanoGPT, whose example
# data must be prepared, BUILD_NANOGPT=CHECKOUT build-nanogpt, LLMC=CHECKOUT llm.c, and TEXT=FILE of tiny Shakespeare the
# race to its loss.
BENCH = $(BIN)megatoken bench
PEERS = $(BENCH) peers $(if $(NANOGPT),--nanogpt $(NANOGPT)) $(if $(LLMC),--llmc $(LLMC)) --out records
SMALL = --n-layer 6 --n-head 6 --d-model 384 --seq-len 256 --batch-seqs 16

bench: $(VENV)/.dev
	$(BENCH) gemm --out records
	$(BENCH) ladder --out records
	$(BENCH) parts --out records
	$(PEERS) $(if $(BUILD_NANOGPT),--build-nanogpt $(BUILD_NANOGPT))
	$(PEERS) --seq-len 256 --batch-seqs 4 --name peers-4x256
	$(PEERS) $(SMALL) --vocab-size 256 --name peers-small-256
	$(PEERS) $(SMALL) --vocab-size 4096 --name peers-small-4096
	$(PEERS) $(SMALL) --vocab-size 50257 --name peers-small-50257
	$(BENCH) attention --out records
	$(BENCH) batch --largest 4 --out records
	$(BENCH) size --out records
	$(BENCH) loader --out records
	$(BENCH) prepare --out records
	$(BENCH) generate --out records
	$(RECORD) plan -- $(BIN)python -m tests.soak.plan_race --state runs/plan/state.json
	$(RECORD) quickstart -- $(BIN)python -m tests.soak.quickstart_race
	$(RECORD) ranks-race -- $(BIN)python -m tests.soak.ranks_race
	$(RECORD) ranks-overlap -- $(BIN)python -m tests.soak.ranks_soak overlap
	$(RECORD) ranks-curves -- $(BIN)python -m tests.soak.ranks_soak curves
	$(if $(NANOGPT),$(if $(TEXT),$(RECORD) character-race -- $(BIN)python -m tests.soak.character_race --nanogpt $(NANOGPT) --text $(TEXT)))

# A rate and three times it; then, at 10M parameters on Python sources, GPT-2 with the best of three rates beside the modern
# recipe on a fifth of its tokens, and the modern recipe without each of its ingredients and beside AdamW at three
# rates: an hour and a half on two cores.
# Stopped, it goes on.
RACE = runs/race
MODERN = tests/soak/race_modern.yaml
INGREDIENTS = model.qk_norm=false model.zero_init=false model.embedding_norm=false model.residual_scales=false \
	model.value_embeddings=false model.logit_softcap=0 model.mlp=gelu model.pos_emb=learned model.norm=layernorm \
	model.tie_embeddings=true optim.cautious_decay=false data.document_mask=true
OPTIMIZERS = $(foreach lr,2e-3 4e-3 8e-3,'$(MODERN) optim.name=adamw optim.lr=$(lr)')
SHORT = --tokens 200k evaluate.tokens=65536 evaluate.every=200ktok

race: $(VENV)/.dev
	test -d data/python || $(BIN)megatoken prepare python --out data/python --tokenizer bpe:4096 --val-fraction 0.05
	$(RECORD) race-learning-rate -- $(BIN)megatoken race 'quickstart optim.lr=1.3e-3' quickstart --tokens 512k \
		--out $(RACE)/learning-rate --json
	cp $(RACE)/learning-rate/race.png records/race-learning-rate.png
	$(BIN)megatoken sweep tests/soak/race_gpt2.yaml --out $(RACE)/gpt2 'optim.lr=8e-4|1.5e-3|3e-3'
	$(RECORD) race-modern -- $(BIN)megatoken race $(RACE)/gpt2/best.yaml '$(MODERN) budget.tokens=400k' --tokens 2M \
		evaluate.tokens=32768 evaluate.every=40960tok --out $(RACE)/recipes --turn 0 --json
	cp $(RACE)/recipes/race.png records/race-modern.png
	$(RECORD) race-ablation -- $(BIN)megatoken race $(MODERN) $(foreach setting,$(INGREDIENTS),'$(MODERN) $(setting)') \
		'$(MODERN) optim.schedule=cosine optim.decay=auto' $(SHORT) --out $(RACE)/ablation --turn 0 --json
	$(RECORD) race-optimizers -- $(BIN)megatoken race $(MODERN) $(OPTIMIZERS) $(SHORT) machine.threads=1 \
		--out $(RACE)/optimizers --turn 0 --json

# HellaSwag beside lm-evaluation-harness, choice by choice and in examples a second: HELLASWAG=FILE.jsonl, TEXT=FILE to
# train a small model on, HARNESS=a Python with lm_eval where this one has none.
harness: $(VENV)/.dev
	$(RECORD) harness -- $(BIN)python -m tests.soak.harness_race --data $(HELLASWAG) $(if $(TEXT),--text $(TEXT)) \
		$(if $(HARNESS),--harness $(HARNESS))

# One GPU, under ten minutes; needs no installation but the packages of pyproject.toml. TINY=1 DEVICE=cpu walks through.
bench-gpu:
	PYTHONPATH=src $(PYTHON) tests/soak/bench_gpu.py --device $(or $(DEVICE),cuda) $(if $(TINY),--tiny --out runs/bench-gpu) \
		$(if $(NANOGPT),--nanogpt $(NANOGPT)) $(if $(BUILD_NANOGPT),--build-nanogpt $(BUILD_NANOGPT))

KERNELS = $(wildcard src/megatoken/native/kernels/*)

$(VENV)/.user: pyproject.toml $(KERNELS)
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)python -m pip install -q "$(TORCH)" -e ".[plot]"
	-$(BIN)python -m megatoken.native.build
	@touch $@

$(VENV)/.dev: pyproject.toml $(KERNELS)
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)python -m pip install -q "$(TORCH)" -e ".[dev]"
	-$(BIN)python -m megatoken.native.build
	@touch $@

clean:
	rm -rf runs/quickstart data/python
