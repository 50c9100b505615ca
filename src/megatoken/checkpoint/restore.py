"""A live state out of the files of a checkpoint, on as many processes as there are, however many wrote it.

What is restored is checked whole, by name and shape, before a single weight of the live model is touched.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from megatoken.checkpoint.manifest import Manifest
from megatoken.checkpoint.tensors import MOMENTS, WEIGHTS, Reader, Sizes
from megatoken.errors import Exit, Fault
from megatoken.model.gpt import GPT
from megatoken.presets import Shape
from megatoken.train.state import State


def restore_state(folder: Path, manifest: Manifest, state: State, *, verified: bool = True) -> None:
    """Fill a freshly built state from a checkpoint; of its tensors only the parts kept here are read.

    verified: every byte was; else a file is before it is used. Raises Fault(CHECKPOINT) with the differing names or
    shapes when it holds another model.
    """
    weights, moments = (Reader(folder, manifest, kind, verified=verified) for kind in (WEIGHTS, MOMENTS))
    check_sizes(weights.sizes, state.placement.sizes, folder)
    held = list_moments(state)
    wanted = {f"{name}/{part}" for name in state.placement.sizes for part in ("step", "exp_avg", "exp_avg_sq")}
    if set(moments.sizes) != wanted:
        odd = ", ".join(sorted(set(moments.sizes) ^ wanted)[:4])
        raise Fault(Exit.CHECKPOINT, f"optimizer state does not fit this model: {odd}", str(folder))
    with torch.no_grad():
        for name, tensor in state.placement.kept.items():
            tensor.copy_(weights.read(name, state.placement.parts[name]))
        for name, tensor in held.items():
            tensor.copy_(moments.read(name, state.placement.parts[name.rpartition("/")[0]]))
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
    weights = Reader(folder, manifest, WEIGHTS)
    check_sizes(weights.sizes, {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}, folder)
    model.load_state_dict({name: weights.read(name) for name in weights.sizes}, assign=True)
    return model


def check_sizes(found: Mapping[str, Sizes], wanted: Mapping[str, Sizes], where: Path) -> None:
    """Raise Fault(CHECKPOINT), naming the first few differences, unless names and shapes are the model's."""
    if wanted != found:
        odd = [n for n in {**wanted, **found} if wanted.get(n) != found.get(n)]
        said = "; ".join(f"{n} is {found.get(n, 'missing')}, the model has {wanted.get(n, 'none')}" for n in odd[:3])
        more = f" and {len(odd) - 3} more" if len(odd) > 3 else ""
        fix = "it belongs to another model: use that model's recipe, or another --out"
        raise Fault(Exit.CHECKPOINT, f"checkpoint does not fit: {said}{more}", str(where), fix)


def list_moments(state: State) -> dict[str, Tensor]:
    """The optimizer's live tensors as `<parameter>/<part>`."""
    return {
        f"{name}/{part}": tensor
        for name, kept in state.placement.kept.items()
        for part, tensor in state.optimizer.state[kept].items()
    }
