"""Draw random settings, and compare an uninterrupted run with runs that must end like it."""

import json
import os
import random
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.multiprocessing.spawn import ProcessException

from megatoken.base.errors import ConfigError
from megatoken.model.gpt import GPT
from megatoken.model.native.selection import find_library
from megatoken.text.chat_template import add_control_tokens
from megatoken.text.prepare_chats import prepare_chats
from megatoken.text.sources import find_source
from megatoken.text.tokenizer import Tokenizer, load_tokenizer
from tests.convert.models import save_run
from tests.ranks import run_ranks
from tests.tiny_run import TINY, fingerprint, read_losses, tiny_run, train

STEPS = 5
TOKENIZER = add_control_tokens(load_tokenizer("bytes"))
# Sizes at which sums depend on the number of threads: a batch is 8 sequences of 64 tokens.
MODEL = "model.n_layer=2 model.n_head=2 model.d_model=64 model.seq_len=64"
BASE = (
    f"budget.batch_tokens=512 budget.steps={STEPS} budget.epochs=0 machine.device=cpu "
    "machine.threads=2 optim.lr=1e-3 optim.warmup=2steps evaluate.every=2steps "
    "evaluate.tokens=500 log.plots=false log.every=1steps"
)
ROWS = {
    **{"sft": "chats", "dpo": "pairs", "reward": "pairs"},
    **{"kto": "rated", "grpo": "prompts", "ppo": "prompts"},
}
SAMPLED = ("grpo", "ppo")


def read_table(table: str) -> dict[str, list[str]]:
    """Return the values of each line `NAME: VALUE | VALUE`."""
    pairs = (line.split(":") for line in table.strip().splitlines())
    return {name: [value.strip() for value in values.split("|")] for name, values in pairs}


ANY = read_table("""
ranks: 1 none | 1 none | 2 none | 2 zero1 | 2 zero2 | 2 zero3 | 2 tp
save: save.every=0 | save.every=1steps | save.every=2steps
optim: optim.name=adamw | optim.name=muon | optim.name=muon optim.equal_rows=true optim.momentum_warmup=3steps
schedule: optim.schedule=cosine | optim.schedule=wsd optim.decay=3steps | optim.schedule=multi-step optim.min_lr_ratio=0.1
dropout: model.dropout=0.0 | model.dropout=0.1
optim.spike: warn | skip
machine.precision: fp32 | bf16
machine.gemm_backend: auto | torch | torch+native | native
machine.attention: auto | flash | explicit
machine.master_weights: auto | auto | off
machine.fused: auto | off
machine.adamw: auto | fused | loop
machine.activation_checkpointing: none | none | gelu | block
machine.loss_chunk: auto | 96
machine.micro_batch: auto | 2 | 4
machine.deterministic: false | false | true
""")
ARCHITECTURE = read_table("""
model.norm: layernorm | rmsnorm
model.mlp: gelu | swiglu | relu2 | geglu
model.pos_emb: learned | rotary
model.bias: true | false
model.window: 0 | 0 | 16
switches: | model.smear=true model.backout=true model.value_embeddings=true \
  | model.n_kv_head=1 model.qk_norm=true model.tie_embeddings=false model.logit_softcap=20
""")
TEXT = read_table("""
data: a | a | mixture
order: data.order=shuffled | data.order=sequential | data.order=one-batch
mask: | | data.document_mask=true
ramp: | budget.batch_start=128 budget.batch_ramp=1024
sample: sample.every=0 | sample.every=2steps sample.tokens=4
""")
CHATS = read_table("lora: | model.lora_rank=2")
# Rounding, which AdamW's first steps turn into updates of another size.
TOLERANCE = {"fp32": 2e-4, "bf16": 3e-2}
Draws = dict[str, str]


def join(draws: Draws) -> str:
    """Return draws as settings: a draw without a key is a string of settings itself."""
    return " ".join(f"{name}={value}" if "." in name else value for name, value in draws.items())


class Case:
    """A recipe with random settings."""

    def __init__(self, rng: random.Random, data: Path) -> None:
        """Draw until the settings are valid. data: written by `write_data`."""

        def draw(space: dict[str, list[str]]) -> Draws:
            return {name: rng.choice(values) for name, values in space.items()}

        while True:
            self.recipe = rng.choice((str(TINY), str(TINY), *ROWS))
            draws, self.architecture = draw(ANY), f"{MODEL} {join(draw(ARCHITECTURE))}"
            ranks, layout = draws.pop("ranks").split()
            self.nprocs, self.is_split = int(ranks), layout != "none"
            self.precision = draws["machine.precision"]
            has_masters = draws["machine.master_weights"] != "off" and not self.is_split
            if not find_library() or (self.precision == "bf16" and not has_masters):
                draws["machine.gemm_backend"] = "torch"  # others are refused
            self.is_deterministic = draws["machine.deterministic"] == "true" and not self.is_split
            # On two processes, the first batch of a ramp has no micro-batch of 4 for each.
            self.is_fixed = draws["machine.micro_batch"] == "2"
            split = "tensor_parallel=2" if layout == "tp" else f"sharding={layout}"
            self.settings = f"{BASE} {join(draws)} machine.{split}"
            if self.recipe in ROWS:
                self.settings += f" {join(draw(CHATS))} data.path={data / ROWS[self.recipe]}"
                self.settings += " model.seq_len=64"
                if self.recipe in SAMPLED:
                    self.settings += " objective.group=4 objective.max_new_tokens=6"
                    self.settings += " objective.updates=2"
            else:
                draws = draw(TEXT)
                path = f"{data}/a/*.npy"
                if draws.pop("data") == "mixture":
                    path += f":3,{data}/b/*.npy:1"
                self.settings += f" {self.architecture} {join(draws)} data.path={path}"
            self.stop, self.kill = sorted(rng.sample(range(1, STEPS), 2))
            try:
                tiny_run(self.settings, recipe=self.recipe)
                self.model = tiny_run(self.architecture, BASE).config.model
            except ConfigError:
                continue
            return

    def __str__(self) -> str:
        where = f"{self.nprocs} processes, stopped at {self.stop}, killed at {self.kill}"
        return f"{self.recipe} {self.settings} ({where}; {self.architecture})"

    def train(self, out: Path, settings: str = "", *, nprocs: int = 0, **ends: int) -> None:
        """Train in new processes with an empty measurement cache. ends: to stop or kill them."""
        if self.recipe in ROWS and not (out.parent / "init").exists():
            model = GPT(self.model.resolve(TOKENIZER.vocab_size), seed=1)
            save_run(out.parent / "init", model, TOKENIZER)
        if self.recipe in ROWS:
            settings += f" model.init={out.parent / 'init'}"
        settings = f"{self.settings} {settings}"
        try:
            run_ranks(train_piece, self.recipe, out, settings, ends, nprocs=nprocs or self.nprocs)
        except ProcessException as error:
            if "kill" not in ends or "SIGKILL" not in str(error):
                raise

    def check(self, folder: Path) -> None:
        """Train in one piece, in three pieces, and with other processes and micro-batches.

        Three pieces end with the same bits if they start with the same kernels, and so does a
        deterministic run on another number of processes. Otherwise losses are equal.
        """
        whole, pieces, other = (folder / name for name in ("whole", "pieces", "other"))
        self.train(whole)
        pieces.mkdir()
        for name in ("machine.json", "provenance.json"):
            shutil.copy(whole / name, pieces)
        self.train(pieces, stop=self.stop)
        self.train(pieces, kill=self.kill)
        self.train(pieces)
        choices = [json.loads((out / "machine.json").read_text()) for out in (pieces, whole)]
        compare(*choices, "choices")
        compare(fingerprint(pieces), fingerprint(whole), "in pieces")
        if self.recipe in SAMPLED:  # rounding changes which completions are sampled
            return
        is_same = self.is_deterministic and self.is_fixed
        others = "machine.sharding=none machine.tensor_parallel=1"
        others += "" if is_same else " machine.micro_batch=1"
        self.train(other, others, nprocs=3 - self.nprocs)
        if is_same:
            compare(fingerprint(other), fingerprint(whole), "on other processes")
        for kind in ("train", "val"):
            tolerance = TOLERANCE[self.precision]
            expected = pytest.approx(read_losses(whole, kind), rel=tolerance, abs=tolerance)
            compare(read_losses(other, kind), expected, f"{kind} losses on other processes")


def compare(actual: Any, expected: Any, what: str) -> None:
    assert actual == expected, f"{what}: {actual}\nexpected: {expected}"


def pay_for_letters(prompt: str, completion: str, answer: str) -> float:
    return sum(sign.isalpha() for sign in completion) / 6


def die_at(step: int, row: dict[str, Any]) -> None:
    if row["kind"] == "train" and row["step"] == step:
        os.kill(os.getpid(), signal.SIGKILL)


def train_piece(rank: int, recipe: str, out: Path, settings: str, ends: dict[str, int]) -> None:
    cache = out.with_name(f"cache-{os.getppid()}")
    os.environ["MEGATOKEN_CACHE"] = str(cache)
    reward = pay_for_letters if recipe in SAMPLED else None
    callbacks = [partial(die_at, ends["kill"])] if "kill" in ends else []
    stop = ends.get("stop", 0)
    train(out, settings, recipe=recipe, stop=stop, callbacks=callbacks, reward=reward)


def write_rows(
    folder: Path, name: str, rows: list[dict[str, Any]], tokenizer: Tokenizer = TOKENIZER
) -> Path:
    """Write rows of conversations as the dataset `folder/name`."""
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare_chats(find_source(str(file)), folder / name, tokenizer, seq_len=64, val_fraction=0.2)
    return folder / name


def write_data(folder: Path) -> None:
    """Write the text shards `a` and `b`, and the rows of each objective."""
    rng = np.random.default_rng(0)
    for name in "ab":
        ids = rng.choice([*b"abcdefgh ", 256], size=23_000, p=[0.11] * 9 + [0.01]).astype(np.uint16)
        (folder / name).mkdir()
        np.save(folder / name / "train_0.npy", ids[3_000:])
        np.save(folder / name / "val_0.npy", ids[:3_000])
    pairs = [
        {"prompt": f"{n}?", "chosen": f"{n}" * (n % 7 + 1), "rejected": "no"} for n in range(150)
    ]
    write_rows(folder, "pairs", pairs)
    for name, key in (("prompts", "answer"), ("chats", "completion")):
        rows = [{"prompt": pair["prompt"], key: pair["chosen"]} for pair in pairs]
        write_rows(folder, name, rows)
    rated = [
        {"prompt": pair["prompt"], "completion": pair[key], "label": key == "chosen"}
        for pair in pairs
        for key in ("chosen", "rejected")
    ]
    write_rows(folder, "rated", rated)
