"""One new token through a GPT: what its modules compute, on rows instead of sequences and without their overhead.

In: the ids of N sequences' newest tokens, the cache of all earlier ones. Out: scores of the next token. Tests hold it
equal to the modules. Absent: gradients, prompts.

At batch 1 a token costs reading every weight once. MKL multiplies one row by a matrix on a single core; slices of the
weight multiplied as one batch are read by all cores. `turn_weights` makes the wide ones faster still.

Shapes: N sequences, C d_model, H heads, D head width, I and O a product's input and output, K slices, V vocabulary.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatoken.model.gpt import GPT, Block, Cache

Rows = Callable[[Tensor], Tensor]

SLICES_A_CORE = 4  # finer than cores, so that a core that was held up does not make the others wait for half the weight
SMALLEST_SLICE = 1 << 15  # weights; below it the call costs more than the reading
HAS_MKL = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]


class Decoder:
    """A model's products, planned for `rows` sequences; reads the weights in place, so they have to stay there."""

    def __init__(self, model: GPT, *, rows: int) -> None:
        self._model = model
        # Several rows, autocast and other devices are left to torch's own product.
        place = model.unembedding.device.type
        sliced = rows == 1 and HAS_MKL and place == "cpu" and not torch.is_autocast_enabled("cpu")
        self._layers: list[tuple[Rows, ...]] = []
        for block in model.blocks:
            assert isinstance(block, Block)
            linears = (block.attention.qkv, block.attention.out, block.mlp.up, block.mlp.down)
            products = (plan_product(m.weight, m.bias, sliced=sliced) for m in linears)
            norms = (partial(nn.LayerNorm.forward, norm) for norm in (block.norm1, block.norm2))
            self._layers.append((*norms, *products))
        self._head = plan_product(model.unembedding, None, sliced=sliced)

    def step(self, ids_N: Tensor, cache: Cache) -> Tensor:
        """Scores (N, real vocabulary) of what follows `ids_N`, which are added to the cache."""
        model, n_head = self._model, self._model.shape.n_head
        N, C = len(ids_N), model.shape.d_model
        x_NC = F.embedding(ids_N, model.tokens.weight) + model.positions.weight[cache.length]
        for layer, (norm1, norm2, qkv, out, up, down) in enumerate(self._layers):
            q, k, v = qkv(norm1(x_NC)).view(N, 3, n_head, 1, C // n_head).unbind(1)
            k, v = cache.append(layer, k, v)
            y_NH1D = F.scaled_dot_product_attention(q, k, v)
            x_NC = x_NC + out(y_NH1D.reshape(N, C))
            x_NC = x_NC + down(F.gelu(up(norm2(x_NC)), approximate="tanh"))
        cache.length += 1
        return self._head(nn.LayerNorm.forward(model.norm, x_NC))[:, : model.shape.vocab_size]


def turn_weights(model: GPT) -> None:
    """Keep every weight with more outputs than inputs column by column in memory, in place; shapes and values stay.

    One row is multiplied faster that way: short dot products give way to long sums of columns. For a model on the CPU
    that will only generate: training wants rows. Takes about as long as the model takes to load.
    """
    weights = [model.unembedding, *(module.weight for module in model.modules() if isinstance(module, nn.Linear))]
    for weight in weights:
        if weight.shape[0] > weight.shape[1]:
            weight.data = weight.data.t().contiguous().t()


def plan_product(weight_OI: Tensor, bias_O: Tensor | None, *, sliced: bool) -> Rows:
    """A function of rows (N, I) giving (N, O) as F.linear does; `sliced`: of one row, by all cores."""
    O, I = weight_OI.shape  # noqa: E741
    by_columns = weight_OI.t().is_contiguous()
    cores = torch.get_num_threads()
    # Sliced along the input each core has a whole row of outputs to add at the end, so there are no more than cores.
    most = min(cores if by_columns else SLICES_A_CORE * cores, weight_OI.numel() // SMALLEST_SLICE)
    K = next((k for k in range(most, 1, -1) if (I if by_columns else O) % k == 0), 1)
    if not sliced or K == 1 or cores == 1 or weight_OI.dtype != torch.float32:
        return partial(F.linear, weight=weight_OI, bias=bias_O)
    weight = weight_OI.detach()
    weight_KIO = weight.t().view(K, I // K, O) if by_columns else weight.view(K, O // K, I).transpose(1, 2)

    def multiply(x_1I: Tensor) -> Tensor:
        if by_columns:
            y_1O = torch.bmm(x_1I.view(K, 1, I // K), weight_KIO).sum(0)
        else:
            y_1O = torch.bmm(x_1I.expand(K, 1, I), weight_KIO).view(1, O)
        return y_1O if bias_O is None else y_1O.add_(bias_O)

    return multiply
