"""A model, a device and a plan that train in milliseconds, for many tests."""

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from megatoken.base.config.model_config import ModelConfig
from megatoken.base.config.schema import Config, OptimConfig, build_config
from megatoken.base.system.device import Device
from megatoken.data.dataloader import Batch
from megatoken.distributed.parallel_dims import UNSHARDED, ParallelDims
from megatoken.model.gpt import GPT
from megatoken.model.masks import TreeMask
from megatoken.train.state import StepConfig, TrainState, build_state, build_step_config

TINY_GPT = ModelConfig(n_layer=2, n_head=2, d_model=32, d_ff=64, vocab_size=97, seq_len=16)
TINY_LLAMA = replace(
    TINY_GPT,
    n_kv_head=1,
    d_ff=96,
    norm="rmsnorm",
    pos_emb="rotary",
    mlp="swiglu",
    bias=False,
    rope_theta=100.0,
)
TINY_MODERN = replace(  # every switch but zero_init, under which most gradients begin at 0
    TINY_GPT, n_kv_head=1, norm="rmsnorm", pos_emb="rotary", mlp="relu2", bias=False, tie_embeddings=False,
    qk_norm=True, embedding_norm=True, residual_scales=True, value_embeddings=True, smear=True,
    backout=True, logit_softcap=5.0, window=5,
)  # fmt: skip
TINY_GEMMA = replace(
    TINY_LLAMA, head_dim=8, bias=True, bias_in="qkv", norm_position="both", mlp="geglu", qk_norm=True,
    embedding_scale=True, window=5, window_pattern="SS", rope_local_theta=50.0, rope_factor=4.0, rope_scaling="linear",
)  # fmt: skip
TINY_OLMO = replace(
    TINY_LLAMA, n_head=4, norm_position="post", qk_norm=True, qk_norm_over="width", nope_interval=2,
    rope_factor=4.0, rope_scaling="yarn", rope_high=32.0, rope_context=8,
)  # fmt: skip
CPU = Device(
    torch_device=torch.device("cpu"),
    name="cpu",
    precision="fp32",
    peak_flops=0.0,
    peak_source="unknown",
)


def tiny_config(**values: object) -> Config:
    keys = {"budget.steps": 10, "budget.batch_tokens": 8 * 16, "model.seq_len": 16}
    return build_config(keys | {key.replace("__", "."): value for key, value in values.items()})


def tiny_state(
    *,
    dropout: float = 0.0,
    seed: int = 1,
    optim: OptimConfig | None = None,
    implementation: str = "auto",
    model_config: ModelConfig = TINY_GPT,
    dims: ParallelDims = UNSHARDED,
) -> TrainState:
    model = GPT(replace(model_config, dropout=dropout), seed=seed)
    return build_state(
        model,
        replace(tiny_config(machine__adamw=implementation), optim=optim or OptimConfig()),
        CPU,
        dims,
    )


def tiny_step_config(micro_batch: int = 8, **values: object) -> StepConfig:
    return build_step_config(tiny_config(**values), epoch_tokens=1280, micro_batch=micro_batch)


def tiny_rows(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.randint(
        0, TINY_GPT.vocab_size, (8, 17), generator=torch.Generator().manual_seed(seed)
    )
    return rows[:, :-1], rows[:, 1:]


def tiny_batch(seed: int = 0) -> Batch:
    return Batch(*tiny_rows(seed))


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Draw normal values."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the error's norm divided by that of the exact values; 0 only if both are 0."""
    found, exact = found.detach().double(), exact.detach().double()
    return float((found - exact).norm() / exact.norm().clamp(min=1e-12))


def differentiate(
    fn: Callable[..., torch.Tensor],
    inputs: Iterable[torch.Tensor],
    dy: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """Return a function's output for the inputs, in their dtype or another, and its gradients.

    dy: gradient of the output; by default, drawn.
    """
    given = [x.detach().to(dtype or x.dtype).requires_grad_() for x in inputs]
    y = fn(*given)
    dy = draw(*y.shape, seed=9) if dy is None else dy
    return [y.detach(), *torch.autograd.grad(y, given, dy.to(y.dtype))]


def assert_tree_logits(model: GPT, ids: torch.Tensor) -> None:
    """Check that two rows with the same first three tokens have the logits of branches of a tree."""
    T = ids.shape[1]
    mask = torch.ones(2 * T - 3, 2 * T - 3, dtype=torch.bool).tril()
    mask[T:, 3:T] = False
    positions = torch.cat([torch.arange(T), torch.arange(3, T)])[None]
    tree_mask = TreeMask(positions_BT=positions, attn_mask=mask[None, None])
    tree = model.lm_head(model(torch.cat([ids[0], ids[1, 3:]])[None], tree_mask=tree_mask))[0]
    expected = torch.cat([model.logits(ids)[0], model.logits(ids)[1, 3:]])
    torch.testing.assert_close(tree, expected, rtol=1e-4, atol=1e-4)


def enlarge(model: GPT, factor: float = 6.0) -> GPT:
    """Enlarge the initial matrices of a model, so that its logits differ clearly."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(factor)
    return model


def learn(model: GPT, ids: torch.Tensor, steps: int = 3) -> list[float]:
    """Train on one batch with torch's AdamW; return the losses before each step and at the end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    for _ in range(steps + 1):
        loss = model.loss(ids[:, :-1], ids[:, 1:])
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses
