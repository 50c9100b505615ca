"""Translates nanoGPT's words: `config/train_gpt2.py --batch_size=32`. Source: train.py and configurator.py of
karpathy/nanoGPT. Its configuration files are Python; they are parsed, never run.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatoken.config.load import LARGEST_BYTES, Assignment
from megatoken.config.presets import PRESETS, PUBLISHED
from megatoken.convert.recipes.translation import STEPS, Row, Translation, only, split_words
from megatoken.errors import ConfigError


def refuse_eval(value: bool) -> None:
    """Raise ValueError, whose text is the fix, for an evaluation in place of training."""
    if value:
        raise ValueError(
            "evaluate a model: megatoken eval openai-community/gpt2 --data data/openwebtext"
        )


TABLE: dict[str, Row] = {
    "out_dir": Row(str),  # its default, `out`, may hold a ckpt.pt already
    "eval_interval": Row(2000, "evaluate.every save.every", STEPS),
    "log_interval": Row(1, "log.every", STEPS),
    "eval_iters": Row(200),
    "eval_only": Row(False, convert=refuse_eval),
    "always_save_checkpoint": Row(True),
    "init_from": Row("scratch", convert=only("scratch", "resume", *PUBLISHED)),
    "dataset": Row("openwebtext"),
    "gradient_accumulation_steps": Row(40),
    "batch_size": Row(12, "machine.micro_batch"),
    "block_size": Row(1024, "model.seq_len"),
    "n_layer": Row(12, "model.n_layer"),
    "n_head": Row(12, "model.n_head"),
    "n_embd": Row(768, "model.d_model"),
    "dropout": Row(0.0, "model.dropout"),
    "bias": Row(False, "model.bias"),
    "learning_rate": Row(6e-4, "optim.lr"),
    "max_iters": Row(600000, "budget.steps"),
    "weight_decay": Row(0.1, "optim.weight_decay"),
    "beta1": Row(0.9, "optim.beta1"),
    "beta2": Row(0.95, "optim.beta2"),
    "grad_clip": Row(1.0, "optim.grad_clip"),
    "decay_lr": Row(True, "optim.schedule", {True: "cosine", False: "constant"}),
    "warmup_iters": Row(2000, "optim.warmup", STEPS),
    "lr_decay_iters": Row(600000),
    "min_lr": Row(6e-5),
    "device": Row(str, "machine.device"),
    "dtype": Row(
        str, "machine.precision", {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    ),
    "compile": Row(bool, "machine.compile", {True: "on", False: "off"}),
}
FIXED = {
    **{"seed": 1337, "model.mlp": "gelu-erf", "optim.eps": 1e-8},
    **{"save.keep_last": 1, "sample.every": "0steps"},  # one checkpoint, no samples
}
PROGRAM = "train.py"
IGNORED = "wandb_log wandb_project wandb_run_name backend"
NOTES = (
    "batches are drawn without replacement, each window once an epoch; nanoGPT draws random places",
    "nanoGPT takes one step more than max_iters, and its warm-up divides by one more than warmup_iters",
)


def translate_nanogpt(command: str) -> Translation:
    """The recipe of nanoGPT's `train.py` with these words behind it: files and --name=value, later ones win.
    The program may stand before them.

    Raises ConfigError naming file:line for what nanoGPT would refuse, and for what cannot be honoured here.
    """
    words = split_words(command, "--nanogpt")
    if program := [place for place, word in enumerate(words) if Path(word).name == PROGRAM]:
        words = words[program[0] + 1 :]  # behind python or torchrun
    files = [Path(word) for word in words if not word.startswith("--")]
    given = [setting for word in words for setting in _read(word)]
    translation = Translation("nanoGPT", TABLE, given, IGNORED, FIXED)
    get, where, assign = translation.get, translation.where, translation.set
    translation.name = f"nanogpt-{files[-1].stem if files else 'train'}"
    translation.out = Path(get("out_dir")) if get("out_dir") else None
    translation.notes += NOTES
    if get("init_from") == "resume":  # in nanoGPT's folder, unless a run of ours is there
        translation.out = translation.out or Path("out")
        if not (translation.out / "checkpoints").is_dir():
            what = f"{translation.out} holds no run to resume, and nanoGPT's optimizer state is not read"
            fix = f"take the weights alone: --init_from=scratch, and model.init={translation.out}/ckpt.pt behind it"
            raise ConfigError(what, where("init_from"), fix)
    if (name := get("init_from")) in PUBLISHED:
        assign("model.init", f"openai-community/{name}", where("init_from"))
        for field in ("n_layer", "n_head", "d_model"):
            assign(f"model.{field}", getattr(PRESETS[PUBLISHED[name]], field), where("init_from"))
        assign("model.mlp", "gelu", "OpenAI's weights")
        assign("model.bias", True, "OpenAI's weights")
        note = "OpenAI's weights go on with the tanh GELU they were trained with; nanoGPT computes the exact one"
        translation.notes.append(note)
    path = Path("data") / get("dataset")  # from nanoGPT's own folder
    if files and not path.is_dir() and (beside := files[-1].parent.parent / path).is_dir():
        path = beside
    assign("data.path", path, where("dataset"))
    if not get("decay_lr"):
        assign("optim.warmup", "0steps", where("decay_lr"))
    elif (decay := get("lr_decay_iters") - (warmup := get("warmup_iters"))) < 1:
        what = f"the rate decays until iteration {warmup + decay}, within the warm-up of {warmup}"
        longest = get("max_iters")
        fix = (
            f"add --lr_decay_iters={longest}"
            if longest > warmup
            else f"add --warmup_iters={(warmup + decay) // 10}"
        )
        raise ConfigError(what, where("lr_decay_iters", "warmup_iters"), fix)
    elif not get("learning_rate"):
        raise ConfigError("a rate of 0 trains nothing", where("learning_rate"), "give it a rate")
    else:
        ratio = round(get("min_lr") / get("learning_rate"), 12)
        assign("optim.min_lr_ratio", ratio, where("min_lr", "learning_rate"))
        if get("lr_decay_iters") != get(
            "max_iters"
        ):  # after which the rate stays, or which the run does not reach
            assign("optim.decay", f"{decay}steps", where("lr_decay_iters", "warmup_iters"))
    tokens, origin = get("batch_size") * get("block_size"), where("batch_size", "block_size")
    steps_origin = f"{where('gradient_accumulation_steps')}, {origin}"
    assign("budget.batch_tokens", get("gradient_accumulation_steps") * tokens, steps_origin)
    assign("evaluate.tokens", get("eval_iters") * tokens, f"{where('eval_iters')}, {origin}")
    if not get("always_save_checkpoint"):
        translation.notes.append(
            "the newest checkpoint is kept, whether or not its validation loss is the best so far"
        )
    return translation


def _read(word: str) -> Iterator[Assignment]:
    """The settings of a word: --name=value, or a configuration file. Its imports are skipped, nothing in it is run."""
    if word.startswith("--"):
        name, equals, text = word[2:].partition("=")
        if not equals:
            raise ConfigError(f"cannot read {word!r}", "--nanogpt", "write --name=value")
        yield Assignment(name, text.strip("'\""), f"nanoGPT {word:.80}")
        return
    try:
        with Path(word).open("rb") as file:
            text = file.read(LARGEST_BYTES).decode()
        body = ast.parse(text).body
    except OSError as error:
        raise ConfigError(
            f"cannot read it: {error.strerror}", word, "give nanoGPT's config file"
        ) from None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        where = f"{word}:{getattr(error, 'lineno', None) or 1}"
        raise ConfigError(f"not Python: {error}", where, "give nanoGPT's config file") from None
    for node in body:
        where = f"{word}:{node.lineno}"
        match node:
            case ast.Assign(targets=[ast.Name(name)], value=value):
                try:
                    yield Assignment(
                        name, "" if name in IGNORED.split() else str(_evaluate(value)), where
                    )
                except (ValueError, TypeError, OverflowError, RecursionError):
                    source = text.splitlines()[node.lineno - 1].strip()
                    what = f"{source:.200} would have to be computed by running the file"
                    raise ConfigError(what, where, "write the value out") from None
            case ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant()):
                pass
            case _:
                raise ConfigError(
                    "not an assignment",
                    where,
                    "a config file is read, never run: write name = value",
                )


def _evaluate(node: ast.expr) -> Any:
    """The value of a literal, or of a product of numbers, such as nanoGPT's own `5 * 8`; else raises ValueError."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return float(_evaluate(node.left)) * float(_evaluate(node.right))
    return ast.literal_eval(node)
