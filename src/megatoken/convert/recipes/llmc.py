"""Translate llm.c's command line: `-e d12 -b 64 -t 1024 -d 524288 ...`.

Source: train_gpt2.cu of karpathy/llm.c.
"""

import re
from fnmatch import fnmatch
from os.path import commonprefix
from pathlib import Path
from typing import Any

from megatoken.base.config.load import Assignment
from megatoken.base.errors import ConfigError
from megatoken.base.system.table import read_table
from megatoken.convert.recipes.translation import STEPS, Translation, split_arguments, split_program

OPTION = "FLAGS", "flags of llm.c's train_gpt2cu, in quotes"
TABLE = read_table(__file__)
PROGRAMS = ("train_gpt2cu", "train_gpt2fp32cu", "train_gpt2")


def translate(command: str, processes: int = 1) -> Translation:
    """Translate a train_gpt2cu command; the program's name and mpirun may be left out.

    processes: the number of processes, if the command does not give it. llm.c's default batch size
    and validation tokens depend on it. Raises ConfigError for what cannot be translated.
    """
    settings, launched = _read_command(command)
    translation = Translation("llm.c", TABLE, settings)
    get = translation.get
    translation.name = f"llmc-{Path(get('-e')).stem.replace(':', '-')}"
    _set_model(translation, TABLE["models"])
    _set_data(translation)
    named = launched or get("-pn")
    _set_budget(translation, named if named > 1 else processes)
    translation.set("sample.tokens", max(get("-g") - 1, 1), "-g")  # without <|endoftext|>
    if get("-nk"):
        translation.set("save.keep_last", get("-nk"), "-nk")
        translation.set("save.keep_every", STEPS(get("-nm")), "-nm")
    return translation


def _read_command(command: str) -> tuple[list[Assignment], int]:
    """Return the flags, and the number of processes that mpirun starts, or 0 if not given."""
    arguments = split_arguments(command, "--llmc")
    launcher, arguments = split_program(arguments, *PROGRAMS)
    if len(arguments) % 2:
        raise ConfigError(f"{arguments[-1]:.80} has no value", "--llmc")
    pairs = zip(arguments[::2], arguments[1::2], strict=True)
    settings = [Assignment(flag, text, f"llm.c {flag} {text}"[:86]) for flag, text in pairs]
    count = re.search(r"-np? (\d{1,6})\b", " ".join(launcher))
    return settings, int(count[1]) if count else 0


def _set_model(translation: Translation, models: dict[str, dict[str, Any]]) -> None:
    """Set the fields of the model that -e names. models: those of the built-in ones."""
    name = translation.get("-e")
    short = name.removeprefix("gpt2:")
    context = 2048 if short.startswith("gpt3") else 1024
    if name.endswith(".bin"):
        from megatoken.convert.llmc import read_header

        config = read_header(Path(name))[0]
        sizes = {f"model.{key}": getattr(config, key) for key in ("n_layer", "n_head", "d_model")}
        models = {short: {"model.init": name, **sizes}}
        context = config.seq_len
    if short not in models:
        fix = f"use one of {' '.join(models)}, or a .bin file"
        raise ConfigError(f"no model named {name!r:.80}", translation.where("-e"), fix)
    for field, value in models[short].items():
        translation.set(field, value, "-e")
    length = translation.get("-t")
    if length > context:
        what = f"-t {length} exceeds the model's context of {context}"
        raise ConfigError(what, translation.where("-t"))
    if length < context:
        note = f"the model has no positions from {length} on; llm.c keeps them untrained"
        translation.notes.append(note)


def _set_budget(translation: Translation, processes: int) -> None:
    get = translation.get
    per_forward = get("-b") * get("-t") * processes
    batch_tokens = per_forward if get("-d") == -1 else get("-d")
    if per_forward <= 0 or batch_tokens % per_forward:
        what = f"-d {batch_tokens} is not a multiple of -b x -t x processes = {per_forward}"
        raise ConfigError(what, translation.where("-d", "-b", "-t"))
    translation.set("budget.batch_tokens", batch_tokens, "-d")
    if get("-x") == -1:
        translation.set("budget.epochs", 1, "-x")
    else:
        translation.set("budget.steps", get("-x"), "-x")
    val_tokens = "1T" if get("-m") == -1 else get("-m") * per_forward
    translation.set("evaluate.tokens", val_tokens, "-m", "-b", "-t")


def _set_data(translation: Translation) -> None:
    """Set data.path to a prepared folder, or to a glob pattern for the shards of both splits."""
    train = Path(translation.get("-i"))
    val = Path(translation.get("-j"))
    path = train.parent
    if val.parent != path or "val" in train.name or "val" not in val.name:
        what = "cannot distinguish training and validation shards by name"
        fix = "put both into one folder, with `val` in the names of validation shards only"
        raise ConfigError(what, translation.where("-i", "-j"), fix)
    if not (path / "manifest.json").exists():
        path /= f"{commonprefix([train.name, val.name])}*.bin"  # noqa: RUF071
        for file in sorted(path.parent.glob(path.name)):
            if not fnmatch(file.name, train.name) and not fnmatch(file.name, val.name):
                what = f"{path} also matches {file.name}"
                raise ConfigError(what, translation.where("-i", "-j"), "move it elsewhere")
    translation.set("data.path", path, "-i", "-j")
