"""Supervised fine-tuning: transformers' loss and gradients, new tokens that cost nothing, any split of the work and any
stop the same run, and what is refused."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatoken.checkpoint.commit import find_checkpoint
from megatoken.cli.main import main
from megatoken.config.load import resolve
from megatoken.config.model_config import ModelConfig
from megatoken.console import Console
from megatoken.convert.hf.families import choose_family
from megatoken.convert.load_pretrained import load_pretrained
from megatoken.data.chat_dataset import open_rows
from megatoken.data.chat_template import Message, add_control_tokens, find_template
from megatoken.data.dataloader import DataLoader, make_batch
from megatoken.data.dataset import load_dataset
from megatoken.data.prepare_chats import prepare_chats
from megatoken.data.sources import find_source
from megatoken.data.tokenizer import load_tokenizer
from megatoken.errors import ExitCode, MegatokenError
from megatoken.model.gpt import GPT
from megatoken.system.metrics_log import read_metrics
from megatoken.train.initial_state import add_mean_rows
from megatoken.train.state import build_state
from megatoken.train.step import forward_backward
from megatoken.train.train import Trainer
from tests.tiny_model import CPU, TINY_LLAMA, TINY_MODERN, tiny_config, tiny_step_config

CONTEXT = 80
MODEL = ["model.n_layer=2", "model.n_head=2", "model.d_model=32", f"model.seq_len={CONTEXT}"]
MACHINE = [
    "machine.device=cpu",
    "machine.precision=fp32",
    "machine.threads=1",
    "machine.attention=flash",
]
MACHINE += [
    "machine.gemm_backend=torch",
    "machine.adamw=fused",
    "machine.micro_batch=2",
    "log.plots=false",
]
SFT = [
    *MACHINE,
    "budget.epochs=0",
    "budget.steps=12",
    "budget.batch_tokens=640",
    "optim.lr=1e-2",
    "sample.every=6",
]
BYTES = add_control_tokens(load_tokenizer("bytes"))


def write_chats(path: Path, count: int = 120) -> str:
    """Which letter follows: one to three turns."""
    rows = []
    for n in range(count):
        letters = [(n * 7 + 5 * turn) % 25 for turn in range(1 + n % 3)]
        turns = [(chr(97 + a), chr(98 + a) * (1 + n % 2)) for a in letters]
        roles = ("user", "assistant")
        rows.append(
            {
                "messages": [
                    {"role": r, "content": c}
                    for turn in turns
                    for r, c in zip(roles, turn, strict=True)
                ]
            }
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on text, and conversations beside it."""
    folder = tmp_path_factory.mktemp("base")
    text = np.frombuffer(b"the cat sat on the mat, " * 400, np.uint8).astype(np.uint16)
    (folder / "text").mkdir()
    np.save(folder / "text" / "train_0.npy", text)
    (folder / "tiny.yaml").write_text("budget: {steps: 30, batch_tokens: 640}\noptim: {lr: 1e-2}\n")
    words = [f"data.path={folder / 'text'}", "data.tokenizer=bytes", *MODEL, *MACHINE]
    Trainer(
        resolve(str(folder / "tiny.yaml"), words), folder / "run", console=Console(quiet=True)
    ).fit()
    source = find_source(write_chats(folder / "chats.jsonl"))
    prepare_chats(
        source, folder / "chats", load_tokenizer("bytes"), seq_len=CONTEXT, val_fraction=0.2
    )
    return folder


def tune(base: Path, out: Path, *words: str, **options: Any) -> ExitCode:
    given = [f"model.init={base / 'run'}", f"data.path={base / 'chats'}", *SFT, *words]
    return Trainer(resolve("sft", given), out, console=Console(quiet=True), **options).fit().code


@pytest.fixture(scope="module")
def tuned(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tuned") / "run"
    assert tune(base, out) == ExitCode.DONE
    return out


def rows_of(out: Path, kind: str, key: str = "loss") -> list[Any]:
    return [row[key] for row in read_metrics(out) if row["kind"] == kind]


def weights(out: Path) -> dict[str, torch.Tensor]:
    folder, _ = find_checkpoint(out, lambda _: None)
    return {
        k: v for path in sorted(folder.glob("*.safetensors")) for k, v in load_file(path).items()
    }


def test_a_model_learns_to_answer(base: Path, tuned: Path) -> None:
    losses = rows_of(tuned, "val")
    assert losses[-1] < 0.6 * losses[0]
    n_trained = sum(open_rows(load_dataset(base / "chats"), "val").marks & 1)
    assert rows_of(tuned, "val", "target_tokens")[-1] == n_trained
    assert "user: Hello.\nassistant: " in (tuned / "samples" / "step-00000012.txt").read_text()
    loaded = load_pretrained(tuned)
    assert (loaded.model.config.vocab_size, find_template(loaded.tokenizer).name) == (259, "chatml")


def test_killed_and_resumed_is_the_same_run(base: Path, tuned: Path, tmp_path: Path) -> None:
    stop = [lambda row: row["kind"] == "train" and row["step"] == 5]
    assert tune(base, tmp_path / "run", callbacks=stop) == ExitCode.STOPPED
    assert tune(base, tmp_path / "run") == ExitCode.DONE
    assert rows_of(tmp_path / "run", "train") == rows_of(tuned, "train")
    expected, found = weights(tuned), weights(tmp_path / "run")
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


def test_the_same_command_goes_on(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--init",
        str(base / "run"),
        "--out",
        str(tmp_path / "run"),
        f"data.path={base / 'chats'}",
        *SFT,
    ]
    for every, code in (("2steps", ExitCode.DONE), ("3steps", ExitCode.DONE)):
        assert main(["train", "sft", *words, f"evaluate.every={every}"]) == code, (
            capsys.readouterr().err
        )
    said = capsys.readouterr().out
    assert "this run is finished" in said
    assert f"next: megatoken chat {tmp_path / 'run'}" in said
    other = ["model.n_layer=3", *MODEL[1:]]
    assert main(["train", "sft", *words, *other]) == ExitCode.CONFIG
    assert "model.n_layer: 2 -> 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["machine.micro_batch=1"], ["machine.micro_batch=8"], ["machine.attention=explicit"]]
)
def test_the_micro_batch_and_the_attention_change_nothing(
    base: Path, tuned: Path, tmp_path: Path, words: list[str]
) -> None:
    assert (
        tune(
            base,
            tmp_path / "run",
            *words,
            "evaluate.tokens=0",
            "sample.every=0",
            "sample.at_start=false",
        )
        == 0
    )
    assert rows_of(tmp_path / "run", "train") == pytest.approx(rows_of(tuned, "train"), rel=2e-5)


def test_two_processes_train_as_one(base: Path, tuned: Path, tmp_path: Path) -> None:
    assert tune(base, tmp_path / "run", nproc=2) == ExitCode.DONE
    assert rows_of(tmp_path / "run", "train") == pytest.approx(rows_of(tuned, "train"), rel=2e-5)
    assert rows_of(tmp_path / "run", "val") == pytest.approx(rows_of(tuned, "val"), rel=2e-5)


def test_batches_do_not_depend_on_the_processes(base: Path) -> None:
    dataset = load_dataset(base / "chats")
    marks = open_rows(dataset, "train").marks

    def batches(dp_size: int) -> list[torch.Tensor]:
        about: dict[str, Any] = {
            "seq_len": CONTEXT,
            "batch_size": 8,
            "seed": 1,
            "marks": marks,
            "dp_size": dp_size,
        }
        loaders = [DataLoader(dataset.train, dp_rank=rank, **about) for rank in range(dp_size)]
        return [
            torch.cat([loader.full_batch(step).targets_BT for loader in loaders])
            for step in (0, 7, 3)
        ]

    for dp_size in (2, 4):
        assert all(map(torch.equal, batches(1), batches(dp_size)))
    seen = [
        row
        for step in range(100)
        for row in DataLoader(
            dataset.train, seq_len=CONTEXT, batch_size=1, seed=1, marks=marks
        ).windows(step)
    ]
    n_rows = len(open_rows(dataset, "train"))
    assert sorted(seen[:n_rows]) == list(range(n_rows))


def test_loss_and_gradients_are_those_of_transformers(base: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = transformers.LlamaConfig(
        vocab_size=259,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        **sizes,
    )
    torch.manual_seed(0)
    reference = transformers.LlamaForCausalLM(config)
    model_config = ModelConfig(
        n_layer=2, n_head=2, n_kv_head=1, d_model=32, d_ff=96, vocab_size=259, seq_len=CONTEXT, norm="rmsnorm",
        norm_eps=config.rms_norm_eps, pos_emb="rotary", mlp="swiglu", bias=False,
        rope_theta=config.rope_parameters["rope_theta"],
    )  # fmt: skip
    model = GPT(model_config, seed=1)
    params = dict(reference.named_parameters())
    with torch.no_grad():
        for name, view in (
            choose_family(model_config)
            .view_params(dict(model.named_parameters()), model_config)
            .items()
        ):
            view.copy_(params[name])
    rows = open_rows(load_dataset(base / "chats"), "train")
    total = torch.zeros((), dtype=torch.float64)
    count = 0
    last = range(len(rows) - 6, len(rows))
    for row in last:
        ids, marks = rows.read(np.array([row]))
        kept = int((marks[0] < 4).sum())
        for piece in np.split(
            np.arange(kept), np.flatnonzero(marks[0, :kept] & 2)[1:]
        ):  # one by one, as transformers
            input_ids = torch.from_numpy(ids[:, piece].astype(np.int64))
            labels = torch.where(torch.from_numpy(marks[:, piece] & 1 > 0), input_ids, -100)
            n = int((labels[:, 1:] >= 0).sum())
            total = total + reference(input_ids=input_ids, labels=labels).loss.double() * n
            count += n
    (total / count).backward()
    state = build_state(model, tiny_config(), CPU)
    loss = forward_backward(state, tiny_step_config(3), CPU, make_batch(*rows.read(np.array(last))))
    assert loss.item() == pytest.approx(total.item() / count, rel=1e-6)
    ours = {name: p.grad for name, p in state.model.named_parameters()}
    for name, view in choose_family(model_config).view_params(ours, model_config).items():
        difference = (view - params[name].grad).norm() / params[name].grad.norm()
        assert difference < 1e-5, name


@pytest.mark.parametrize("model_config", [TINY_LLAMA, TINY_MODERN], ids=["tied", "untied"])
@pytest.mark.parametrize("n_old", [97, 127, 128])
def test_new_tokens_cost_next_to_nothing(model_config: ModelConfig, n_old: int) -> None:
    """Of a model whose logits are far from 0, as trained ones have them: rows of zeros would take nearly all."""
    before = GPT(replace(model_config, vocab_size=n_old), seed=1)
    for table in {before.tokens.weight, before.lm_head_weight}:
        table.data[:n_old] = table.data[:n_old] * 5 - 2 * torch.linspace(-1, 1, 32)
    grown = GPT(replace(model_config, vocab_size=n_old + 2), seed=None)
    tables = ("tokens.weight", "head.weight")
    for name, values in before.state_dict().items():
        if name.endswith(tables):
            values = add_mean_rows(values, n_old, n_old + 2, grown.config)
        grown.state_dict()[name].copy_(values)
    ids = torch.randint(n_old, (8, 17), generator=torch.Generator().manual_seed(0))
    losses = [model.loss(ids[:, :-1], ids[:, 1:]).item() for model in (before, grown)]
    bound = math.log(1 + 2 / n_old) if not model_config.logit_softcap else 0.1
    assert -1e-6 < losses[1] - losses[0] <= bound + 1e-6


def test_what_is_refused(base: Path, tmp_path: Path) -> None:
    wrong = {
        "data.path": (
            f"data.path={base / 'text'}",
            "objective.name=sft needs conversations, this dataset holds",
        ),
        "seq_len": ("model.seq_len=32", "its rows have 80 tokens, model.seq_len is 32"),
        "objective": (
            "objective.name=pretrain",
            "objective.name=pretrain needs text, this dataset holds",
        ),
        "order": ("data.order=sequential", "conversations are always shuffled"),
        "parallel": (
            "machine.tensor_parallel=2",
            "machine.tensor_parallel: not supported for conversations",
        ),
        "batch": ("budget.batch_tokens=64000", "sequences of 80 tokens, a batch has 800"),
    }
    for name, (word, message) in wrong.items():
        with pytest.raises(MegatokenError, match=message):
            tune(base, tmp_path / name, word)


def test_data_of_another_tokenizer_is_refused(base: Path, tmp_path: Path) -> None:
    other = load_tokenizer("bpe:300", lambda: iter(["the cat sat on the mat " * 20]))
    source = find_source(str(base / "chats.jsonl"))
    prepare_chats(source, tmp_path / "chats", other, seq_len=CONTEXT)
    with pytest.raises(MegatokenError, match=r"tokenizer bytes"):
        tune(base, tmp_path / "run", f"data.path={tmp_path / 'chats'}")


def test_rows_of_one_conversation_have_no_mask() -> None:
    ids, trained = find_template(BYTES).encode([Message("user", "a"), Message("assistant", "b")])
    marks = np.array([[2, *map(int, trained[1:])]], np.uint8)
    batch = make_batch(np.array([ids], np.uint16), marks)
    assert (batch.starts_BT, batch.targets_BT[0, -2].item()) == (
        None,
        BYTES.special_ids["<|im_end|>"],
    )
