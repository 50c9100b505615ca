"""A live state into the files of a checkpoint, and back.

Tensors are safetensors (weights under their module names; moments as `<parameter>/exp_avg`), everything else is JSON
in the manifest. Nothing is unpickled. What is restored is checked whole, by name and shape, before a single weight
of the live model is touched.
"""

import dataclasses
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatoken.checkpoint.store import Manifest, commit
from megatoken.errors import Exit, Fault
from megatoken.model.gpt import GPT
from megatoken.presets import Shape
from megatoken.train.state import State

WEIGHTS, MOMENTS = "model.safetensors", "optimizer.safetensors"


def save_state(root: Path, state: State, *, config: Path, tokenizer: Path, meta: Mapping[str, Any]) -> Path:
    """Commit the state as checkpoint `state.step` under `root`; return its folder.

    config, tokenizer: the run's resolved recipe and tokenizer folder, copied so that a checkpoint stands alone.
    meta: what else to remember (dataset fingerprint, versions). Raises Fault(STORAGE).
    """
    weights = {name: tensor.detach() for name, tensor in state.model.state_dict().items()}
    moments = _collect_moments(state)

    def write(tensors: dict[str, Tensor]) -> Callable[[Path], None]:
        return lambda path: save_file({name: t.cpu().contiguous() for name, t in tensors.items()}, path)

    def copy(source: Path) -> Callable[[Path], None]:
        return lambda path: _copy(source, path)

    files = {WEIGHTS: write(weights), MOMENTS: write(moments), "config.yaml": copy(config)}
    files |= {f"tokenizer/{path.name}": copy(path) for path in sorted(tokenizer.iterdir())}
    size = sum(t.numel() * t.element_size() for tensors in (weights, moments) for t in tensors.values())
    about = {"shape": dataclasses.asdict(state.model.shape), "scaler": state.scaler.state_dict(), **meta}
    return commit(root, state.step, files, meta=about, needed_bytes=size + (1 << 20))


def _copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)


def restore_state(folder: Path, manifest: Manifest, state: State) -> None:
    """Fill a freshly built state from a verified checkpoint.

    Raises Fault(CHECKPOINT) with the differing names or shapes when it holds another model.
    """
    weights = load_file(folder / WEIGHTS)
    moments = load_file(folder / MOMENTS)
    check_tensors(weights, state.model, folder)
    held = _collect_moments(state)
    if set(moments) != set(held):
        odd = ", ".join(sorted(set(moments) ^ set(held))[:4])
        raise Fault(Exit.CHECKPOINT, f"optimizer state does not fit this model: {odd}", str(folder / MOMENTS))
    state.model.load_state_dict(weights)
    for name, tensor in held.items():
        tensor.copy_(moments[name])
    state.scaler.load_state_dict(manifest.meta["scaler"])
    state.step = manifest.step


def load_checkpoint_model(folder: Path, manifest: Manifest) -> GPT:
    """The plain model of a verified checkpoint, on the CPU in fp32."""
    try:
        shape = Shape(**manifest.meta["shape"])
    except (KeyError, TypeError):
        raise Fault(Exit.CHECKPOINT, "checkpoint does not say its model's shape", str(folder)) from None
    with torch.device("meta"):
        model = GPT(shape)
    weights = load_file(folder / WEIGHTS)
    check_tensors(weights, model, folder)
    model.load_state_dict(weights, assign=True)
    return model


def check_tensors(weights: Mapping[str, Tensor], model: GPT, where: Path) -> None:
    """Raise Fault(CHECKPOINT), naming the first few differences, unless names and shapes are the model's."""
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if wanted != found:
        odd = [n for n in {**wanted, **found} if wanted.get(n) != found.get(n)]
        said = "; ".join(f"{n} is {found.get(n, 'missing')}, the model has {wanted.get(n, 'none')}" for n in odd[:3])
        more = f" and {len(odd) - 3} more" if len(odd) > 3 else ""
        fix = "it belongs to another model: use that model's recipe, or another --out"
        raise Fault(Exit.CHECKPOINT, f"checkpoint does not fit: {said}{more}", str(where), fix)


def _collect_moments(state: State) -> dict[str, Tensor]:
    """The optimizer's live tensors as `<parameter>/<part>`, in its own order."""
    names = {parameter: name for name, parameter in state.model.named_parameters()}
    return {
        f"{names[parameter]}/{part}": tensor
        for group in state.optimizer.param_groups
        for parameter in group["params"]
        for part, tensor in state.optimizer.state[parameter].items()
    }
