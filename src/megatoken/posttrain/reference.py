"""Tensors from the reference model of DPO or of the KL penalty, made once when a run starts.

The reference model is the one that the run starts from. RUN/reference holds the tensors, their hash
and the hash of the weights. A resumed run loads the tensors; if they are lost, it makes them again
from `model.init`, provided that the weights there are unchanged.
"""

import copy
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import xxhash
from torch import Tensor

from megatoken.base.errors import CheckpointError
from megatoken.base.system.atomic_write import read_object, replace_file, storage_errors
from megatoken.model.gpt import GPT
from megatoken.posttrain.batches import full_model
from megatoken.store.pretrained import load_weights
from megatoken.train.run import Run

REFERENCE = "reference"
TENSORS = "reference.safetensors"
FACTS = "facts.json"


def load_reference(run: Run, make: Callable[[GPT], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the saved tensors, on the CPU. If there are none, call `make` and save its result.

    make: called with the initial model, on all ranks or on none. All ranks must call this function.
    Raises CheckpointError if the tensors are lost and `model.init` has changed, and StorageError if
    they cannot be saved.
    """
    folder = run.out / REFERENCE
    state = run.state
    comm = state.comm
    saved = comm.run_on_rank0(lambda: _read(folder, run.data.dataset.fingerprint))
    if saved is not None:
        return saved
    facts = comm.run_on_rank0(lambda: read_object(folder / FACTS))
    # Ranks other than 0 hash no tensors.
    weights_hash = hash_tensors(state.sharded.gather_full(comm))
    model = full_model(state, run.device)
    if state.step:
        run.console.warn(f"{folder / TENSORS} is lost or damaged: rebuilding from model.init")
        weights = load_weights(run.config.model.init).model.state_dict()
        weights_hash = hash_tensors(sorted(weights.items()))
        if facts.get("weights") != weights_hash:
            what = f"{TENSORS} is lost, and model.init is not the model that this run started from"
            raise CheckpointError(what, folder, "restore the file, or choose another --out")
        model = copy.deepcopy(model)  # with its kernels
        model.load_state_dict(
            {
                name: weights.get(name, torch.zeros_like(value))  # the rest starts at 0
                for name, value in model.state_dict().items()
            }
        )
    tensors = {
        name: tensor.detach().to("cpu", copy=True).contiguous()
        for name, tensor in make(model).items()
    }
    facts = {"weights": weights_hash, "dataset": run.data.dataset.fingerprint}
    comm.run_on_rank0(lambda: _write(folder, tensors, facts))
    return tensors


def hash_tensors(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return the xxh3-128 hex of a model's (name, tensor) pairs, sorted by name.

    The value head and LoRA's adapters are left out.
    """
    digest = xxhash.xxh3_128()
    for name, tensor in tensors:
        if not name.startswith("value_head.") and ".lora." not in name:
            digest.update(name.encode())
            digest.update(tensor.detach().float().cpu().contiguous().numpy().data)
    return digest.hexdigest()


def _read(folder: Path, dataset: str) -> dict[str, Tensor] | None:
    facts = read_object(folder / FACTS)
    path = folder / TENSORS
    if not path.is_file() or facts.get("dataset") != dataset:
        return None
    raw = path.read_bytes()
    if xxhash.xxh3_128_hexdigest(raw) != facts.get("xxh3_128"):
        return None
    tensors: dict[str, Tensor] = safetensors.torch.load(raw)
    return tensors


def _write(folder: Path, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    raw = safetensors.torch.save(tensors)
    with storage_errors(folder):
        folder.mkdir(exist_ok=True)
        replace_file(folder / TENSORS, raw, durable=True)
        facts["xxh3_128"] = xxhash.xxh3_128_hexdigest(raw)
        replace_file(folder / FACTS, json.dumps(facts, indent=1) + "\n", durable=True)
