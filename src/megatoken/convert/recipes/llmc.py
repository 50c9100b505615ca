"""Translates llm.c's command line: `-e d12 -b 64 -t 1024 -d 524288 ...`. Source: train_gpt2.cu of karpathy/llm.c."""

import re
from fnmatch import fnmatch
from os.path import commonprefix
from pathlib import Path

from megatoken.config.load import Assignment
from megatoken.convert.recipes.translation import STEPS, Row, Translation, only, split_words
from megatoken.data.shard_format import MANIFEST_NAME
from megatoken.errors import ConfigError

PROGRAMS = ("train_gpt2cu", "train_gpt2fp32cu", "train_gpt2")
SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant", "wsd": "wsd-sqrt"}


def keep_outliers(z_score: float) -> None:
    """Raise ValueError, whose text is the fix, for a limit above which steps are skipped."""
    if z_score:
        raise ValueError(
            "leave it out; optim.spike=skip behind the command skips spikes by a rule of its own"
        )


FLAGS: dict[str, Row] = {
    "-i": Row("dev/data/tinyshakespeare/tiny_shakespeare_train.bin"),  # training shards
    "-j": Row("dev/data/tinyshakespeare/tiny_shakespeare_val.bin"),  # validation shards
    "-e": Row("gpt2_124M_bf16.bin"),  # model: d12, gpt3:c768 or a checkpoint
    "-o": Row(""),  # output folder
    "-n": Row(0, "save.every save.keep_every", STEPS),  # steps between checkpoints
    "-nk": Row(0),  # checkpoints to keep, 0: all
    "-nm": Row(0),  # steps between checkpoints that are never removed
    "-b": Row(4, "machine.micro_batch"),  # sequences per forward
    "-t": Row(1024, "model.seq_len"),  # sequence length
    "-d": Row(-1),  # tokens in a step
    "-x": Row(-1),  # steps, -1: one epoch
    "-k": Row("cosine", "optim.schedule", SCHEDULES),  # learning-rate schedule
    "-l": Row(3e-4, "optim.lr"),  # learning rate
    "-u": Row(0, "optim.warmup", STEPS),  # warm-up steps
    "-q": Row(1.0, "optim.min_lr_ratio"),  # last learning rate as a share of the peak
    "-c": Row(0.0, "optim.weight_decay"),  # weight decay
    "-sl": Row(0.0, convert=keep_outliers),  # skip updates of outlying loss: not done here
    "-sg": Row(0.0, convert=keep_outliers),  # skip updates of outlying gradient norm
    "-v": Row(20, "evaluate.every", STEPS),  # steps between validations
    "-m": Row(20),  # batches of a validation, -1: all
    "-s": Row(20, "sample.every", STEPS),  # steps between samples
    "-g": Row(
        64, "sample.tokens", lambda n: max(n - 1, 1)
    ),  # length of a sample, whose first is <|endoftext|>
    "-h": Row(0),  # HellaSwag
    "-a": Row(0, "data.order", {0: "shuffled", 1: "one-batch"}),  # overfit one batch
    "-f": Row(1, "machine.tf32", bool),  # TF32
    "-w": Row(1, convert=only(1)),  # fp32 master weights, which are always kept here
    "-z": Row(
        int, "machine.sharding", dict(enumerate(("none", "zero1", "zero2", "zero3")))
    ),  # ZeRO stage
    "-r": Row(
        1, "machine.activation_checkpointing", {0: "none", 1: "gelu", 2: "gelu"}
    ),  # recompute GELU, 2: norms too
    "-pn": Row(1),  # processes
}
FIXED = {
    **{"optim.beta1": 0.9, "optim.beta2": 0.95, "optim.eps": 1e-8, "optim.grad_clip": 1.0},
    **{"sample.temperature": 1, "sample.top_k": 0},
}
IGNORED = "-y -ge -lg -pr -pg -pm -pi -ps -pp -pf"  # resume, fusion, how ranks meet
PUBLISHED = {
    **{"d12": "gpt2-124m", "d24": "gpt2-355m", "d36": "gpt2-774m", "d48": "gpt2-1558m"},
    **{
        "gpt3:c768": "gpt3-125m",
        "gpt3:c1024": "gpt3-350m",
        "gpt3:c1536": "gpt3-760m",
        "gpt3:c2048": "gpt3-1.3b",
    },
    **{"gpt3:c2560": "gpt3-2.7b", "gpt3:c4096": "gpt3-6.7b", "gpt3:c12288": "gpt3-175b"},
}
OTHERS = {  # layers, heads, width
    **{"d6": (6, 6, 384), "d60": (60, 30, 1920), "d72": (72, 30, 2880), "d84": (84, 36, 3456)},
    "gpt3:c384": (6, 6, 384),
}


def translate_llmc(command: str, processes: int = 1) -> Translation:
    """The recipe of a train_gpt2cu command, with or without the program and its mpirun before the flags.

    processes: of the run, unless the command names more; llm.c's validation and default batch are per process.
    Raises ConfigError in one line for what llm.c would refuse, and for what cannot be honoured here.
    """
    given, launched = _read_command(command)
    translation = Translation("llm.c", FLAGS, given, IGNORED, FIXED)
    get, where, assign = translation.get, translation.where, translation.set
    translation.name = f"llmc-{Path(get('-e')).stem.replace(':', '-')}"
    translation.out = Path(get("-o")) if get("-o") else None
    _translate_model(translation)
    _translate_data(translation)
    if get("-k") == "constant":
        assign("optim.warmup", "0steps", "llm.c: -k constant has no warm-up")
    if get("-k") == "wsd":
        assign("optim.decay", "0.2dur", "llm.c: -k wsd decays in the last fifth")
    if (named := launched or get("-pn")) > 1:
        processes = named
    per_forward = get("-b") * get("-t") * processes
    if per_forward <= 0:
        raise ConfigError("a batch needs sequences and tokens", where("-b", "-t"), "give both")
    batch_tokens = per_forward if get("-d") == -1 else get("-d")
    if batch_tokens % per_forward:
        what = f"{batch_tokens} tokens a step are not a multiple of {per_forward}: -b x -t x {processes} processes"
        raise ConfigError(
            what,
            where("-d", "-b", "-t"),
            f"set -d {max(batch_tokens // per_forward, 1) * per_forward}",
        )
    assign("budget.batch_tokens", batch_tokens, where("-d"))
    if get("-x") == -1:
        assign("budget.epochs", 1, where("-x"))
    else:
        assign("budget.steps", get("-x"), where("-x"))
    if get("-m") == -1:
        assign("evaluate.tokens", "1T", where("-m"))
    else:
        assign(
            "evaluate.tokens",
            get("-m") * per_forward,
            f"{where('-m')}: x -b x -t x {processes} processes",
        )
    if get("-h"):
        assign("evaluate.tasks", "hellaswag", where("-h"))
        assign("evaluate.tasks_every", STEPS(get("-v")), where("-v"))
    if get("-nk"):  # 0 keeps all
        assign("save.keep_last", get("-nk"), where("-nk"))
        assign("save.keep_every", STEPS(get("-nm")), where("-nm"))
    if get("-r") == 2:
        translation.notes.append(
            "norms are not recomputed in the backward, only GELU is: more memory, same numbers"
        )
    return translation


def _read_command(command: str) -> tuple[list[Assignment], int]:
    """The flags, and the number of processes in a launcher before the program, else 0."""
    words, launcher = split_words(command, "--llmc"), ""
    if any(Path(word).name == "train_gpt2.py" for word in words):
        fix = "give the words of train_gpt2cu, or train gpt2-124m, the recipe of both"
        raise ConfigError(
            "these are words of llm.c's train_gpt2.py, whose names are others", "--llmc", fix
        )
    if program := [place for place, word in enumerate(words) if Path(word).name in PROGRAMS]:
        launcher, words = " ".join(words[: program[0]]), words[program[0] + 1 :]
    if len(words) % 2:
        raise ConfigError(f"{words[-1]} has no value", "--llmc", "flags and values come in pairs")
    count = re.search(r"-np? (\d+)", launcher)
    if count and len(count[1]) > 6:
        raise ConfigError(f"{count[0]:.40} is no number of processes", "--llmc", "correct it")
    flags = [
        Assignment(*pair, f"llm.c {' '.join(pair):.80}")
        for pair in zip(words[::2], words[1::2], strict=True)
    ]
    return flags, int(count[1]) if count else 0


def _translate_model(translation: Translation) -> None:
    name, where = translation.get("-e"), translation.where("-e")
    short = name.removeprefix("gpt2:")
    sizes, context = OTHERS.get(short, ()), 2048 if short.startswith("gpt3") else 1024
    if short in PUBLISHED:
        translation.set("model.preset", PUBLISHED[short], where)
    elif name.endswith(".bin"):
        from megatoken.convert.llmc import read_header

        config = read_header(Path(name))[0]
        translation.set("model.init", name, where)
        sizes, context = (config.n_layer, config.n_head, config.d_model), config.seq_len
    elif not sizes:
        known = f"{' '.join(PUBLISHED)} {' '.join(OTHERS)}, or a .bin file"
        raise ConfigError(f"no model called {name!r:.80}", where, f"known: {known}")
    for field, size in zip(("n_layer", "n_head", "d_model"), sizes, strict=False):
        translation.set(f"model.{field}", size, where)
    if (length := translation.get("-t")) > context:
        what = f"sequences of {length} tokens for a model of {context} positions"
        raise ConfigError(what, translation.where("-t"), f"set -t {context} or less")
    if length < context:
        translation.notes.append(
            f"positions from {length} on, which llm.c keeps and never trains, do not exist here"
        )


def _translate_data(translation: Translation) -> None:
    """One folder, or one pattern, with both splits: `val` in a shard's name marks validation here."""
    train, val, where = (
        Path(translation.get("-i")),
        Path(translation.get("-j")),
        translation.where("-i", "-j"),
    )
    path = train.parent
    if val.parent != path:
        fix = f"link the validation shards into {path}"
        raise ConfigError("training and validation shards lie in two folders", where, fix)
    if "val" in train.name or "val" not in val.name:
        what = f"the names {train.name} and {val.name} do not show their splits"
        raise ConfigError(what, where, "name validation shards with `val` in it, and no others")
    if not (
        path / MANIFEST_NAME
    ).exists():  # llm.c's own shards: exactly the files that the two patterns name
        path /= f"{commonprefix([train.name, val.name])}*.bin"  # noqa: RUF071
        for file in sorted(path.parent.glob(path.name)):
            if not fnmatch(file.name, train.name) and not fnmatch(file.name, val.name):
                fix = "give the shards of a run a folder of their own"
                raise ConfigError(f"{path} would match {file.name}, too", where, fix)
    translation.set("data.path", path, where)
    translation.notes.append(
        "data comes in another order: a shuffle of all windows instead of one within shards"
    )
