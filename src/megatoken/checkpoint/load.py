"""Restoring the training state, or the model alone, from a checkpoint, on any number of ranks."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatoken.checkpoint.manifest import CheckpointManifest, FileEntry, decode_model_config
from megatoken.checkpoint.tensor_files import MODEL, OPTIMIZER, Shape, TensorReader, malformed
from megatoken.distributed.comm import Comm
from megatoken.distributed.parallelize import ShardedParams
from megatoken.errors import CheckpointError, ConfigError
from megatoken.model.gpt import GPT, set_attention
from megatoken.model.kernels import ATTENTION
from megatoken.optim.adamw import AdamW
from megatoken.optim.muon import Muon


class TrainingState(Protocol):
    """What a checkpoint holds of a live run."""

    model: GPT
    sharded: ShardedParams
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    comm: Comm
    step: int


def restore_state(
    folder: Path, manifest: CheckpointManifest, state: TrainingState, share: slice = slice(None)
) -> dict[str, FileEntry]:
    """Fill a state from a checkpoint, reading only the slices that this rank holds of the files outside `share`.

    share: which files of weights, and of optimizer state, are verified while they are read; their entries are returned.
    Raises DamagedError when one does not verify: weights and optimizer state must then be filled again. Raises
    CheckpointError with the differing names or shapes, before any weight is changed, when it was saved with another
    model or optimizer.
    """
    weights, saved = (TensorReader(folder, manifest, name) for name in (MODEL, OPTIMIZER))
    sharded, optimizer = state.sharded, state.optimizer
    check_shapes(weights.shapes, sharded.full_shapes, folder)
    groups = optimizer.param_groups
    with malformed(folder):
        group_numbers = manifest.meta.get("optimizer", {}).get("groups", [])
        _check_optimizer(saved.shapes, manifest, state, folder)
        for group, numbers in zip(groups, group_numbers, strict=False):
            scales = numbers.get("lr_scale", 1.0), group.get("lr_scale", 1.0)
            if scales[0] != scales[1]:
                what = f"a group's learning rate was {scales[0]:g} times the schedule's, now {scales[1]:g} times"
                raise ConfigError(
                    what, "optimizer", "build the optimizer as before, or train in another folder"
                )
    on_device = {
        param for g in groups if g.get("fused") or g.get("capturable") for param in g["params"]
    }
    with torch.no_grad():
        verified = weights.fill(sharded.local_params, sharded.slices, share)
        values, slices = list_optimizer_tensors(state), {}
        for name, shape in saved.shapes.items():
            owner, _, key = name.partition("/")
            if owner not in sharded.local_params:
                continue
            param = sharded.local_params[owner]
            if shape == sharded.full_shapes[owner]:
                slices[name], shape = sharded.slices[owner], tuple(param.shape)
            if (
                name not in values
            ):  # created in the first step; torch keeps `step` on the CPU unless the update is not
                device = "cpu" if key == "step" and param not in on_device else param.device
                values[name] = torch.empty(shape, dtype=saved.dtype(name), device=device)
        verified |= saved.fill(values, slices, share)
        for name, tensor in values.items():
            owner, _, key = name.partition("/")
            optimizer.state[sharded.local_params[owner]][key] = tensor
    for group, numbers in zip(groups, group_numbers, strict=False):
        group.update(numbers)
    if manifest.meta[
        "scaler"
    ]:  # empty after bf16 or fp32, which have no loss scale: fp16 then begins with its first
        with malformed(folder):
            state.scaler.load_state_dict(manifest.meta["scaler"])
    state.step = manifest.step
    return verified


def load_checkpoint_model(folder: Path, manifest: CheckpointManifest) -> GPT:
    """The plain model of a verified checkpoint, on the CPU in fp32. Raises CheckpointError."""
    model_config = decode_model_config(manifest.meta.get("shape"), folder)
    weights = TensorReader(folder, manifest, MODEL)
    with torch.device("meta"), malformed(folder):
        # A manifest may claim any depth, and a layer takes memory: `check_shapes` refuses one that the tensors lack.
        model = GPT(replace(model_config, n_layer=min(model_config.n_layer, len(weights.shapes))))
    check_shapes(
        weights.shapes,
        {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()},
        folder,
    )
    model.load_state_dict(
        {name: weights.read(name).float() for name in weights.shapes}, assign=True
    )
    if attention := str(manifest.meta.get("attention", "")):
        if attention not in ATTENTION:
            what = f"checkpoint was trained with attention {attention!r}, which is not registered"
            raise CheckpointError(what, str(folder), "call megatoken.register_attention first")
        set_attention(model, attention)
    return model


def check_shapes(saved: Mapping[str, Shape], expected: Mapping[str, Shape], folder: Path) -> None:
    """Raise CheckpointError, naming the first differences, unless names and shapes are the model's."""
    names = [name for name in {**expected, **saved} if saved.get(name) != expected.get(name)]
    if names:
        differences = [
            f"{name} is {saved.get(name)}, the model has {expected.get(name)}" for name in names[:3]
        ]
        fix = "it belongs to another model: use that model's recipe, or another --out"
        raise CheckpointError(
            f"checkpoint does not fit: {'; '.join(differences)}", str(folder), fix
        )


def list_optimizer_tensors(state: TrainingState) -> dict[str, Tensor]:
    """The optimizer's state of the local parameters as `<parameter>/<key>`.

    Raises ConfigError for what cannot be saved: values that are not tensors and, where the model is sharded, tensors
    that are neither scalars nor of their parameter's shape.
    """
    tensors = {}
    optimizer, where = type(state.optimizer).__name__, "optimizer state"
    for name, param in state.sharded.local_params.items():
        for key, value in state.optimizer.state.get(param, {}).items():
            if not isinstance(value, Tensor):
                what = f"{optimizer} keeps {key}={value!r:.40} for {name}, which is not a tensor and cannot be saved"
                raise ConfigError(what, where, "keep it as a tensor, such as torch.tensor(0.0)")
            if value.shape not in ((), param.shape) and not state.sharded.dims.is_unsharded:
                shapes = f"of shape {tuple(value.shape)} for a shard {tuple(param.shape)}"
                what = f"{optimizer} keeps {key} {shapes} of {name}, which cannot be sharded"
                raise ConfigError(
                    what, where, "set machine.sharding=none and machine.tensor_parallel=1"
                )
            tensors[f"{name}/{key}"] = value
    return tensors


def describe_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """`meta.optimizer` of the manifest: class and numbers of the parameter groups; empty for AdamW, the default.

    The learning rate is left out: the schedule sets it in every step. Muon's numbers are in the config.
    """
    if type(optimizer) in (AdamW, torch.optim.AdamW):
        return {}
    if type(optimizer) is Muon:
        return {"optimizer": {"name": type(optimizer).__name__, "groups": []}}
    groups = [
        {key: value for key, value in group.items() if type(value) in (int, float) and key != "lr"}
        for group in optimizer.param_groups
    ]
    return {"optimizer": {"name": type(optimizer).__name__, "groups": groups}}


def _check_optimizer(
    saved: Mapping[str, Shape], manifest: CheckpointManifest, state: TrainingState, folder: Path
) -> None:
    """Raise CheckpointError unless the optimizer's class and its saved tensors, by name and shape, are this run's."""
    default = {"name": "AdamW", "groups": []}
    saved_as = manifest.meta.get("optimizer", default)
    live_as = describe_optimizer(state.optimizer).get("optimizer", default)
    if (saved_as["name"], len(saved_as["groups"])) != (live_as["name"], len(live_as["groups"])):
        what = f"checkpoint was saved with optimizer {saved_as['name']}, this run has {live_as['name']}"
        raise CheckpointError(what, str(folder), "use that optimizer, or another --out")
    sharded, live = state.sharded, {}
    for name, tensor in list_optimizer_tensors(state).items():
        owner = name.partition("/")[0]
        is_slice = tensor.shape == sharded.local_params[owner].shape
        live[name] = sharded.full_shapes[owner] if is_slice else tuple(tensor.shape)
    has_state = {
        name.partition("/")[0] for name in live
    }  # many optimizers create their state in the first step only
    odd = [name for name in live if saved.get(name) != live[name]]
    for name, shape in saved.items():
        full_shape = sharded.full_shapes.get(owner := name.partition("/")[0])
        fits = full_shape is not None and (shape in ((), full_shape) or sharded.dims.is_unsharded)
        if not fits or (owner in has_state and name not in live):
            odd.append(name)
    if odd:
        raise CheckpointError(
            f"optimizer state does not fit this model: {', '.join(odd[:4])}", str(folder)
        )
