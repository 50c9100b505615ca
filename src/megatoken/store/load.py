"""Restore the training state, or only the model, from a checkpoint on any number of ranks."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Protocol

import torch
from torch import Tensor

from megatoken.base.config.load import IMPORTS
from megatoken.base.errors import CheckpointError, ConfigError, MegatokenError
from megatoken.base.rooms import ask_for_modules, list_entries
from megatoken.distributed.comm import Comm
from megatoken.distributed.parallelize import ShardedParams
from megatoken.distributed.tensor_slice import TensorSlice
from megatoken.model.gpt import GPT, list_own_classes, set_attention
from megatoken.optim.optimizer import AdamW, MatrixOptimizer
from megatoken.store.commit import discard, list_steps, step_folder
from megatoken.store.manifest import (
    MANIFEST,
    CheckpointManifest,
    DamagedError,
    FileEntry,
    decode_model_config,
    read_manifest,
    verify,
)
from megatoken.store.tensor_files import MODEL, OPTIMIZER, Shape, TensorReader, malformed


class TrainingState(Protocol):
    """What this package saves and restores of a training state.

    train/checkpoint_saver.py saves the rest in the manifest's `meta`; train/restore.py reads it.
    """

    model: GPT
    sharded: ShardedParams
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    comm: Comm

    @property
    def step(self) -> int: ...


def restore_state(
    folder: Path,
    manifest: CheckpointManifest,
    state: TrainingState,
    is_mine: Callable[[str], bool] = lambda _: True,
) -> dict[str, FileEntry]:
    """Restore a state from a checkpoint, and return the entries of the files that were verified.

    Raises CheckpointError, before any weight changes, if the checkpoint was saved with a different
    model or optimizer. Raises DamagedError if a file is damaged; the state is then invalid until
    another checkpoint is restored.

    is_mine: returns for a file name whether this rank reads the file in full and verifies it. From
        other files it reads only what it needs.
    """
    weights = TensorReader(folder, manifest, MODEL)
    saved = TensorReader(folder, manifest, OPTIMIZER)
    sharded = state.sharded
    check_shapes(weights.shapes, sharded.full_shapes, folder)
    groups = state.optimizer.param_groups
    with malformed(folder):
        _check_classes(manifest, state.model, folder)
        saved_groups = manifest.meta.get("optimizer", {}).get("groups", [])
        _check_optimizer(saved.shapes, manifest, state, folder)
        for group, numbers in zip(groups, saved_groups, strict=False):
            saved_scale, scale = numbers.get("lr_scale", 1.0), group.get("lr_scale", 1.0)
            if saved_scale != scale:
                what = f"a group's lr_scale was {saved_scale:g}, now {scale:g}"
                fix = "build the optimizer as before, or use another --out"
                raise ConfigError(what, "optimizer", fix)
    with torch.no_grad():
        verified = weights.fill(sharded.local_params, sharded.slices, is_mine)
        verified |= _restore_optimizer(saved, state, is_mine)
    for group, numbers in zip(groups, saved_groups, strict=False):
        group.update(numbers)
    scaler_state = manifest.meta["scaler"]
    if scaler_state:  # empty if saved in bf16 or fp32: fp16 then starts at its initial loss scale
        with malformed(folder):
            state.scaler.load_state_dict(scaler_state)
    return verified


def restore_newest(
    root: Path,
    state: TrainingState,
    check: Callable[[CheckpointManifest], object],
    on_damaged: Callable[[Path, str], object],
) -> CheckpointManifest | None:
    """Restore the newest checkpoint that is valid on every node; return its manifest, or None.

    All ranks must call it; they restore the same checkpoint or raise the same error. Raises
    CheckpointError if all checkpoints are damaged.

    check: raises an error for a checkpoint that must not be restored. on_damaged: called on all
    ranks with the folder of each damaged one and the first error of any rank.
    """
    steps = state.comm.run_on_rank0(lambda: list_steps(root))
    if not steps:
        return None
    is_mine = _divide_files(root, state.comm)
    for step in reversed(steps):
        folder = step_folder(root, step)
        manifest, damage = _restore_on_all(folder, state, check, is_mine)
        if manifest is not None:
            return manifest
        on_damaged(folder, damage)
    raise CheckpointError("all checkpoints are damaged", root, "choose another --out")


def _divide_files(root: Path, comm: Comm) -> Callable[[str], bool]:
    """Return a function that tells for a file name whether this rank reads and verifies the file.

    All ranks divide the files if they share the folder. If not, each node may have its own copy,
    and perhaps only one of these is damaged, so each node's ranks divide all files. A rank gets the
    tensor files that the same one of equally many ranks wrote; rank 0 gets all other files.
    """
    env = comm.dist_env
    rank, n_ranks = env.local_rank, env.local_world_size
    if n_ranks < env.world_size:
        token = root / comm.run_on_rank0(lambda: Path(mkdtemp(prefix=".tmp-", dir=root)).name)
        if not comm.any(not token.exists()):
            rank, n_ranks = env.rank, env.world_size
        if env.is_main_process:
            discard(token)

    def is_mine(name: str) -> bool:
        writer = re.search(r"-(\d+)-of-", name)
        return int(writer[1] if writer else 0) % n_ranks == rank

    return is_mine


def _restore_on_all(
    folder: Path,
    state: TrainingState,
    check: Callable[[CheckpointManifest], object],
    is_mine: Callable[[str], bool],
) -> tuple[CheckpointManifest | None, str]:
    """Restore a checkpoint on all ranks; return its manifest, or None and what is damaged.

    Errors other than damage are raised on all ranks.
    """
    files: dict[str, FileEntry] = {}
    error: MegatokenError | None = None
    try:
        if is_mine(MANIFEST):
            manifest = verify(folder, hashes=lambda name: not name.endswith(".safetensors"))
        else:
            manifest = read_manifest(folder)
        check(manifest)
        files = {name: entry for name, entry in manifest.files.items() if entry.mtime_ns >= 0}
        files |= restore_state(folder, manifest, state, is_mine)
    except MegatokenError as raised:
        error = raised
    if state.comm.any(error is not None):  # damage, found by any rank, may be the cause
        try:
            verify(folder, hashes=is_mine)
        except CheckpointError as cause:
            error = cause
    reports = state.comm.gather((files, error))
    for rank, (_, rank_error) in enumerate(reports):
        if isinstance(rank_error, DamagedError):
            return None, f"{rank_error} (read by rank {rank})" if rank else str(rank_error)
    for _, rank_error in reports:
        if rank_error is not None:
            raise rank_error
    verified: dict[str, FileEntry] = {}
    for rank_files, _ in reversed(reports):
        verified |= rank_files
    return replace(manifest, files=verified), ""


def _restore_optimizer(
    saved: TensorReader, state: TrainingState, is_mine: Callable[[str], bool]
) -> dict[str, FileEntry]:
    sharded = state.sharded
    groups = state.optimizer.param_groups
    on_device = {
        param
        for group in groups
        if group.get("fused") or group.get("capturable")
        for param in group["params"]
    }
    values = list_optimizer_tensors(state)
    slices: dict[str, TensorSlice] = {}
    for name, full_shape in saved.shapes.items():
        owner, _, key = name.partition("/")
        if owner not in sharded.local_params:
            continue
        param = sharded.local_params[owner]
        shape = full_shape
        if full_shape == sharded.full_shapes[owner]:
            slices[name] = sharded.slices[owner]
            shape = tuple(param.shape)
        if name not in values:  # as the first step would create it
            # torch keeps `step` on the CPU unless the update runs on the device.
            device = "cpu" if key == "step" and param not in on_device else param.device
            values[name] = torch.empty(shape, dtype=saved.dtypes[name], device=device)
    verified = saved.fill(values, slices, is_mine)
    for name, tensor in values.items():
        owner, _, key = name.partition("/")
        state.optimizer.state[sharded.local_params[owner]][key] = tensor
    return verified


def load_checkpoint_model(folder: Path, manifest: CheckpointManifest) -> GPT:
    """Load the unsharded model of a verified checkpoint on the CPU in fp32.

    Raises CheckpointError.
    """
    model_config = decode_model_config(manifest.meta, folder)
    weights = TensorReader(folder, manifest, MODEL)
    with torch.device("meta"), malformed(folder):
        # A damaged manifest may claim any depth: limit the memory before shapes are compared.
        model = GPT(replace(model_config, n_layer=min(model_config.n_layer, len(weights.shapes))))
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    check_shapes(weights.shapes, expected, folder)
    with malformed(folder):
        _check_classes(manifest, model, folder)
    tensors = {name: weights.read(name).float() for name in weights.shapes}
    model.load_state_dict(tensors, assign=True)
    attention = str(manifest.meta.get("attention", ""))
    if attention:
        if attention not in list_entries("attention"):
            what = f"checkpoint was trained with attention {attention!r}, which is not registered"
            fix = ask_for_modules(manifest.meta.get(IMPORTS, ())) or "call megatoken.register first"
            raise CheckpointError(what, str(folder), fix)
        set_attention(model, attention)
    return model


def check_shapes(saved: Mapping[str, Shape], expected: Mapping[str, Shape], folder: Path) -> None:
    """Raise CheckpointError unless the saved names and shapes are those expected."""
    names = [name for name in {**expected, **saved} if saved.get(name) != expected.get(name)]
    if names:
        differences = [
            f"{name} is {saved.get(name)}, the model has {expected.get(name)}" for name in names[:3]
        ]
        what = f"checkpoint does not fit the model: {'; '.join(differences)}"
        raise CheckpointError(what, str(folder), "use that model's recipe, or another --out")


def list_optimizer_tensors(state: TrainingState) -> dict[str, Tensor]:
    """Return the optimizer state of this rank's parameters, named `<parameter>/<key>`.

    Raises ConfigError for a value that cannot be saved. A value must be a tensor. If the model is
    sharded, it must also be a scalar or have the shape of its parameter.
    """
    tensors = {}
    for name, param in state.sharded.local_params.items():
        for key, value in state.optimizer.state.get(param, {}).items():
            where = f"optimizer state {name}/{key}"
            if not isinstance(value, Tensor):
                raise ConfigError(f"not a tensor: {value!r:.40}", where, "keep it as a tensor")
            if value.shape not in ((), param.shape) and not state.sharded.dims.is_unsharded:
                what = f"shape {tuple(value.shape)} of a shard {tuple(param.shape)}"
                fix = "set machine.sharding=none and machine.tensor_parallel=1"
                raise ConfigError(what, where, fix)
            tensors[f"{name}/{key}"] = value
    return tensors


def describe_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's class and its groups' hyperparameters for `meta` of the manifest.

    Learning rates are left out, because the schedule sets them. Muon's hyperparameters are left
    out, because they are in the config. For AdamW, the result is empty.
    """
    if type(optimizer) in (AdamW, torch.optim.AdamW):
        return {}
    groups = []
    if not isinstance(optimizer, MatrixOptimizer):
        groups = [
            {
                key: value
                for key, value in group.items()
                if type(value) in (int, float) and key != "lr"
            }
            for group in optimizer.param_groups
        ]
    return {"optimizer": {"name": type(optimizer).__name__, "groups": groups}}


def _check_classes(manifest: CheckpointManifest, model: GPT, folder: Path) -> None:
    """Raise CheckpointError unless the model has the same modules of the user as the checkpoint."""
    trained, given = manifest.meta.get("classes", []), list_own_classes(model)
    if trained != given:
        names = [", ".join(map(str, classes)) or "none" for classes in (trained, given)]
        what = "checkpoint was trained with own modules {}, the model has {}".format(*names)
        raise CheckpointError(what, str(folder), "pass the same model to Trainer")


def _check_optimizer(
    saved: Mapping[str, Shape], manifest: CheckpointManifest, state: TrainingState, folder: Path
) -> None:
    """Raise CheckpointError if the optimizer class or the names or shapes of its state differ."""
    default = {"name": "AdamW", "groups": []}
    saved_as = manifest.meta.get("optimizer", default)
    live_as = describe_optimizer(state.optimizer).get("optimizer", default)
    if (saved_as["name"], len(saved_as["groups"])) != (live_as["name"], len(live_as["groups"])):
        what = f"checkpoint has optimizer {saved_as['name']}, this run {live_as['name']}"
        raise CheckpointError(what, str(folder), "use that optimizer, or another --out")
    sharded = state.sharded
    live = {}
    for name, tensor in list_optimizer_tensors(state).items():
        owner = name.partition("/")[0]
        is_slice = tensor.shape == sharded.local_params[owner].shape
        live[name] = sharded.full_shapes[owner] if is_slice else tuple(tensor.shape)
    # Many optimizers create a parameter's state in the first step.
    has_state = {name.partition("/")[0] for name in live}
    wrong = [name for name in live if saved.get(name) != live[name]]
    for name, shape in saved.items():
        owner = name.partition("/")[0]
        full_shape = sharded.full_shapes.get(owner)
        fits = full_shape is not None and (shape in ((), full_shape) or sharded.dims.is_unsharded)
        if not fits or (owner in has_state and name not in live):
            wrong.append(name)
    if wrong:
        what = f"optimizer state does not fit the model: {', '.join(wrong[:4])}"
        raise CheckpointError(what, str(folder))
