"""Resolve the recipe, preset or run that a command line names. No torch."""

import re
from argparse import ArgumentParser, Namespace
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatoken.base.config.load import (
    PREPARE,
    RUN_CONFIG,
    ResolvedConfig,
    find_run,
    list_recipes,
    read_recipe,
    render,
    resolve,
    resolve_preset,
    resolve_run,
)
from megatoken.base.config.model_config import ModelConfig
from megatoken.base.config.presets import GPT2_VOCABULARY, PRESETS
from megatoken.base.config.schema import FIELDS, Config
from megatoken.base.errors import CheckpointError, ConfigError
from megatoken.base.rooms import list_entries, load_entry
from megatoken.base.system.atomic_write import read_object
from megatoken.distributed.parallel_dims import ParallelDims, check_dims
from megatoken.store.commit import list_steps, step_folder
from megatoken.store.manifest import verify

RECIPE_HELP = f"YAML file, run folder, or a built-in recipe: {', '.join(list_recipes())}"
PRESET_HELP = f"recipe, or a preset: {', '.join(PRESETS)}"
# Options that replace RECIPE by the recipe of another program. A translator is a module with
# OPTION, the option's metavar and help, and `translate(text, processes)`.
TRANSLATED = tuple(list_entries("translator"))
NEED_WEIGHTS = ("finetune", "sft", "dpo", "kto", "reward", "grpo", "ppo")  # recipes


def add_recipe_arguments(parser: ArgumentParser, doc: str = RECIPE_HELP) -> None:
    """Add RECIPE, described by `doc`, and the options that replace it."""
    parser.set_defaults(nproc=1)  # --llmc divides the batch by it
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help=doc)
    for name in TRANSLATED:
        metavar, doc = load_entry("translator", name).OPTION
        parser.add_argument(f"--{name}", metavar=metavar, help=f"instead of RECIPE: {doc}")


def find_recipe(options: Namespace) -> tuple[ResolvedConfig, Path | None]:
    """Resolve the recipe that the command line names.

    Also returns the run folder if the command line names a run, else None.
    """
    names = [name for name in ("recipe", *TRANSLATED) if getattr(options, name) is not None]
    if len(names) != 1:
        fix = f"give one of {', --'.join(['RECIPE', *TRANSLATED])}"
        what = f"both {names[0]} and {names[1]} are given" if names else "no recipe given"
        raise ConfigError(what, "command line", fix)
    if options.recipe is not None:
        folder = find_run(options.recipe)
        if folder:
            return resolve_run(folder, find_run_config(folder), options.overrides), folder
        resolved = resolve(options.recipe, options.overrides)
        check_recipe(resolved.config)
        return resolved, None
    text = getattr(options, names[0])
    translation = load_entry("translator", names[0]).translate(text, options.nproc)
    resolved = translation.resolve(options.overrides)
    check_recipe(resolved.config)
    return replace(resolved, notes=(*translation.notes, *resolved.notes)), translation.out


def find_run_config(folder: Path) -> Path:
    """Return the path of a run's config.yaml.

    If that file is damaged or incomplete, return the copy in the newest valid checkpoint.
    """
    path = folder / RUN_CONFIG
    keys = set[str]()
    with suppress(ConfigError):
        keys = {assignment.key for assignment in read_recipe(path)}
    for step in reversed(list_steps(folder / "checkpoints")):
        copy = step_folder(folder / "checkpoints", step) / RUN_CONFIG
        with suppress(CheckpointError):
            verify(copy.parent, hashes=lambda name: name == RUN_CONFIG)
            is_complete = keys.issuperset(assignment.key for assignment in read_recipe(copy))
            return path if is_complete else copy
    return path


def check_recipe(config: Config) -> None:
    """Run those checks of `megatoken train` that need no data or device.

    Raises the errors that training would raise.
    """
    dims = ParallelDims(tp_size=config.machine.tensor_parallel)
    check_dims(dims, config.model.resolve(config.model.vocab_size))
    is_default = config.data.tokenizer == FIELDS["data.tokenizer"].default
    for name in [] if is_default else list_entries("tokenizer"):
        load_entry("tokenizer", name)(config.data.tokenizer)


def check_init(recipe: str, config: Config, out: Path) -> None:
    """Raise ConfigError if the recipe or LoRA needs initial weights and model.init is not set."""
    needs = recipe in NEED_WEIGHTS or config.model.lora_rank
    if needs and not config.model.init and not list_steps(out / "checkpoints"):
        raise ConfigError(f"{recipe} needs initial weights", "--init", "give --init RUN_OR_HF_DIR")


def render_with_notes(resolved: ResolvedConfig, *, given_only: bool = False) -> str:
    """Format a recipe as YAML, with its notes as comments. given_only: as in `render`."""
    notes = "".join(f"# {note}\n" for note in resolved.notes)
    return notes + render(resolved.config, resolved.origins, given_only=given_only)


def apply_options(options: Namespace, values: dict[str, tuple[str, Any]]) -> None:
    """Append to `options.overrides` the settings that shorthand options set.

    Raises ConfigError if the command line contains both an option and its setting.

    values: for each option, its setting and value; the value is None if the option is not given.
    """
    keys = [override.partition("=")[0] for override in options.overrides]
    for option, (key, value) in values.items():
        if value is None:
            continue
        if value == "" or key in keys:
            what = f"{option} is empty" if value == "" else f"both {option} and {key} are given"
            raise ConfigError(what, "command line", f"give one of {option} and {key}")
        options.overrides.append(f"{key}={value}")


def find_model(options: Namespace) -> tuple[ResolvedConfig, ModelConfig, bool]:
    """Resolve the recipe or, if no recipe has that name, the preset that the command line names.

    Also returns its model config with the vocabulary size filled in, and whether it is a recipe.
    """
    name = options.recipe
    is_recipe = name in list_recipes() or name not in PRESETS
    if is_recipe:
        resolved, _ = find_recipe(options)
    else:
        resolved = resolve_preset(name, options.overrides)
    if name and resolved.config.model.init:
        from megatoken.train.initial_state import copy_architecture

        resolved = copy_architecture(resolved, Path(name))
    return resolved, resolved.config.model.resolve(find_vocabulary(resolved.config)[0]), is_recipe


def find_vocabulary(config: Config) -> tuple[int, str]:
    """Return the vocabulary size for a config without model.vocab_size, and where it comes from.

    It comes from the first of these that is known: the dataset, if it is on this machine; the
    preset; the tokenizer in the recipe's `prepare` command; GPT-2.
    """
    manifest = read_object(Path(config.data.path) / "manifest.json")
    if "tokenizer" in manifest:
        return manifest["tokenizer"]["vocab_size"], f"that of {config.data.path}"
    if config.model.preset:
        return PRESETS[config.model.preset].vocab_size, "the preset's assumed"
    bpe = re.search(r"--tokenizer (bpe:(\d+))", PREPARE.get(config.data.path, ""))
    if bpe:
        return int(bpe[2]), f"{bpe[1]} assumed"
    return GPT2_VOCABULARY, "GPT-2's assumed"
