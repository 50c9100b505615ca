"""Load a model from a Hugging Face folder or hub name; reads safetensors only."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from megatoken.base.config.model_config import ModelConfig
from megatoken.base.errors import CheckpointError
from megatoken.base.system.address import is_address
from megatoken.base.system.atomic_write import MALFORMED, read_json
from megatoken.base.system.environment import huggingface_cache
from megatoken.convert.fill_model import AGAIN, HEAD, fill_model
from megatoken.convert.hf.families import FAMILIES, FIX, Family
from megatoken.model.gpt import GPT

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
NAMES = "give a run folder, a Hugging Face folder, or a hub name such as openai-community/gpt2"
SAVE_PRETRAINED = "write it with save_pretrained(folder, safe_serialization=True)"


def load_hf(name_or_folder: str) -> tuple[GPT, Path]:
    """Load a model from a local folder or the Hugging Face hub; return (model, local folder).

    The model is on the CPU in fp32, in training mode, without dropout. A hub name is looked up in
    the local cache before it is downloaded. Raises CheckpointError for a model that is missing,
    damaged or unsupported.
    """
    folder = find_folder(name_or_folder)
    family, config = read_family(folder)
    tensors = {}
    for key, file in open_tensors(folder):
        name = key if key == HEAD else family.prefix + key.removeprefix(family.prefix)
        if not re.fullmatch(family.buffers, name):
            offset = family.get_norm_offset(name)
            tensor = file.get_tensor(key)  # memory-mapped
            tensors[name] = tensor.float() + offset if offset else tensor
    return fill_model(config, tensors, family.view_params, str(folder)), folder


def read_family(folder: Path) -> tuple[Family, ModelConfig]:
    """Return the family and the architecture that a folder's config.json describes.

    Raises CheckpointError if the file is missing, damaged or unsupported.
    """
    path = folder / CONFIG
    try:
        config = read_json(path)
        family = FAMILIES.get(config["model_type"])
        if family is None:
            what = f"model_type {config['model_type']!r:.80} is not supported"
            raise CheckpointError(what, path, FIX)
        return family, family.read_config(config, str(path))
    except FileNotFoundError:
        what = f"no model here: neither a run's checkpoints nor {CONFIG}"
        raise CheckpointError(what, folder, NAMES) from None
    except (OSError, *MALFORMED) as error:
        raise CheckpointError(f"cannot read {CONFIG}: {error}", path, SAVE_PRETRAINED) from None


def find_folder(name_or_folder: str) -> Path:
    """Return the path of a local folder, or of the downloaded snapshot of a hub name.

    Raises CheckpointError if there is neither.
    """
    folder = Path(name_or_folder)
    if folder.is_dir():
        return folder
    refuse_missing_path(name_or_folder)
    try:
        from huggingface_hub import snapshot_download

        snapshot = snapshot_download(
            name_or_folder,
            allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"],
            cache_dir=huggingface_cache(),
        )
    except Exception as error:  # network and hub errors have many types
        reason = str(error).partition("\n")[0]
        what = f"no such folder, and no download from the Hugging Face hub: {reason}"
        raise CheckpointError(what, name_or_folder, "check the name and the connection") from error
    return Path(snapshot)


def refuse_missing_path(name: str) -> None:
    """Raise CheckpointError if the name is a local path that does not exist.

    Addresses and hub names pass. A missing FOLDER/NAME looks like a hub name, but counts as a path
    if FOLDER exists or is `runs`.
    """
    path = Path(name)
    is_local = path.parent.name == "runs" or (path.parent.name and path.parent.is_dir())
    if is_address(name) or path.exists() or (HUB_NAME.fullmatch(name) and not is_local):
        return
    raise CheckpointError("no such folder", name, NAMES)


def open_tensors(folder: Path, weights: str = WEIGHTS) -> Iterator[tuple[str, Any]]:
    """Yield each tensor's name and the open file that holds it.

    Reads the tensors that the index lists or, without an index, all tensors of the file `weights`.
    Raises CheckpointError for missing or damaged files.
    """
    names: dict[Path, set[str]] = {}
    try:
        for name, shard in read_json(folder / INDEX)["weight_map"].items():
            names.setdefault(folder / shard, set()).add(name)
    except FileNotFoundError:
        names[folder / weights] = set()
    except (OSError, *MALFORMED) as error:
        raise CheckpointError(f"cannot read: {error}", folder / INDEX, AGAIN) from None
    for path, selected in names.items():
        try:
            file: Any = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            what = f"cannot read weights (pickles are never loaded): {error}"
            raise CheckpointError(what, path, SAVE_PRETRAINED) from error
        for name in file.keys():  # noqa: SIM118  # not a mapping
            if not selected or name in selected:
                yield name, file
