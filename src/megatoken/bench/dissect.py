"""The parts of one training step, each as a call that can be timed alone.

In: a workload. Out: every part with its number of calls in a step, and the FLOPs or bytes that it cannot do without.
What the model's modules are given is recorded in a forward of a real batch, so shapes, strides, dtypes and forms of
the operations are the step's own; a backward differentiates a graph that is kept. Absent: times (parts.py), compiling.

FLOPs of all parts add up to 6 N + 6 L d T a token (model/count.py, causal): padding of the vocabulary, biases and what
a form does twice are no work that has to be done. Bytes, at the sizes seen: element-wise operations read and write
each of their tensors once; the loss reads the logits and writes their gradient; embedding reads and writes a row a
token, and its gradient is read and added to such rows; the optimizer reads weight, gradient (twice: clipping needs its
norm first) and both moments, and writes the first and the last two: 32 bytes a parameter; a batch is read as uint16
and written as int64, twice.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatoken.bench.workload import Workload
from megatoken.data.dataset import open_dataset
from megatoken.data.loader import Loader
from megatoken.model.gpt import Block, Linear
from megatoken.model.kernels import ATTENTION, GELU, LINEAR, LOSS, NORM, Kernels
from megatoken.model.kernels.gelu import add_bias_gelu
from megatoken.model.loss import cross_entropy
from megatoken.train.step import update_checked, update_watched

UPDATE_BYTES = 32  # a parameter
SPREAD_BYTES = 12  # a parameter, of masters: the gradient from 2 bytes to 4, the weight from 4 to 2
BATCH_BYTES = 2 + 2 * 8  # a token
Differentiable = tuple[str, int, Callable[[], Any], tuple[Tensor, ...]]  # name, calls, what is computed, its leaves
HEAD = ("head forward", "head input gradient", "head weight gradient")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Something a step does `calls` times. flops and moved_bytes are those of one call; one of them is 0.

    less: parts that a call contains and that are counted on their own.
    """

    name: str
    group: str
    calls: int
    call: Callable[[], object]
    flops: int = 0
    moved_bytes: int = 0
    less: tuple[str, ...] = ()

    @property
    def bound(self) -> str:
        return "compute" if self.flops else "memory"


@dataclass(frozen=True, slots=True)
class Watched:
    """What modules of the first block, and the last norm, were given and made of it, by name ("mlp.up")."""

    given: dict[str, Tensor]
    made: dict[str, Tensor]


def list_parts(workload: Workload, shards: Path) -> Iterator[Part]:
    """Every part of a step whose batch is one micro-batch. shards: a dataset of at least one batch."""
    seen = watch_forward(workload)
    yield from _list_products(workload, seen)
    yield from _list_head(workload, seen)
    yield from _list_attention(workload, seen)
    yield from _list_elementwise(workload, seen)
    yield from _list_embedding(workload)
    yield _make_update(workload)
    if workload.state.has_masters:
        yield _make_spreading(workload)
    yield _make_loading(workload, shards)


def watch_forward(workload: Workload) -> Watched:
    """Run the model on a batch of the step and keep what passes."""
    seen = Watched({}, {})

    def keep(name: str, module: nn.Module, given: tuple[Tensor, ...], made: Tensor | tuple[Tensor, ...]) -> None:
        last = made if isinstance(made, Tensor) else made[-1]  # a norm makes the stream, too
        seen.given[name], seen.made[name] = given[0].detach(), last.detach()

    model = workload.state.working
    hooks = [
        module.register_forward_hook(partial(keep, name.removeprefix("blocks.0.")))
        for name, module in model.named_modules()
        if name.startswith("blocks.0.") or name == "norm"
    ]
    try:
        with _cast(workload):
            model(workload.batch(0)[0])
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def read_kernels(workload: Workload) -> Kernels:
    """The forms that the workload computes with."""
    block, state = _first_block(workload), workload.state
    forms: tuple[tuple[str, dict[str, Any], object], ...] = (
        ("linear", LINEAR, block.attention.qkv.multiply),
        ("attention", ATTENTION, block.attention.attend),
        ("norm", NORM[block.norm1.kind], block.norm1.add_norm),
        ("gelu", GELU, block.mlp.activate),
        ("loss", LOSS, state.lose),
    )
    return Kernels(**{kind: next(name for name in table if table[name] is used) for kind, table, used in forms})


def draw_like(x: Tensor) -> Tensor:
    """Noise as small as gradients are, from a generator of its own."""
    noise = torch.Generator(x.device).manual_seed(0)
    return torch.randn(x.shape, dtype=x.dtype, device=x.device, generator=noise).mul_(1e-3)


def _cast(workload: Workload) -> AbstractContextManager[object]:
    """The context that train_step computes in."""
    return nullcontext() if workload.state.has_masters else workload.device.autocast()


def _differentiate(
    workload: Workload, compute: Callable[[], Any], leaves: tuple[Tensor, ...]
) -> tuple[Callable[[], Any], Callable[[], tuple[Tensor, ...]], Any]:
    """(forward as in training, its backward to the leaves, the output: a tensor or several)."""

    def forward() -> Any:
        with _cast(workload):
            return compute()

    y = forward()
    grad = tuple(draw_like(part) for part in y) if isinstance(y, tuple) else draw_like(y)
    return forward, lambda: torch.autograd.grad(y, leaves, grad, retain_graph=True), y


def _first_block(workload: Workload) -> Block:
    block = workload.state.working.blocks[0]
    assert isinstance(block, Block)
    return block


def _list_products(workload: Workload, seen: Watched) -> Iterator[Part]:
    """Of each linear layer of a block: forward with its bias, and either gradient (the weight's with the bias's).

    Forms written in Python make both gradients whoever asks: then they are one part.
    """
    block = _first_block(workload)
    layers = {"attention.qkv": block.attention.qkv, "attention.out": block.attention.out}
    for path, linear in (layers | {"mlp.up": block.mlp.up, "mlp.down": block.mlp.down}).items():
        given, name = seen.given[path], path.partition(".")[2]
        flops = 2 * given.numel() * linear.out_features
        forward, both, y = _multiply(workload, linear, given, of_input=True, of_weight=True)
        calls: list[tuple[str, Callable[[], object], int]] = [("forward", forward, 1)]
        if _is_written_in_python(y):
            calls += [("gradients", both, 2)]
        else:
            calls += [("input gradient", _multiply(workload, linear, given, of_input=True, of_weight=False)[1], 1)]
            calls += [("weight gradient", _multiply(workload, linear, given, of_input=False, of_weight=True)[1], 1)]
        for kind, call, times in calls:
            yield Part(
                name=f"{name} {kind}",
                group="products",
                calls=workload.shape.n_layer,
                call=call,
                flops=times * flops,
            )


def _is_written_in_python(y: Tensor) -> bool:
    return isinstance(y.grad_fn, torch.autograd.function.BackwardCFunction)


def _multiply(
    workload: Workload, linear: Linear, given: Tensor, *, of_input: bool, of_weight: bool
) -> tuple[Callable[[], Tensor], Callable[[], tuple[Tensor, ...]], Tensor]:
    """A linear layer's forward, its backward to what is asked for, and its output."""
    x = given.clone().requires_grad_(of_input)
    weights = [w.detach().requires_grad_(of_weight) for w in (linear.weight, linear.bias)]
    leaves = ((x,) if of_input else ()) + (tuple(weights) if of_weight else ())
    return _differentiate(workload, lambda: linear.multiply(x, *weights), leaves)


def _list_head(workload: Workload, seen: Watched) -> Iterator[Part]:
    """The output layer's products, in the chunks that the loss makes, and all else that the loss does."""
    unembedding, plan, shape = workload.state.working.unembedding, workload.plan, workload.shape
    dtype = workload.device.dtype
    hidden = seen.made["norm"].clone().requires_grad_()
    targets = workload.batch(0)[1]
    h_NC, w_VC = hidden.detach().flatten(0, 1).to(dtype), unembedding.detach().to(dtype)
    chunks = torch.split(h_NC, plan.loss_chunk or len(h_NC))
    d_NV = draw_like(chunks[0] @ w_VC.T)  # serves every chunk: the last may have fewer rows
    calls: tuple[Callable[[Tensor], Tensor], ...] = (
        lambda h: F.linear(h, w_VC),
        lambda h: d_NV[: len(h)] @ w_VC,
        lambda h: d_NV[: len(h)].T @ h,
    )
    flops = 2 * h_NC.numel() * shape.vocab_size
    for name, product in zip(HEAD, calls, strict=True):
        yield Part(name=name, group="products", calls=1, call=partial(_visit, product, chunks), flops=flops)

    def find_loss() -> object:
        with _cast(workload):
            total, counted = cross_entropy(
                hidden,
                unembedding,
                targets,
                vocab_size=shape.vocab_size,
                chunk=plan.loss_chunk,
                lose=workload.state.lose,
            )
        return torch.autograd.grad(total / counted, (hidden, unembedding))

    moved = 2 * len(h_NC) * shape.vocab_size * dtype.itemsize
    yield Part(name="loss without products", group="loss", calls=1, call=find_loss, moved_bytes=moved, less=HEAD)


def _visit(product: Callable[[Tensor], Tensor], chunks: tuple[Tensor, ...]) -> None:
    for chunk in chunks:
        product(chunk)


def _list_attention(workload: Workload, seen: Watched) -> Iterator[Part]:
    """From the packed queries, keys and values to the rows that the output product takes."""
    attention, shape = _first_block(workload).attention, workload.shape
    packed = seen.made["attention.qkv"].clone().requires_grad_()
    B, T, _ = packed.shape

    def attend() -> Tensor:
        q, k, v = packed.view(B, T, 3, shape.n_head, shape.d_head).permute(2, 0, 3, 1, 4)
        y: Tensor = attention.attend(q, k, v, 0.0)
        return y.transpose(1, 2).reshape(B, T, shape.d_model)

    forward, backward, _ = _differentiate(workload, attend, (packed,))
    flops = 2 * B * T * T * shape.d_model  # two products of T x T x d, half of each below the diagonal
    for name, call, times in (("attention forward", forward, 1), ("attention backward", backward, 2)):
        yield Part(name=name, group="attention", calls=shape.n_layer, call=call, flops=times * flops)


def _list_elementwise(workload: Workload, seen: Watched) -> Iterator[Part]:
    """GELU, norms, and the residual stream, x + f(x) forward and two gradients that meet backward; by our fused
    kernels the update joins the stream within the norm, and the bias's gradient is GELU's."""
    block, layers, kernels = _first_block(workload), workload.shape.n_layer, read_kernels(workload)
    x = seen.given["norm1"].clone().requires_grad_()
    u = seen.made["mlp.up"].clone().requires_grad_()
    branch = seen.made["attention.out"].clone().requires_grad_()
    assert block.norm1.bias is not None  # these are the parts of a GPT-2
    norm, bias = (block.norm1.weight, block.norm1.bias), block.mlp.up.bias
    activation: Differentiable = ("GELU", layers, lambda: F.gelu(u, approximate="tanh"), (u,))
    if kernels.gelu != "torch":
        activation = ("bias and GELU", layers, lambda: add_bias_gelu(u, bias), (u, bias))
    plain: Differentiable = ("norm", 2 * layers + 1, lambda: block.norm1(x)[1], (x, *norm))
    joined: Differentiable = ("add and norm", 2 * layers, lambda: block.norm1(x, branch), (x, branch, *norm))
    fused = kernels.norm != "torch"
    for name, calls, compute, leaves in (activation, joined if fused else plain):
        forward, backward, y = _differentiate(workload, compute, leaves)
        made = sum(part.nbytes for part in (y if isinstance(y, tuple) else (y,)))
        moved = made + sum(leaf.nbytes for leaf in leaves if leaf.dim() > 1)
        yield Part(name=f"{name} forward", group="element-wise", calls=calls, call=forward, moved_bytes=moved)
        moved += leaves[0].nbytes
        yield Part(name=f"{name} backward", group="element-wise", calls=calls, call=backward, moved_bytes=moved)
    if fused:
        return
    one, other = draw_like(x), draw_like(x)
    for name, call, moved in (
        ("residual add", lambda: x + block.drop(branch), 2 * x.nbytes + branch.nbytes),
        ("residual gradients", lambda: one.add_(other), 3 * one.nbytes),
    ):
        yield Part(name=name, group="element-wise", calls=2 * layers, call=call, moved_bytes=moved)


def _list_embedding(workload: Workload) -> Iterator[Part]:
    """Look-ups, and their gradient, which torch makes as large as the vocabulary before it is added to the head's."""
    model, ids = workload.state.working, workload.batch(0)[0]
    tokens, positions = model.tokens.weight, model.positions
    assert positions is not None
    places = torch.arange(ids.shape[1], device=ids.device)
    forward, backward, y = _differentiate(
        workload, lambda: model.tokens(ids) + positions(places), (tokens, positions.weight)
    )
    of_head = torch.zeros_like(tokens, requires_grad=False)
    yield Part(name="embedding forward", group="embedding", calls=1, call=forward, moved_bytes=2 * y.nbytes)
    yield Part(
        name="embedding backward",
        group="embedding",
        calls=1,
        call=lambda: of_head.add_(backward()[0]),
        moved_bytes=3 * y.nbytes,
    )


def _make_update(workload: Workload) -> Part:
    """Norm, clip, optimizer: what train_step does after its backward. At a rate of 0, so that weights stay finite."""
    state, clip = workload.state, workload.plan.clip
    parameters = [p for p in state.model.parameters() if p.requires_grad]
    gradients = [draw_like(p.detach()) for p in parameters]

    def update() -> None:
        for group in state.optimizer.param_groups:
            group["lr"] = 0.0  # the next step sets its own
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        norm = torch.nn.utils.get_total_norm(gradients)
        if state.watches_itself:
            update_watched(state, clip, norm)
        else:
            update_checked(state, clip, parameters, norm, norm)
        state.optimizer.zero_grad(set_to_none=True)

    moved = UPDATE_BYTES * sum(p.numel() for p in parameters)
    return Part(name="clip and optimizer", group="optimizer", calls=1, call=update, moved_bytes=moved)


def _make_spreading(workload: Workload) -> Part:
    """Low-precision gradients to the masters, and the masters' weights back."""
    state = workload.state
    gradients = [draw_like(p.detach()) for p in state.working.parameters()]

    def spread() -> None:
        for parameter, gradient in zip(state.working.parameters(), gradients, strict=True):
            parameter.grad = gradient
        state.collect_gradients()
        state.spread_weights()
        state.optimizer.zero_grad(set_to_none=True)

    moved = SPREAD_BYTES * sum(gradient.numel() for gradient in gradients)
    return Part(name="masters", group="optimizer", calls=1, call=spread, moved_bytes=moved)


def _make_loading(workload: Workload, shards: Path) -> Part:
    """The loader's batch as tensors on the device; a run makes it in a thread meanwhile."""
    tokens, seq_len = workload.plan.batch_tokens, workload.shape.seq_len
    loader = Loader(open_dataset(shards).train, seq_len=seq_len, batch_seqs=tokens // seq_len, seed=0)
    steps = count()

    def load() -> tuple[Tensor, ...]:
        rows = loader.batch(next(steps))
        halves = (rows[:, :-1], rows[:, 1:])
        return tuple(torch.from_numpy(half.astype(np.int64)).to(workload.device.place) for half in halves)

    return Part(name="loading a batch", group="data", calls=1, call=load, moved_bytes=BATCH_BYTES * tokens)
