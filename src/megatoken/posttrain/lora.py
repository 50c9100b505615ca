"""LoRA: train low-rank adapters of a pretrained model's linear layers (Hu et al. 2021).

A layer with weight W computes W x + (alpha / rank) B A x, and only A and B train. Queries, keys and
values have adapters of their own, although one parameter holds their weights. As in PEFT, A starts
uniform within 1 / sqrt(inputs) and B at 0, so that the model starts as its base.

Shapes: R rank, P layers packed into one, I inputs, O outputs of all of them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatoken.base.config.model_config import ModelConfig
from megatoken.model.gpt import GPT, AddedModule, Linear

LAYERS = ("attention.qkv", "attention.out", "mlp.gate", "mlp.up", "mlp.down")  # with adapters


class LoRA(AddedModule):
    """The adapter of a linear layer, uninitialized.

    outputs: number of outputs of each layer that is packed into the linear layer.
    """

    enabled = True

    def __init__(self, config: ModelConfig, inputs: int, outputs: Sequence[int]) -> None:
        super().__init__()
        rank = config.lora_rank
        self.outputs = list(outputs)
        self.scale = (config.lora_alpha or 2 * rank) / rank
        self.a = nn.Parameter(torch.empty(len(outputs) * rank, inputs))
        self.b = nn.Parameter(torch.empty(sum(outputs), rank))

    @property
    def up(self) -> Tensor:
        """B (O, P * R), which is block-diagonal if several layers are packed."""
        blocks = torch.split(self.b, self.outputs)
        return self.b if len(blocks) == 1 else torch.block_diag(*blocks)  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the layer's output with the adapter. y: without it."""
        return y + F.linear(F.linear(x, self.a) * self.scale, self.up) if self.enabled else y

    def draw_initial(self, name: str, generator: torch.Generator) -> Tensor:
        values = super().draw_initial(name, generator)
        bound = values.shape[1] ** -0.5
        return values.uniform_(-bound, bound, generator=generator) if name == "a" else values


class AdaptedLinear(Linear):
    """A linear layer with an adapter."""

    lora: LoRA

    def forward(self, x: Tensor) -> Tensor:
        return self.lora(x, super().forward(x))


def apply(model: GPT) -> None:
    """Freeze all parameters, and add an adapter to every linear layer of the blocks."""
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if name.endswith(LAYERS) and isinstance(module, Linear):
            outputs = model.config.qkv_rows if name.endswith("qkv") else [module.out_features]
            module.__class__ = AdaptedLinear  # FSDP changes the class of modules, too
            module.lora = LoRA(model.config, module.in_features, outputs)


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Disable the adapters, so that the model computes the same as its base."""
    adapters = [module for module in model.modules() if isinstance(module, LoRA)]
    try:
        for adapter in adapters:
            adapter.enabled = False
        yield
    finally:
        for adapter in adapters:
            adapter.enabled = True


@torch.no_grad()
def merge(model: GPT) -> None:
    """Add the adapters to the weights of their layers and remove them; all parameters train."""
    for layer in list(model.modules()):
        if not isinstance(layer, AdaptedLinear):
            continue
        layer.weight += layer.lora.scale * (layer.lora.up @ layer.lora.a)
        del layer.lora
        layer.__class__ = Linear  # type: ignore[assignment]
    model.config = replace(model.config, lora_rank=0, lora_alpha=0.0)
    model.requires_grad_()
