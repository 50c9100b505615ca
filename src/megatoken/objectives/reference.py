"""What DPO and the KL penalty compare with: numbers of the weights that a run starts from, kept in the run folder.

RUN/reference has the tensors, their hash and that of the weights. A resume reads them; where
they are missing or damaged, they are made again from `model.init`, if its weights are still the same.
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

from megatoken.convert.load_pretrained import load_pretrained
from megatoken.errors import CheckpointError
from megatoken.model.gpt import GPT
from megatoken.system.atomic_write import read_object, replace_file, storage_errors
from megatoken.train.run_context import RunContext
from megatoken.train.state import with_whole_model

REFERENCE, TENSORS, FACTS = "reference", "reference.safetensors", "facts.json"


def load_reference(run: RunContext, make: Callable[[GPT], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The kept tensors, on the CPU, on all ranks; those that `make` gives of the model at the run's start.

    All ranks call it after the run is restored; `make` is called on all, or on none. Raises CheckpointError where the
    tensors are lost and `model.init` is another model by now, StorageError where they cannot be kept.
    """
    folder = run.out / REFERENCE
    kept = run.comm.run_on_rank0(lambda: _read(folder, run.dataset.fingerprint))
    if kept is not None:
        return kept
    state, facts = run.state, run.comm.run_on_rank0(lambda: read_object(folder / FACTS))
    start = hash_tensors(state.sharded.gather_full(state.comm))  # of rank 0, which keeps it
    model = with_whole_model(state, run.device).compute_model
    if state.step:
        run.console.warn(f"{folder / TENSORS} is missing or damaged: made again from model.init")
        weights = load_pretrained(run.config.model.init).model.state_dict()
        start = hash_tensors(sorted(weights.items()))
        if facts.get("weights") != start:
            what = f"{TENSORS} is lost, and model.init is not the model that this run began with"
            raise CheckpointError(
                what, folder, "restore the file or model.init from a copy, or choose another --out"
            )
        model = copy.deepcopy(model)  # with its kernels
        own = model.state_dict()  # a value head starts at 0
        model.load_state_dict(
            {name: weights.get(name, torch.zeros_like(own[name])) for name in own}
        )
    tensors = {
        name: tensor.detach().to("cpu", copy=True).contiguous()
        for name, tensor in make(model).items()
    }
    facts = {"weights": start, "dataset": run.dataset.fingerprint}
    run.comm.run_on_rank0(lambda: _write(folder, tensors, facts))
    return tensors


def hash_tensors(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """xxh3-128 of names and bytes of a model's tensors, ordered by name, but for a value head, which starts at 0."""
    digest = xxhash.xxh3_128()
    for name, tensor in tensors:
        if not name.startswith("value_head."):
            digest.update(name.encode())
            digest.update(tensor.detach().float().cpu().contiguous().numpy().data)
    return digest.hexdigest()


def _read(folder: Path, dataset: str) -> dict[str, Tensor] | None:
    facts, path = read_object(folder / FACTS), folder / TENSORS
    if not path.is_file() or facts.get("dataset") != dataset:
        return None
    raw = path.read_bytes()
    return (
        safetensors.torch.load(raw)
        if xxhash.xxh3_128_hexdigest(raw) == facts.get("xxh3_128")
        else None
    )


def _write(folder: Path, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    raw = safetensors.torch.save(tensors)
    with storage_errors(folder):
        folder.mkdir(exist_ok=True)
        replace_file(folder / TENSORS, raw, durable=True)
        facts["xxh3_128"] = xxhash.xxh3_128_hexdigest(raw)
        replace_file(folder / FACTS, json.dumps(facts, indent=1) + "\n", durable=True)
