"""Start from a model whose vocabulary lacks tokens of the dataset, such as chat control tokens."""

from dataclasses import replace

import torch
from torch import Tensor

from megatoken.base.config.model_config import ModelConfig
from megatoken.data.vocabulary import Vocabulary
from megatoken.store.pretrained import Pretrained
from megatoken.train.run import RunPlan

VOCABULARY_TABLES = ("tokens.weight", "head.weight")  # also attention.value_tokens.weight


def add_tokens(loaded: Pretrained, plan: RunPlan) -> bool | None:
    """Add rows for the dataset's new tokens, if its vocabulary extends the model's.

    Returns True if it does, else None.
    """
    config, vocabulary = plan.data.model_config, plan.data.vocabulary
    if not extends(vocabulary, loaded.vocabulary):
        return None
    model, n_old, n_new = loaded.model, loaded.vocabulary.vocab_size, vocabulary.vocab_size
    model.config = replace(model.config, vocab_size=max(model.config.vocab_size, n_new))
    for name, parameter in model.named_parameters():
        if name.endswith(VOCABULARY_TABLES):
            parameter.data = add_mean_rows(parameter.data, n_old, n_new, config)
            if config.lora_rank:  # frozen rows that were equal could not be told apart
                generator = torch.Generator().manual_seed(plan.config.seed)
                new = parameter.data[n_old:n_new]
                noise = torch.randn(new.shape, generator=generator)
                new += noise * parameter.data[:n_old].std(0)
    start = "random rows" if config.lora_rank else "the mean of the others"
    plan.console.print(f"{n_new - n_old} new tokens start as {start}")
    if not plan.data.fills_context:
        what = f"{plan.config.model.init} has no chat template, so it has not learned to answer"
        plan.console.warn(f"{what}: run megatoken train sft first")
    return True


def extends(new: Vocabulary, old: Vocabulary) -> bool:
    """Return whether the vocabulary `new` is `old` plus tokens with higher ids."""
    added = new.ids.keys() - old.ids.keys()
    is_kept = old.ids.items() <= new.ids.items()
    return is_kept and all(new.ids[token] >= old.vocab_size for token in added)


def add_mean_rows(values: Tensor, n_old: int, n_new: int, config: ModelConfig) -> Tensor:
    """Extend a table (vocabulary, width) by rows [n_old, n_new), each the mean of the old rows.

    The result has the padded vocabulary of `config`. A new token's logit is then the mean of the
    old logits, and its probability at most 1/n_old (Hewitt 2021). A row of zeros would instead give
    the new token nearly all the probability wherever the old logits are far below 0.
    """
    table = values.new_zeros(config.padded_vocab_size, values.shape[1])
    n_copied = min(len(table), len(values))
    table[:n_copied] = values[:n_copied]
    table[n_old:n_new] = values[:n_old].double().mean(0).to(values.dtype)
    return table
