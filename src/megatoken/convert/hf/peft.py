"""Read and write LoRA adapters in PEFT's format: adapter_config.json, adapter_model.safetensors."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatoken.base.errors import CheckpointError, ConfigError
from megatoken.base.system.atomic_write import read_object
from megatoken.base.system.table import read_table
from megatoken.convert.fill_model import AGAIN
from megatoken.convert.hf.export import DTYPES
from megatoken.convert.hf.families import choose_family
from megatoken.convert.hf.load import open_tensors
from megatoken.model.gpt import GPT

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
BASE = "base_model_name_or_path"
PREFIX = "base_model.model."
DEFAULT_ALPHA = 8
TABLE = read_table(__file__)
MERGE = "merge it into its base with PEFT's merge_and_unload"


def read_base(folder: Path) -> str:
    """Return the name of the model that an adapter folder extends, or "" for any other folder.

    Raises CheckpointError, naming the field, for an adapter that is not plain LoRA.
    """
    path = folder / CONFIG
    if not path.is_file():
        return ""
    config = {BASE: None} | read_object(path)
    wrong = [
        key
        for key, value in config.items()
        if value and key not in TABLE["ignored"] and value not in TABLE["plain"].get(key, ())
    ]
    for key in wrong if config[BASE] else [BASE]:
        what = f"{key}: {config[key]!r:.80} is not supported"
        raise CheckpointError(what, path, MERGE if config[BASE] else "name its base")
    return str(config[BASE])


def merge_peft(model: GPT, folder: Path) -> None:
    """Add the adapter in a folder to the weights of its base model.

    Raises CheckpointError for tensors that are damaged or do not fit.
    """
    path = folder / WEIGHTS
    alpha = read_object(folder / CONFIG).get("lora_alpha", DEFAULT_ALPHA)
    if not isinstance(alpha, int | float):
        raise CheckpointError(f"lora_alpha is {alpha!r:.80}", folder / CONFIG, "write a number")
    family = replace(choose_family(model.config), conv1d=())
    tensors = {
        key.removeprefix(PREFIX): file.get_tensor(key).float()
        for key, file in open_tensors(folder, WEIGHTS)
    }
    if not tensors:
        raise CheckpointError("no tensors", path, "save it with gathered parameters (ZeRO-3)")
    views = family.view_params(dict(model.named_parameters()), model.config)
    try:
        while tensors:
            module = next(iter(tensors)).partition(".lora_")[0]
            a, b = (tensors.pop(f"{module}.lora_{side}.weight") for side in "AB")
            if not torch.isfinite(b @ a).all():
                raise CheckpointError(f"{module}: numbers that are not finite", path, AGAIN)
            views[f"{module}.weight"] += alpha / len(a) * (b @ a)
    except (KeyError, RuntimeError) as error:
        what, fix = f"tensors do not fit the base model: {error}", AGAIN
        if not re.search(r"\.\d+\.", module):
            what, fix = f"adapters of the embedding are not supported: {module}", MERGE
        raise CheckpointError(what, path, fix) from None


def write_peft(folder: Path, model: GPT, dtype: str) -> None:
    """Write a model's adapters for its base, `model.config.init`.

    GPT-2's packed queries, keys and values get one adapter of three times the rank; as PEFT divides
    by the rank, B is three times as large. Raises ConfigError for a model without adapters, or an
    architecture that transformers lacks.
    """
    config = model.config
    rank = config.lora_rank
    if not rank:
        fix = "export a run trained with model.lora_rank, or use --to hf"
        raise ConfigError("the model has no LoRA adapters", "--to peft", fix)
    family = choose_family(replace(config, lora_rank=0, lora_alpha=0.0))
    modules = dict(model.named_modules())
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}  # by kind of module
    for hf_module, our_module in family.modules.items():
        name, _, part = our_module.partition("/")
        for layer in range(config.n_layer):
            adapter: Any = modules.get(f"{name.format(layer)}.lora")  # posttrain/lora.py
            if adapter is None:
                continue
            pair: Any = adapter.a, adapter.up * len(adapter.outputs)
            if part:
                index = "qkv".index(part)
                pair = (
                    torch.split(adapter.a, rank)[index],
                    torch.split(adapter.b, adapter.outputs)[index],
                )
            for side, tensor in zip("AB", pair, strict=True):
                key = f"{PREFIX}{hf_module.format(layer)}.lora_{side}.weight"
                tensors[key] = tensor.detach().to(DTYPES[dtype]).clone()
            ranks[hf_module.rpartition(".")[2]] = len(pair[0])
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        BASE: config.init,
        "r": rank,
        "lora_alpha": config.lora_alpha or 2 * rank,
        "target_modules": list(ranks),
        "rank_pattern": {name: size for name, size in ranks.items() if size != rank},
        "fan_in_fan_out": bool(family.conv1d),
    }
    (folder / CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
