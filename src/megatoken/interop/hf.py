"""Weights of a Hugging Face folder or hub name, read into our model.

In: config.json and safetensors. Out: a GPT on the CPU in fp32, every weight of it read from the files or a Fault.
Deliberately absent: pickled weights (they can run code), writing (hf_export.py).
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatoken.errors import Exit, Fault
from megatoken.hardware import huggingface_cache
from megatoken.interop.hf_families import family_named
from megatoken.interop.hf_layout import Family, Place
from megatoken.interop.tensors import build_empty, check_numbers
from megatoken.model.gpt import GPT
from megatoken.presets import GPT2_VOCABULARY, Shape

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
HEAD = "lm_head.weight"
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def load_hf(name_or_folder: str) -> tuple[GPT, Path]:
    """The model of a local folder or of a hub name, and the local folder, which may hold a tokenizer too.

    The model is on the CPU in fp32, in training mode, without dropout. A hub name is looked for in the local cache
    and downloaded if it is not there (needs huggingface_hub).
    Raises Fault(CHECKPOINT) naming the file, and the tensors, when anything is missing, odd, or of no family we know.
    """
    folder = find_folder(name_or_folder)
    config = _read_json(folder / CONFIG)
    family = family_named(config, str(folder / CONFIG))
    shape = family.read(config, str(folder / CONFIG))
    tensors = _list_tensors(folder, family)
    wanted = family.list_places(shape)
    _check_tensors(tensors, wanted, folder)
    model = build_empty(shape)
    _fill(model, tensors, wanted)
    return model, folder


def hf_tokenizer_spec(folder: Path) -> str:
    """What load_tokenizer should be given for a Hugging Face folder: the folder itself, or "gpt2".

    Raises Fault(CHECKPOINT) when the folder holds no tokenizer and its vocabulary is not GPT-2's.
    """
    if (folder / "tokenizer.json").is_file():
        return str(folder)
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return str(folder)
    size = read_shape(folder).vocab_size
    if size == GPT2_VOCABULARY:
        return "gpt2"
    fix = "copy the model's tokenizer.json into the folder"
    raise Fault(Exit.CHECKPOINT, f"no tokenizer beside a model with {size} token ids", str(folder), fix)


def find_folder(name_or_folder: str) -> Path:
    """The local folder of a name: itself if it exists, else the hub's snapshot in the local cache."""
    folder = Path(name_or_folder)
    if folder.is_dir():
        return folder
    if folder.exists():
        fix = f"give the folder that holds {CONFIG} and {WEIGHTS}"
        raise Fault(Exit.CHECKPOINT, "not a folder", str(folder), fix)
    if not HUB_NAME.fullmatch(name_or_folder):
        fix = "give a run folder, a Hugging Face folder, or a hub name such as openai-community/gpt2"
        raise Fault(Exit.CHECKPOINT, "no such folder", name_or_folder, fix)
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        fix = "pip install huggingface_hub, or give a local folder"
        raise Fault(
            Exit.CHECKPOINT, "no such folder, and hub names need huggingface_hub", name_or_folder, fix
        ) from None
    patterns = ["*.json", "*.safetensors", "*.txt"]
    try:
        return Path(snapshot_download(name_or_folder, allow_patterns=patterns, cache_dir=huggingface_cache()))
    except Exception as error:  # whatever the network or the hub can raise: the answer is the same
        reason = str(error).strip().splitlines()[0].split(". ")[0] if str(error).strip() else type(error).__name__
        fix = "check the name and the connection, or give a folder written by save_pretrained"
        what = f"no such folder, and the hub did not give it: {reason}"
        raise Fault(Exit.CHECKPOINT, what, name_or_folder, fix) from error


def read_shape(folder: Path) -> Shape:
    """The sizes in config.json. Raises Fault(CHECKPOINT) for anything our GPT does not compute."""
    config = _read_json(folder / CONFIG)
    return family_named(config, str(folder / CONFIG)).read(config, str(folder / CONFIG))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        fix = "give a folder written by save_pretrained"
        raise Fault(Exit.CHECKPOINT, f"folder holds no {path.name}", str(path.parent), fix) from None
    except (OSError, ValueError) as error:
        raise Fault(Exit.CHECKPOINT, f"cannot read it: {error}", str(path), "copy or download it again") from error
    if not isinstance(content, dict):
        raise Fault(Exit.CHECKPOINT, "not a JSON object", str(path), "copy or download it again")
    return content


@dataclass(frozen=True, slots=True)
class _Held:
    """A tensor in a file: where it is and its sizes; read when asked for."""

    path: Path
    name: str
    sizes: tuple[int, ...]

    def read(self) -> Tensor:
        with safe_open(self.path, framework="pt") as file:
            return check_numbers(file.get_tensor(self.name), self.name, self.path)


def _list_tensors(folder: Path, family: Family) -> dict[str, _Held]:
    """Every tensor of the folder's files by its name with the family's prefix; buffers are left out."""
    tensors: dict[str, _Held] = {}
    for path in _find_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                listed = [(key, tuple(file.get_slice(key).get_shape())) for key in file.keys()]  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            what = f"cannot read the weights, the file is truncated or damaged: {error}"
            raise Fault(Exit.CHECKPOINT, what, str(path), "copy or download it again") from error
        for key, sizes in listed:
            name = key if key == HEAD else family.prefix + key.removeprefix(family.prefix)
            if name in tensors:
                raise Fault(Exit.CHECKPOINT, f"{key} is there twice", str(path), "save the model again")
            if not family.buffers.fullmatch(name):
                tensors[name] = _Held(path, key, sizes)
    return tensors


def _find_files(folder: Path) -> list[Path]:
    """The files of safetensors: one, or the shards that the index names."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        shards = _read_json(folder / INDEX).get("weight_map")
        names = sorted(set(map(str, shards.values()))) if isinstance(shards, dict) else []
        if not names or any(Path(name).name != name for name in names):
            what = "weight_map does not name the files of the folder"
            raise Fault(Exit.CHECKPOINT, what, str(folder / INDEX), "copy or download it again")
        if absent := [name for name in names if not (folder / name).is_file()]:
            fix = "copy or download it again"
            raise Fault(Exit.CHECKPOINT, f"weights file missing: {', '.join(absent)}", str(folder), fix)
        return [folder / name for name in names]
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    if pickles:
        what = f"{pickles[0]} is a pickle, which can run code when it is read, so it is never loaded"
        fix = f"convert it where you trust it: model.save_pretrained(folder, safe_serialization=True) writes {WEIGHTS}"
        raise Fault(Exit.CHECKPOINT, what, str(folder), fix)
    raise Fault(Exit.CHECKPOINT, f"folder holds no {WEIGHTS}", str(folder), "give a folder written by save_pretrained")


def _check_tensors(tensors: dict[str, _Held], wanted: dict[str, Place], folder: Path) -> None:
    """Names and sizes, before anything is read. The tied output layer may be saved as lm_head.weight once more."""
    problems = [f"{name} is missing" for name in wanted if name not in tensors]
    problems += [f"{name} is unexpected" for name in tensors if name not in wanted and name != HEAD]
    for name, held in tensors.items():
        if name in wanted and held.sizes != wanted[name].sizes:
            problems.append(f"{name} is {held.sizes}, config.json says {wanted[name].sizes}")
    if problems:
        more = f" and {len(problems) - 4} more" if len(problems) > 4 else ""
        what = f"weights do not fit {CONFIG}: {'; '.join(problems[:4])}{more}"
        raise Fault(Exit.CHECKPOINT, what, str(folder), "give the folder that save_pretrained wrote")


@torch.no_grad()
def _fill(model: GPT, tensors: dict[str, _Held], wanted: dict[str, Place]) -> None:
    """Copy every tensor to its place."""
    parameters = dict(model.named_parameters())
    assert {place.ours for place in wanted.values()} == set(parameters), "a weight would stay unfilled"
    for name, place in wanted.items():
        place.put(tensors[name].read(), parameters)
    head = tensors.get(HEAD)
    tied = model.tokens.weight[: model.shape.vocab_size]
    if model.head is None and head is not None and not torch.equal(head.read().float(), tied):
        what = f"{HEAD} differs from the token embedding, which {CONFIG} says it is"
        fix = f"set tie_word_embeddings to false in {CONFIG} if the output layer has weights of its own"
        raise Fault(Exit.CHECKPOINT, what, str(head.path), fix)
