"""The value head of PPO and reward models: a number for each hidden state."""

import torch
from torch import Tensor, nn

from megatoken.model.gpt import GPT, AddedModule


class ValueHead(AddedModule):
    """A linear layer with one output, computed in fp32. It starts at 0."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, d_model))
        self.bias = nn.Parameter(torch.empty(1))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the values (...) of hidden states (..., C)."""
        return (hidden.float() * self.weight[0].float()).sum(-1) + self.bias.float()


def apply(model: GPT) -> None:
    """Add a value head, which trains."""
    model.value_head = ValueHead(model.config.d_model)


def merge(model: GPT) -> None:
    """Keep the head: no weight of the model computes the same."""


def predict_values(model: GPT, hidden: Tensor) -> Tensor:
    """Return the values (...) of hidden states (..., C) in fp32."""
    values: Tensor = model.get_submodule("value_head")(hidden)
    return values
