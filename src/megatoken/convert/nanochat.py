"""Read checkpoints of nanochat: model_NNNNNN.pt and meta_NNNNNN.json.

Its norms have no weights: here, the weights of norms are 1, and those of queries and keys hold a
constant factor. It rotates queries and keys in the opposite direction: here, the two halves of each
head are swapped. Its gates read only the first channels: here, their weights are padded with zeros.

The files do not name nanochat's version; it is inferred from the tensors. Models of March 2 to 9,
2026 have a softcap of 20 instead of 15, which cannot be inferred.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor

from megatoken.base.config.model_config import ModelConfig
from megatoken.base.errors import CheckpointError, Warn
from megatoken.base.system.atomic_write import read_object
from megatoken.convert.fill_model import AGAIN, fill_model
from megatoken.convert.hf.families import OTHERS, build_config
from megatoken.convert.nanogpt import WRAPPERS, load_archive, select_weights
from megatoken.convert.vocabulary import with_vocabulary
from megatoken.model.gpt import GPT
from megatoken.store.pretrained import Pretrained
from megatoken.text.tokenizer import TIKTOKEN_NAME

FILES = "model_[0-9]*.pt"
FAMILY = OTHERS["nanochat"]
ROOT = {  # parameters of the whole model
    "resid_lambdas": "residual_scales",
    "x0_lambdas": "embedding_scales",
    "smear_gate.weight": "smear_gate",
    "smear_lambda": "smear_scale",
    "backout_lambda": "backout_scale",
}


@dataclass(frozen=True)
class Version:
    """Constants in nanochat's code that its checkpoints do not hold.

    qk_scale: factor of normalized queries and keys. gate_scale: the largest gate of value
    embeddings. window: a window is the context divided by the first number, rounded up to a
    multiple of the second.
    """

    rope_theta: float
    qk_scale: float
    gate_scale: float
    window: tuple[int, int]


FIRST = Version(10_000.0, 1.0, 2.0, (2, 1))
MARCH_9 = Version(100_000.0, 1.15, 3.0, (3, 128))
MARCH_14 = Version(100_000.0, 1.2, 3.0, (4, 128))


def find(path: Path) -> Path | None:
    """Return the file to read, or None if the path holds another format."""
    path = max(path.glob(FILES), default=path)
    return path if path.match(FILES) else None


def load(path: Path, warn: Warn) -> Pretrained:
    """Load the model with the tokenizer next to it. Raises CheckpointError."""
    folder = path.parent
    if not (folder / TIKTOKEN_NAME).is_file():
        folder /= "../../tokenizer"  # where nanochat writes it
    return with_vocabulary(read_nanochat(path), folder, str(path))


def find_version(tensors: Mapping[str, Tensor]) -> Version:
    """Return the version of nanochat that wrote these tensors."""
    if "smear_lambda" in tensors:
        return MARCH_14
    channels = [tensor.shape[-1] for name, tensor in tensors.items() if "ve_gate" in name]
    return MARCH_9 if channels[:1] == [12] else FIRST


def read_content(path: Path) -> tuple[Iterable[tuple[str, Tensor]], ModelConfig]:
    """Return a checkpoint's tensors by name, memory-mapped, and its architecture.

    Raises CheckpointError.
    """
    tensors = {WRAPPERS.sub("", name): tensor for name, tensor in load_archive(path).items()}
    meta = path.with_name(path.name.replace("model", "meta")).with_suffix(".json")
    sizes = dict(read_object(meta).get("model_config", {}))
    if not sizes:
        raise CheckpointError("no model_config", meta, AGAIN)
    pattern = sizes.pop("window_pattern", "L")
    known = ("transformer.", "value_embeds.", "lm_head.", *ROOT)
    unknown = sizes.keys() - FAMILY.fields.values()
    unknown |= {name for name in tensors if not name.startswith(known)}
    if unknown:
        what = f"nanochat's {', '.join(sorted(unknown))} are not supported"
        raise CheckpointError(what, meta, "use a model of nanochat's main branch")
    version = find_version(tensors)
    switches = {
        "rope_theta": version.rope_theta,
        "residual_scales": "resid_lambdas" in tensors,
        "value_embeddings": any(name.startswith("value_embeds.") for name in tensors),
        "smear": "smear_lambda" in tensors,
        "backout": "backout_lambda" in tensors,
    }
    config = build_config(sizes, FAMILY.fields, str(meta), {**FAMILY.switches, **switches})
    pattern = (pattern.upper() * config.n_layer)[: config.n_layer - 1] + "L"
    if "S" in pattern:
        parts, multiple = version.window
        window = -(-config.seq_len // (parts * multiple)) * multiple + 1  # with the query
        config = replace(config, window=window, window_pattern=pattern)
    return tensors.items(), config


def read_nanochat(path: Path) -> GPT:
    """Load the model of a checkpoint on the CPU in fp32.

    Raises CheckpointError for a file that is damaged, would run code, or has unsupported parts.
    """
    content, config = read_content(path)
    tensors = dict(content)
    version = find_version(tensors)

    def view(params: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
        root = {name: params[ROOT[name]].detach() for name in ROOT.keys() & tensors}
        return FAMILY.view_params(params, config) | root

    weights = select_weights(tensors.items(), FAMILY, config.vocab_size)
    for name, tensor in weights.items():
        if name.startswith("value_embeds."):  # the gates here are at most 2
            weights[name] = tensor[: config.vocab_size].float() * (version.gate_scale / 2)
        elif name.endswith("_gate.weight"):
            tensor = tensor[0] if name in ROOT else tensor
            weights[name] = F.pad(tensor, (0, config.d_model - tensor.shape[-1]))
    model = fill_model(config, weights, view, str(path))
    q, k, _ = config.qkv_rows
    for name, param in model.named_parameters():
        if "norm" in name:
            is_qk = name.endswith(("q_norm.weight", "k_norm.weight"))
            param.data.fill_(version.qk_scale if is_qk else 1.0)
        elif name.endswith("qkv.weight"):
            halves = param.data[: q + k].view(-1, 2, config.d_head // 2, config.d_model)
            halves.copy_(halves.flip(1))
    return model
