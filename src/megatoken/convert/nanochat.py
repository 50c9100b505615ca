"""Read checkpoints of nanochat: model_NNNNNN.pt and meta_NNNNNN.json.

Its norms have no weights, so all norm weights are 1. It rotates queries and keys in the opposite
direction, so the two halves of each head are swapped.
"""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from megatoken.config.model_config import ModelConfig
from megatoken.convert.fill_model import fill_model
from megatoken.convert.hf.families import OTHERS, build_config
from megatoken.convert.nanogpt import WRAPPERS, load_archive, select_weights
from megatoken.errors import CheckpointError
from megatoken.model.gpt import GPT
from megatoken.system.atomic_write import read_object

FILES = "model_[0-9]*.pt"
FAMILY = OTHERS["nanochat"]
SCALES = {"resid_lambdas": "residual_scales", "x0_lambdas": "embedding_scales"}


def read_content(path: Path) -> tuple[dict[str, Tensor], ModelConfig]:
    """Return a checkpoint's tensors by name, memory-mapped, and its architecture.

    Raises CheckpointError.
    """
    tensors = {WRAPPERS.sub("", name): tensor for name, tensor in load_archive(path).items()}
    meta = path.with_name(path.name.replace("model", "meta")).with_suffix(".json")
    sizes = dict(read_object(meta).get("model_config", {}))
    windows = sizes.pop("window_pattern", "L")
    others = {name for name in tensors if not name.startswith(("transformer.", "lm_head."))}
    unknown = (sizes.keys() - FAMILY.fields.values()) | (others - SCALES.keys())
    if unknown or "S" in windows:
        what = f"nanochat's {', '.join(sorted(unknown)) or 'sliding windows'} are not supported"
        raise CheckpointError(what, meta, "use a model of nanochat's first version (2025)")
    switches = {**FAMILY.switches, "residual_scales": "resid_lambdas" in tensors}
    return tensors, build_config(sizes, FAMILY.fields, str(meta), switches)


def read_nanochat(path: Path) -> GPT:
    """Load the model of a checkpoint on the CPU in fp32.

    Raises CheckpointError for a file that is damaged, would run code, or holds another version.
    """
    tensors, config = read_content(path)

    def view(params: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
        scales = {name: params[SCALES[name]].detach() for name in SCALES.keys() & tensors}
        return FAMILY.view_params(params, config) | scales

    weights = select_weights(tensors, FAMILY, config.vocab_size)
    model = fill_model(config, weights, view, str(path))
    q, k, _ = config.qkv_rows
    for name, param in model.named_parameters():
        if "norm" in name:
            param.data.fill_(1.0)
        elif name.endswith("qkv.weight"):
            halves = param.data[: q + k].view(-1, 2, config.d_head // 2, config.d_model)
            halves.copy_(halves.flip(1))
    return model
