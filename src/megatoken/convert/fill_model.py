"""Builds a model from the tensors of another program's checkpoint, which must fit and be finite."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from megatoken.config.model_config import ModelConfig
from megatoken.errors import CheckpointError
from megatoken.model.flops import count_parameters
from megatoken.model.gpt import GPT

HEAD = "lm_head.weight"
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
AGAIN = "copy or download it again"


def fill_model(
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    view: Callable[[Mapping[str, Tensor], ModelConfig], dict[str, Tensor]],
    where: str,
) -> GPT:
    """The model, on the CPU in fp32, with zeros in the rows that pad the vocabulary.

    view: our parameters under the file's names, as views of the file's shapes. A tied output layer may be among the
    tensors as lm_head.weight. Raises CheckpointError naming the tensors that do not fit; memory for the model is taken
    only when the tensors hold as many numbers.
    """
    storages = {
        tensor.data_ptr(): tensor.untyped_storage().nbytes() // tensor.itemsize
        for tensor in tensors.values()
    }
    held, needed = sum(storages.values()), count_parameters(config)
    too_few = f"its sizes say {config.n_layer:,} layers of {needed:,} numbers in all, the file holds {held:,}"
    if (
        config.n_layer > len(tensors) + 1000 or needed > held + 2**40
    ):  # too far off to name the tensors that differ
        raise CheckpointError(too_few, where, AGAIN)
    with torch.device("meta"):
        model = GPT(config)
    views = view(dict(model.named_parameters()), config)
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wanted = {name: tuple(tensor.shape) for name, tensor in views.items()}
    problems = [
        f"{name} is {found.get(name, 'missing')}, its sizes say {wanted.get(name, 'none')}"
        for name in {**wanted, **found}
        if found.get(name) != wanted.get(name) and (name in wanted or name != HEAD)
    ]
    if problems:
        more = f" and {len(problems) - 4} more" if len(problems) > 4 else ""
        what = f"the tensors do not fit the model: {'; '.join(problems[:4])}{more}"
        raise CheckpointError(what, where, AGAIN)
    if needed > held:  # tensors that share memory
        raise CheckpointError(too_few, where, AGAIN)
    model.to_empty(device="cpu")
    for name, own in view(dict(model.named_parameters()), config).items():
        tensor = tensors[name]
        if tensor.dtype not in DTYPES or not torch.isfinite(tensor.float()).all():
            what = f"{name} ({tensor.dtype}) holds values that are not finite numbers of 16, 32 or 64 bits"
            raise CheckpointError(what, where, AGAIN)
        own.copy_(tensor)
    for weight in (model.tokens.weight, model.lm_head_weight):
        weight.data[config.vocab_size :] = 0.0
    head, tokens = tensors.get(HEAD), model.tokens.weight[: config.vocab_size]
    is_copy = head is not None and head.shape == tokens.shape and head.dtype in DTYPES
    if (
        model.head is None
        and head is not None
        and not (is_copy and torch.equal(head.float(), tokens))
    ):
        what = f"{HEAD} differs from the token embedding, although the two are tied"
        raise CheckpointError(
            what, where, "set tie_word_embeddings to false if it has weights of its own"
        )
    return model
