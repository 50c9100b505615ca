"""One new token through a GPT: what its modules compute, on rows instead of sequences and without their overhead.

In: the ids of N sequences' newest tokens, the cache of all earlier ones. Out: scores of the next token. Tests hold it
equal to the modules. Absent: gradients, prompts.

At batch 1 a token costs reading every weight once. MKL multiplies one row by a matrix on a single core; slices of the
weight multiplied as one batch are read by all cores. `turn_weights` makes the wide ones faster still.

Shapes: N sequences, C d_model, J heads of keys and values, G query heads that share one, D head width, F d_ff, I and O
a product's input and output, K slices, V vocabulary.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatoken.model.gpt import GPT, MLP, Block, Cache, Linear, Norm
from megatoken.model.kernels.gelu import multiply_silu
from megatoken.model.rotary import find_speeds, find_turns, turn

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

        def plan(linear: Linear) -> Rows:
            return plan_product(linear.weight, linear.bias, sliced=sliced)

        for block in model.blocks:
            assert isinstance(block, Block)
            attention, mlp = block.attention, block.mlp
            products = (plan(attention.qkv), plan(attention.out), plan_widening(mlp, plan), plan(mlp.down))
            self._layers.append((plan_norm(block.norm1), plan_norm(block.norm2), *products))
        self._norm = plan_norm(model.norm)
        self._head = plan_product(model.unembedding, None, sliced=sliced)
        rotary = model.positions is None
        self._speeds_P = find_speeds(model.shape, model.unembedding.device) if rotary else None

    def step(self, ids_N: Tensor, cache: Cache) -> Tensor:
        """Scores (N, real vocabulary) of what follows `ids_N`, which are added to the cache."""
        model, shape = self._model, self._model.shape
        N, C, D, heads = len(ids_N), shape.d_model, shape.d_head, [shape.n_head, shape.kv_heads, shape.kv_heads]
        x_NC, turns = F.embedding(ids_N, model.tokens.weight), None
        if model.positions is not None:
            x_NC = x_NC + model.positions.weight[cache.length]
        if self._speeds_P is not None:
            turns = find_turns(self._speeds_P * cache.length)
        for layer, (norm1, norm2, qkv, out, widen, down) in enumerate(self._layers):
            q, k, v = qkv(norm1(x_NC)).view(N, -1, 1, D).split_with_sizes(heads, dim=1)
            if turns is not None:
                q, k = turn(q, turns), turn(k, turns)
            k, v = cache.append(layer, k, v)
            # One new token sees everything, so queries that share a key can be rows of one query.
            y_NJGD = F.scaled_dot_product_attention(q.reshape(N, shape.kv_heads, -1, D), k, v)
            x_NC = x_NC + out(y_NJGD.reshape(N, C))
            x_NC = x_NC + down(widen(norm2(x_NC)))
        cache.length += 1
        return self._head(self._norm(x_NC))[:, : shape.vocab_size]


def plan_norm(norm: Norm) -> Rows:
    """The norm of rows, without the overhead of a module."""
    sizes = norm.weight.shape
    if norm.kind == "rmsnorm":
        return partial(F.rms_norm, normalized_shape=sizes, weight=norm.weight, eps=norm.eps)
    return partial(F.layer_norm, normalized_shape=sizes, weight=norm.weight, bias=norm.bias, eps=norm.eps)


def plan_widening(mlp: MLP, plan: Callable[[Linear], Rows]) -> Rows:
    """A function of rows (N, C) giving (N, F): what the MLP's wide products become."""
    up = plan(mlp.up)
    if mlp.gate is None:
        form = "none" if mlp.kind == "gelu-erf" else "tanh"
        return lambda x_NC: F.gelu(up(x_NC), approximate=form)
    gate = plan(mlp.gate)
    return lambda x_NC: multiply_silu(gate(x_NC), up(x_NC))


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
