"""Build a model from the tensors of another program's checkpoint."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from megatoken.base.config.model_config import ModelConfig
from megatoken.base.errors import CheckpointError
from megatoken.model.gpt import GPT

HEAD = "lm_head.weight"
AGAIN = "copy or download it again"


def fill_model(
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    view: Callable[[Mapping[str, Tensor], ModelConfig], dict[str, Tensor]],
    where: str,
) -> GPT:
    """Build a model on the CPU in fp32 from the tensors of a file.

    view: a function that returns views of megatoken's parameters with the file's names and shapes.
    The tensors may include a tied output layer as lm_head.weight. Rows that pad the vocabulary
    become 0. Raises CheckpointError for tensors that do not fit or are not finite.
    """
    if config.n_layer > len(tensors):
        raise CheckpointError(f"no tensors for {config.n_layer} layers", where, AGAIN)
    with torch.device("meta"):
        model = GPT(config)
    _check_shapes(tensors, view(dict(model.named_parameters()), config), where)
    model.to_empty(device="cpu")
    for name, param in view(dict(model.named_parameters()), config).items():
        tensor = tensors[name]
        if not tensor.is_floating_point() or not torch.isfinite(tensor.float()).all():
            what = f"{name} ({tensor.dtype}) does not hold finite numbers"
            raise CheckpointError(what, where, AGAIN)
        param.copy_(tensor)
    for name, param in model.named_parameters():
        if name.endswith(("tokens.weight", "head.weight")):
            param.data[config.vocab_size :] = 0.0
    if model.head is None and HEAD in tensors:
        tokens = model.tokens.weight[: config.vocab_size]
        if not torch.equal(tensors[HEAD].to(tokens.dtype), tokens):
            what = f"{HEAD} differs from the token embedding, but they are tied"
            raise CheckpointError(what, where, "set tie_word_embeddings to false")
    return model


def _check_shapes(tensors: Mapping[str, Tensor], views: Mapping[str, Tensor], where: str) -> None:
    """Raise CheckpointError for tensors that are missing, unknown or of the wrong shape."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    expected = {name: tuple(view.shape) for name, view in views.items()}
    problems = [
        f"{name} is {shapes.get(name)}, not {expected.get(name)}"
        for name in {**expected, **shapes}
        if shapes.get(name) != expected.get(name) and (name in expected or name != HEAD)
    ]
    if problems:
        what = f"{len(problems)} tensors do not fit: {'; '.join(problems[:4])}"
        raise CheckpointError(what, where, AGAIN)
