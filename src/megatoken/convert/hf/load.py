"""Loads GPT-2, LLaMA and Qwen3 from a Hugging Face folder or hub name. Weights are read from safetensors only."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from megatoken.config.load import list_recipes, list_runs
from megatoken.config.model_config import ModelConfig
from megatoken.config.presets import PUBLISHED
from megatoken.convert.fill_model import AGAIN, HEAD, fill_model
from megatoken.convert.hf.families import Family, find_family
from megatoken.data.shard_format import MANIFEST_NAME
from megatoken.data.sources import IN_FOLDERS
from megatoken.errors import CheckpointError
from megatoken.model.gpt import GPT
from megatoken.suggest import suggest
from megatoken.system.atomic_write import MALFORMED, read_json
from megatoken.system.environment import huggingface_cache
from megatoken.system.object_store import is_address

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
SAVE_PRETRAINED = "give a folder written by save_pretrained"


def load_hf(name_or_folder: str) -> tuple[GPT, Path]:
    """The model of a local folder or hub name, and the local folder, which may hold a tokenizer too.

    The model is on the CPU in fp32, in training mode, without dropout. A hub name is taken from the local cache, or
    downloaded (needs huggingface_hub). Raises CheckpointError naming the file, and the tensors, when anything is
    missing, wrong, or of an unsupported family.
    """
    folder = find_folder(name_or_folder)
    family, config = read_family(folder)
    tensors = {}
    for key, file in open_tensors(folder):
        name = key if key == HEAD else family.prefix + key.removeprefix(family.prefix)
        if not family.buffers.fullmatch(name):
            tensors[name] = file.get_tensor(key)  # memory-mapped
    return fill_model(config, tensors, family.view_params, str(folder)), folder


def read_family(folder: Path) -> tuple[Family, ModelConfig]:
    """Read the family and the architecture of a folder's config.json. Raises as `load_hf`."""
    _refuse_data(folder)
    where = str(folder / CONFIG)
    try:
        config = read_json(folder / CONFIG)
        family = find_family(config, where)
    except FileNotFoundError:
        what = f"no model here: neither checkpoints of a run nor a {CONFIG}"
        raise CheckpointError(
            what, str(folder), "name a run folder, or one written by save_pretrained"
        ) from None
    except (OSError, *MALFORMED) as error:
        raise CheckpointError(f"cannot read {CONFIG}: {error}", where, SAVE_PRETRAINED) from None
    return family, family.read_config(config, where)


def find_folder(name_or_folder: str) -> Path:
    """The local folder of a name: itself if it exists, else the snapshot of a hub name in the local cache."""
    folder = Path(name_or_folder)
    if folder.is_dir():
        return folder
    refuse_missing_path(name_or_folder)
    patterns = ["*.json", "*.safetensors", "*.txt"]
    try:
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(
                name_or_folder, allow_patterns=patterns, cache_dir=huggingface_cache()
            )
        )
    except (
        Exception
    ) as error:  # the network and the hub raise many types; or huggingface_hub is not installed
        reason = re.split(r"\.? An error|\. |\n", str(error))[0].removeprefix("Got: ")
        what = f"no such folder here, and no download from the hub: {reason}"
        fix = "check the name, or the connection (pip install megatoken[hf])"
        if "/" not in name_or_folder and name_or_folder not in PUBLISHED:
            what = (
                f"neither a folder here nor a model that is known by this name; the hub: {reason}"
            )
            fix = f"{suggest_model(name_or_folder)} others are OWNER/NAME on the hub"
        raise CheckpointError(what, name_or_folder, fix) from error


def _refuse_data(folder: Path) -> None:
    """Raise CheckpointError for a folder without a model that holds a dataset or text."""
    if (folder / CONFIG).is_file():
        return
    if (folder / MANIFEST_NAME).is_file():
        fix = f"train one on it: megatoken train RECIPE {shlex.quote(f'data.path={folder}')}"
        raise CheckpointError("a dataset, not a model", str(folder), fix)
    if runs := list_runs(folder):
        raise CheckpointError(
            "a folder of runs, not a model", str(folder), f"name one: {', '.join(runs[:5])}"
        )
    suffixes = {path.suffix for path in folder.iterdir()}
    if suffixes.intersection(IN_FOLDERS) and not suffixes & {".json", ".safetensors"}:
        fix = f"train one on it: megatoken quickstart --data {shlex.quote(str(folder))}"
        raise CheckpointError("text, not a model", str(folder), fix)


def suggest_model(name: str) -> str:
    """The folder here or in runs/, or the published model, that is most like a name; what is published."""
    known = {each: each for each in PUBLISHED} | {recipe: hub for hub, recipe in PUBLISHED.items()}
    folders = [folder for folder in (Path(), Path("runs")) if folder.is_dir()]
    known |= {
        path.name: str(path) for folder in folders for path in folder.iterdir() if path.is_dir()
    }
    near = known.get(suggest(name, known) or "")
    return f"did you mean {near}?" if near else f"known: {', '.join(PUBLISHED)};"


def refuse_missing_path(name: str) -> None:
    """Raise CheckpointError for what is not there and no hub name: in a folder that is here, in runs/, a recipe."""
    if name in list_recipes() and not Path(name).exists():
        fix = f"train it: megatoken train {name}, and give runs/{name}"
        hub = next((hub for hub, recipe in PUBLISHED.items() if recipe == name), "")
        fix += f"; OpenAI's weights are openai-community/{hub}" if hub else ""
        raise CheckpointError("a recipe, not a model", name, fix)
    path, parent = Path(name), Path(name).parent
    if (
        is_address(name)
        or path.exists()
        or (
            HUB_NAME.fullmatch(name)
            and parent.name != "runs"
            and not (parent.name and parent.is_dir())
        )
    ):
        return
    near = suggest(
        path.name, sorted(other.name for other in parent.iterdir()) if parent.is_dir() else []
    )
    known = "a run folder, a Hugging Face folder, or a hub name such as openai-community/gpt2"
    raise CheckpointError(
        "no such folder", name, f"did you mean {parent / near}?" if near else f"give {known}"
    )


def open_tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield each tensor's name and the open file that holds it: what the index names, else all of model.safetensors.

    Raises CheckpointError for a folder without weights and for a file that is missing or damaged.
    """
    names: dict[Path, set[str]] = {}
    try:
        for name, shard in read_json(folder / INDEX)["weight_map"].items():
            names.setdefault(folder / shard, set()).add(name)
    except FileNotFoundError:
        names[folder / WEIGHTS] = set()
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
        if not (folder / WEIGHTS).is_file() and pickles:
            what = f"{pickles[0]} is a pickle, which can run code when it is read, so it is never loaded"
            fix = "convert it where you trust it: model.save_pretrained(folder, safe_serialization=True)"
            raise CheckpointError(what, str(folder), fix) from None
        if not (folder / WEIGHTS).is_file():
            raise CheckpointError(
                f"folder holds no {WEIGHTS}, nor {INDEX}", str(folder), SAVE_PRETRAINED
            ) from None
    except (OSError, *MALFORMED) as error:
        raise CheckpointError(
            f"cannot read the index: {error}", str(folder / INDEX), AGAIN
        ) from None
    for path, wanted in names.items():
        try:
            file: Any = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            what = f"cannot read the weights, the file is truncated or damaged: {error}"
            raise CheckpointError(what, str(path), AGAIN) from error
        for name in file.keys():  # noqa: SIM118  # it is no mapping
            if not wanted or name in wanted:
                yield name, file
