# Everything a newcomer or CI needs. VENV=. uses the environment that is active instead of making one.
PYTHON ?= python3
VENV   ?= .venv
RUN     = runs/quickstart
# The torch that the tests ran with; any from 2.11 on will do: make quickstart TORCH="torch>=2.11"
TORCH  ?= torch==2.13.0

ifeq ($(VENV),.)
BIN =
else
BIN = $(VENV)/bin/
endif

.PHONY: quickstart test check soak bench clean

quickstart: $(VENV)/.user
	$(BIN)megatoken prepare python --out data/python --tokenizer bpe:4096 --val-fraction 0.03
	$(BIN)megatoken train quickstart --out $(RUN)
	$(BIN)megatoken sample $(RUN) "def " --tokens 100
	@echo
	@echo "run folder   $(RUN)"
	@echo "curves       $(RUN)/plots/curves.png"
	@echo "next         $(BIN)megatoken sample $(RUN) \"class \""
	@echo "your text    $(BIN)megatoken prepare FOLDER --out data/mine && $(BIN)megatoken train quickstart --out runs/mine data.path=data/mine"

test: check
	$(BIN)pytest

check: $(VENV)/.dev
	$(BIN)ruff format --check .
	$(BIN)ruff check .
	$(BIN)mypy

RECORD = $(BIN)python tests/soak/record.py

# Minutes each: kills, damage, memory. Every line ends in a JSON line that is kept in records/.
soak: $(VENV)/.dev
	$(RECORD) commit-soak -- $(BIN)python tests/soak/commit_soak.py
	$(RECORD) train-soak -- $(BIN)python -m tests.soak.train_soak
	$(RECORD) prepare-kills -- $(BIN)python tests/soak/prepare_soak.py kills
	$(RECORD) prepare-memory -- $(BIN)python tests/soak/prepare_soak.py memory

# Speeds, side by side with what they are compared to; `megatoken bench report` shows them.
bench: $(VENV)/.dev
	$(BIN)megatoken bench gemm --out records
	$(BIN)megatoken bench attention --out records
	$(BIN)megatoken bench batch --out records
	$(BIN)megatoken bench size --out records
	$(BIN)megatoken bench parts --out records
	$(BIN)megatoken bench loader --out records
	$(BIN)megatoken bench prepare --out records
	$(BIN)megatoken bench generate --out records
	$(BIN)megatoken bench peers --out records

$(VENV)/.user: pyproject.toml
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)python -m pip install -q "$(TORCH)" -e ".[plot]"
	@touch $@

$(VENV)/.dev: pyproject.toml
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)python -m pip install -q "$(TORCH)" -e ".[dev]"
	@touch $@

clean:
	rm -rf runs/quickstart data/python
