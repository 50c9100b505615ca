"""What people type who come from other tools, or slip: one line, an exit code, and the suggestion they meant.

The first list was found by users, the second collects the words of nanoGPT, llm.c, modded-nanogpt, nanochat, litgpt,
torchtitan, Megatron, Composer and the Trainer of transformers.
"""

import os
import shlex
from pathlib import Path

import pytest

from megatoken.cli.main import main
from megatoken.config.fields import parse_value
from megatoken.config.presets import PRESETS
from megatoken.config.schema import FIELDS
from megatoken.config.words import (
    CHOICES,
    CONVERSIONS,
    KEYS,
    MAIN_FIELDS,
    RECIPES,
    VALUES,
    find_key,
)
from megatoken.convert.recipes import composer, nanogpt

TOKENS = "it counts tokens: sequences x model.seq_len"
SETTING = "settings are section.field=value, without --: "
FOUND = [
    ("config quickstart optim.learning_rate=1", 2, "did you mean 'optim.lr'?"),
    ("config quickstart model.n_embd=8", 2, "did you mean 'model.d_model'?"),
    ("config quickstart model.block_size=8", 2, "did you mean 'model.seq_len'?"),
    ("train gpt2", 2, "did you mean 'gpt2-124m'?"),
    ("describe gpt2-xl", 2, "did you mean 'gpt2-1558m'?"),
    ("trian quickstart", 2, "did you mean train?"),
    ("train quickstart --data.path=d", 2, f"{SETTING}data.path=d"),
    ("config quickstart optim.lrr=1", 2, "did you mean 'optim.lr'?"),
    ("config quickstart model.padded_vocab_size=8", 2, "did you mean 'model.vocab_size'?"),
    ("train quikstart", 2, "did you mean 'quickstart'?"),
    ("sample runs/nope hello", 4, "no such folder — runs/nope — did you mean runs/nose?"),
    ("sample runs/zz hello", 4, "no such folder — runs/zz — give a run folder"),
    ("train fifo.yaml", 2, "no recipe named 'fifo.yaml', and no such file or run folder — known: "),
    ("train ''", 2, "no recipe named '' — known: "),
    ("train 'null:'", 2, "no recipe named 'null:' — known: "),
    ("train 'a\x01b'", 2, "no recipe named 'a\\x01b' — known: "),
    ("config quickstart 'null:=3'", 2, "settings are section.field=value"),
    ("config quickstart zzz=1", 2, "settings are section.field, sections model, data, objective"),
    ("config quickstart model.foo=3", 2, "model has preset, n_layer"),
    (
        "config quickstart evaluate.eval_iters=8",
        2,
        "'evaluate.tokens'? it counts tokens: batches x sequences x model",
    ),
    ("config quickstart budget.batch_size=8", 2, f"did you mean 'budget.batch_tokens'? {TOKENS}"),
    (
        "prepare fifo --out d",
        3,
        "neither a file nor a folder — fifo — write its content to a file first",
    ),
    ("prepare python --out d --tokenizer gpt-2", 2, "did you mean gpt2?"),
    ("eval m --tasks hella_swag", 2, "did you mean hellaswag?"),
    ("eval m --data d --split trian", 2, "did you mean train?"),
    ("eval m --data d --tasks piqa --split train", 2, "--split has no effect here"),
    ("launch slrum quickstart", 2, "did you mean slurm?"),
    ("config quickstart save.time_limit=soon", 2, "write it as 45s, 90m, 11h30m or 2d"),
    ("bench ladders", 2, "did you mean ladder?"),
]
NEW = [
    ("train quickstart optim.fused=true", 2, "did you mean 'machine.adamw'?"),
    ("sample m Once upon a time", 2, "put the prompt in quotes: 'Once upon a time'"),
    ("chat m --temperature 0 --top-p 0.9", 2, "it is for temperatures above 0"),
    (
        "train quickstart --overfit-batch data.order=sequential",
        2,
        "--overfit-batch sets data.order: give one",
    ),
    ("eval m --data d --harness", 2, "--harness without --tasks"),
    (
        "config quickstart 'model.n_layer = 3'",
        2,
        "settings are section.field=value: model.n_layer=3",
    ),
    ("train depth_8", 2, "did you mean 'depth-8'?"),
    ("train quickstart evaluate.steps=10", 2, "did you mean 'evaluate.every'?"),
    ("train quickstart n_expert=8", 2, "no mixture of experts"),
    (
        "train quickstart --wandb_project=x",
        2,
        "log.sinks=wandb sends the run, by its folder's name",
    ),
    ("tune quickstart", 2, "did you mean sweep?"),
    ("upload m", 2, "did you mean export?"),
    ("prepare python --out d --tokenizer bpe=4096", 2, "did you mean bpe:4096?"),
    (
        "sample weights.safetensors hi",
        4,
        "without their sizes and tokenizer — weights.safetensors — give the folder: .",
    ),
    ("launch slurm gpt2-124m --gpus-per-node 8", 2, "did you mean --nproc?"),
    (
        "train quickstart optim.lrr=1 model.n_layr=2",
        2,
        "unknown keys 'optim.lrr', 'model.n_layr' — command line — "
        "did you mean 'optim.lr'? did you mean 'model.n_layer'?",
    ),
    (
        "train finetune data.path=d",
        2,
        "no weights to go on with — --init — name a run or a Hugging Face folder",
    ),
    (
        "prepare a.txt b.txt --out d",
        2,
        "give one SOURCE: a folder, or a pattern in quotes, such as 'texts/*.txt'",
    ),
    (
        "eval a b --plot",
        2,
        "argument --plot: expected one argument — megatoken eval — give a value; one that begins",
    ),
    ("train quickstart --lr 1e-3", 2, f"{SETTING}optim.lr=1e-3"),
    ("train quickstart --compile=False", 2, f"{SETTING}machine.compile=off"),
    (
        "train quickstart --gradient_accumulation_steps=8",
        2,
        "machine.micro_batch=... accumulation is what remains",
    ),
    ("train config/train_gpt2.py", 2, "did you mean --nanogpt 'config/train_gpt2.py'?"),
    ("train openai-community/gpt2-large", 2, "did you mean 'gpt2-774m'?"),
    ("train llama", 2, "did you mean 'llama-110m' or 'llama-5m'?"),
    ("train openwebtext", 2, "no recipe named 'openwebtext' — known: "),
    ("train quickstart --nproc gpu", 2, "give a whole number"),
    (
        "train quickstart --wandb_log=True",
        2,
        f"{SETTING}log.sinks=... name them: wandb, tensorboard",
    ),
    ("config quickstart optimizer.lr=1", 2, "did you mean 'optim.lr'?"),
    ("config quickstart checkpoint.interval=8", 2, "did you mean 'save.every'?"),
    (
        "config quickstart min_lr=1e-5",
        2,
        "did you mean 'optim.min_lr_ratio'? it is a share of optim.lr",
    ),
    ("config quickstart optim.name=adam", 2, "did you mean adamw?"),
    ("config quickstart optim.schedule=warmup_stable_decay", 2, "did you mean wsd?"),
    ("config quickstart machine.compile=True", 2, "did you mean on?"),
    ("config quickstart machine.attention=sdpa", 2, "did you mean flash?"),
    ("config quickstart budget.tokens=10GB", 2, "expected a whole number, got '10GB'"),
    (
        "plot runs/a --x time",
        2,
        "--x cannot be 'time' — megatoken plot — did you mean seconds? known: tokens, steps, ",
    ),
    ("prepare python --out d --val-fraction 10%", 2, "give a number such as 0.1, see"),
    ("train gpt2-125m", 2, "did you mean 'gpt2-124m'?"),
    (
        "train out/ckpt.pt",
        2,
        "a model goes on by: train finetune --init out/ckpt.pt data.path=DATA; recipes: ",
    ),
    (
        "sample nope.txt hi",
        4,
        "text, not a model — nope.txt — give a run; to train one on the text: megatoken quickst",
    ),
    ("verify gs://bucket/data", 2, "— gs://bucket/data — pip install 'gcsfs'"),
    ("tokenize text.txt", 2, "did you mean prepare?"),
    ("sample m --start hi", 2, "write PROMPT alone, without --start"),
    ("launch kubernetes quickstart", 2, "did you mean k8s?"),
    ("prepare python --out d --tokenizer char", 2, "did you mean bytes?"),
]
MEANT = [  # of the words of nanoGPT, litgpt, torchtitan, Composer, nanochat and the Trainer
    ("config quickstart machine.compile=reduce-overhead", 2, "did you mean graphs?"),
    ("plot m --y loss", 2, "every value of the run has its panel"),
    ("eval m --text d", 2, "did you mean --data?"),
    ("eval m --apply_chat_template", 2, "--no-template leaves it out"),
    ("prepare t.txt --out d --num_workers 8", 2, "did you mean --workers?"),
    ("launch slurm gpt2-124m --nnodes 2", 2, "did you mean --nodes?"),
    ("race quickstart quickstart --n 3", 2, "did you mean --seeds?"),
    ("bench ladder --model gpt2-124m", 2, "did you mean --preset?"),
]
# As setting=value, and what --setting=value and --setting value are answered with.
SETTINGS = [
    (
        "per_device_train_batch_size=8",
        "did you mean 'machine.micro_batch'?",
        "machine.micro_batch=8",
    ),
    ("num_train_epochs=3", "did you mean 'budget.epochs'?", "budget.epochs=3"),
    ("rope_base=10000", "did you mean 'model.rope_theta'?", "model.rope_theta=10000"),
    ("init_from=gpt2", "did you mean 'model.init'?", "model.init=gpt2"),
    ("depth=12", "is the recipe depth-N", "is the recipe depth-N"),
    ("warmup_iters=100", "did you mean 'optim.warmup'?", "optim.warmup=100"),
    ("hidden_size=768", "did you mean 'model.d_model'?", "model.d_model=768"),
    ("rms_norm_eps=1e-5", "did you mean 'model.norm_eps'?", "model.norm_eps=1e-5"),
    (
        "unembedding_lr=0.004",
        "did you mean 'optim.lr'? AdamW has one rate",
        "optim.lr=... AdamW has one rate",
    ),
    ("sliding_window=1024", "did you mean 'model.window'?", "model.window=1024"),
    ("dataloader_num_workers=4", "without workers", "without workers"),
    (
        "num_nodes=2",
        "megatoken launch ENGINE RECIPE --nodes N",
        "megatoken launch ENGINE RECIPE --nodes N",
    ),
    ("init_std=0.02", "initial weights are GPT-2's", "initial weights are GPT-2's"),
    ("optimizer.name=adamw", "did you mean 'optim.name'?", f"{SETTING}optim.name=adamw"),
]


@pytest.mark.parametrize(("line", "code", "says"), FOUND + NEW + MEANT)
def test_mistakes_get_the_suggestion_that_was_meant(
    line: str,
    code: int,
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "nose").mkdir(parents=True)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "weights.safetensors").write_bytes(b"")
    assert main(shlex.split(line)) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert says in err
    meant = err.rpartition("did you mean ")[2].partition("?")[0] if "did you mean" in err else ""
    assert not meant or meant in says, "another suggestion"
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "fifo", "weights.safetensors"}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("train runs", "'runs' is a folder of runs — name one: runs/own"),
        ("train runs/onw", "did you mean runs/own?"),
        ("train runs/q", "no recipe named 'runs/q', and no such file or run folder — known: "),
        ("plot runs", "runs/metrics.jsonl — name one of its runs: runs/own"),
        ("report runs", "runs/metrics.jsonl — name one of its runs: runs/own"),
        ("sample hi runs/own", "did you mean megatoken sample runs/own hi?"),
        ("sample runs hi", "a folder of runs, not a model — runs — name one: runs/own"),
        (
            "train quickstart data.path=a.txt",
            "a.txt — megatoken prepare a.txt --out data/a, and set data.path=data/a",
        ),
        (
            "train quickstart data.path=t",
            "t — megatoken prepare t --out data/t, and set data.path=data/t",
        ),
    ],
)
def test_folders_and_texts_in_the_wrong_place(
    line: str,
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "own" / "checkpoints").mkdir(parents=True)
    (tmp_path / "t").mkdir()
    for path in ("a.txt", "t/b.txt"):
        (tmp_path / path).write_text("text")
    assert main(shlex.split(line)) in (2, 3, 4)
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(("setting", "says", "of_option"), SETTINGS)
def test_settings_of_other_tools_in_three_forms(
    setting: str, says: str, of_option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, _, value = setting.partition("=")
    for words, meant in (
        ([setting], says),
        ([f"--{setting}"], of_option),
        ([f"--{name}", value], of_option),
    ):
        assert main(["train", "quickstart", *words]) == 2
        assert meant in capsys.readouterr().err, words


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["budget.steps", "=", "5"],
            "settings are section.field=value, in one word: budget.steps=5",
        ),
        (["budget.steps", "=5"], "settings are section.field=value, in one word: budget.steps=5"),
        (["budget.steps:", "5"], "settings are section.field=value, in one word: budget.steps=5"),
        (["optim.lr", "3e-4"], "settings are section.field=value, in one word: optim.lr=3e-4"),
        (["--name", "x"], "did you mean --out?"),
        (["-o", "x"], "did you mean --out? flags of llm.c are one word: --llmc '-o x'"),
        (["--train.max_tokens", "gpt2-124m"], f"{SETTING}budget.tokens=..."),
    ],
)
def test_settings_in_another_form(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "quickstart", *words]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "word", ["budget.tokens=1e9tokens", "budget.tokens=10k", "save.time_limit=2h", "log.plots=No"]
)
def test_other_spellings_of_a_value_are_read(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "quickstart", word]) == 0


def test_words_stand_for_what_exists() -> None:
    options = {"--out", "--nproc", "--explain"}
    assert set(KEYS.values()) <= FIELDS.keys() | options
    assert CONVERSIONS.keys() <= set(KEYS.values())
    assert all(word in KEYS for words, _ in CONVERSIONS.values() for word in words.split())
    assert not KEYS.keys() & {key.rpartition(".")[2] for key in FIELDS}, (
        "our own names need no translation"
    )
    assert set(MAIN_FIELDS.values()) <= FIELDS.keys()
    for key, words in VALUES.items():
        assert {parse_value(FIELDS[key], value) for value in words.values()} <= set(
            FIELDS[key].choices
        )
        assert not words.keys() & set(FIELDS[key].choices)
    assert set(RECIPES.values()) <= PRESETS.keys() | {"shakespeare", "quickstart", "finetune"}
    assert not any(word == ours for word, ours in CHOICES.items())


@pytest.mark.parametrize("table", [nanogpt.TABLE, composer.TABLE])
def test_suggestions_agree_with_the_translators(table: dict[str, nanogpt.Row]) -> None:
    for names, row in table.items():
        for name in (
            names.split() if row.fields and names != "batch_size" else ()
        ):  # nanoGPT's is of one forward
            assert find_key(name)[0] in (*row.fields.split(), "optim.beta1"), (
                name
            )  # for betas.1, too
