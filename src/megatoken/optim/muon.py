"""Muon: momentum whose matrices are orthogonalized (Jordan et al. 2024), beside AdamW for all other parameters.

The update of a hidden layer's matrix is U V^T of its momentum's singular value decomposition U S V^T, approximately, by
five steps of a Newton-Schulz iteration, times sqrt(max(1, rows / columns)): it changes what comes out of a layer by as
much at any width, so that one learning rate serves all (Yang et al. 2023; Bernstein 2025). Queries, keys and values are
three matrices, although one product computes them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from megatoken.model.gpt import GPT
from megatoken.optim.costs import ORTHOGONALIZE_STEPS
from megatoken.system.torch_compat import follow_found_inf, step_inner

COEFFICIENTS = (
    3.4445,
    -4.7750,
    2.0315,
)  # of the iteration's polynomial a x + b x^3 + c x^5 (Jordan et al. 2024)
EPS = 1e-7  # the smallest norm to divide by
# Numbers in one batched product: what a CPU's caches hold, and what fills a GPU and takes little of its memory.
BATCH_NUMBERS = {"cpu": 1 << 19, "cuda": 1 << 26}

MatrixFn = Callable[
    [list[Tensor]], list[Tensor]
]  # from whole matrices to as many of the same shapes


class Matrices(Protocol):
    """Access to the whole matrices of hidden layers, of which this process may have slices.

    names: of the parameters that hold them, those with a part in this process. dtype: in which they are computed.
    """

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def map(self, function: MatrixFn, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Apply `function` to the whole matrices of which `tensors` are the local parts, in the order of `names`.

        Return this process's parts of the results. Processes share the work: `function` gets some of the matrices.
        All must call it.
        """


@dataclass(frozen=True, slots=True)
class WholeMatrices:
    """`Matrices` of a process that has all of them. rows: of each parameter, of the matrices packed in it."""

    rows: Mapping[str, Sequence[int]]
    dtype: torch.dtype = torch.float32

    @property
    def names(self) -> Sequence[str]:
        return list(self.rows)

    def map(self, function: MatrixFn, tensors: Sequence[Tensor]) -> list[Tensor]:
        packed = list(self.rows.values())
        pieces = [
            piece
            for tensor, rows in zip(tensors, packed, strict=True)
            for piece in torch.split(tensor, list(rows))
        ]
        results = iter(function(pieces))
        return [
            next(results) if len(rows) == 1 else torch.cat([next(results) for _ in rows])
            for rows in packed
        ]


def list_hidden_matrices(model: nn.Module) -> dict[str, list[int]]:
    """The weights of all linear layers but the output layer, by name: the rows of each matrix packed in it."""
    rows: dict[str, list[int]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "head":
            packs = isinstance(model, GPT) and name.endswith("attention.qkv")
            rows[f"{name}.weight"] = (
                cast(GPT, model).config.qkv_rows if packs else [module.out_features]
            )
    return rows


def orthogonalize(matrices: list[Tensor]) -> list[Tensor]:
    """U V^T sqrt(max(1, rows / columns)) of each matrix, approximately, in its dtype; equal shapes in batches."""
    batches: dict[tuple[int, int], list[int]] = {}
    for index, matrix in enumerate(matrices):
        rows, columns = sorted(matrix.shape)
        batches.setdefault((rows, columns), []).append(index)
    results = list(matrices)
    for (rows, columns), indices in batches.items():
        size = max(
            1, BATCH_NUMBERS.get(matrices[indices[0]].device.type, 1 << 26) // (rows * columns)
        )
        for start in range(0, len(indices), size):
            batch = indices[start : start + size]
            wide = [
                matrices[index] if matrices[index].shape[0] == rows else matrices[index].mT
                for index in batch
            ]
            for index, result_RC in zip(batch, _newton_schulz(torch.stack(wide)), strict=True):
                result = result_RC if matrices[index].shape[0] == rows else result_RC.mT
                scale = max(1.0, result.shape[0] / result.shape[1]) ** 0.5
                results[index] = result if scale == 1 else result * scale
    return results


def _newton_schulz(x_NRC: Tensor) -> Tensor:
    """Singular values of N matrices R x C, R at most C, moved to between 0.7 and 1.2."""
    a, b, c = COEFFICIENTS
    norm_N = torch.linalg.vector_norm(
        torch.linalg.vector_norm(x_NRC, dim=-1, dtype=torch.float32), dim=-1
    )
    x_NRC = x_NRC / norm_N.clamp(min=EPS)[:, None, None].to(x_NRC.dtype)
    for _ in range(ORTHOGONALIZE_STEPS):
        gram_NRR = x_NRC @ x_NRC.mT
        odd_NRR = torch.baddbmm(gram_NRR, gram_NRR, gram_NRR, beta=b, alpha=c)
        x_NRC = torch.baddbmm(x_NRC, odd_NRR, x_NRC, beta=a)
    return x_NRC


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum and decoupled weight decay for one group, AdamW for the others.

    adamw: over all other parameters, whose groups and state are also this optimizer's. group: `params` in the order
    of `matrices.names`, and `weight_decay`. As torch's fused optimizers it divides gradients by `self.grad_scale` and
    leaves everything as it is where `self.found_inf` is 1, if these tensors are set.
    """

    def __init__(
        self,
        adamw: torch.optim.Optimizer,
        group: dict[str, Any],
        matrices: Matrices,
        *,
        lr: float,
        momentum: float,
        cautious_decay: bool,
    ) -> None:
        super().__init__([*adamw.param_groups, group | {"momentum": momentum}], {"lr": lr})
        self.adamw, self.matrices, self.cautious_decay = adamw, matrices, cautious_decay
        self.state = adamw.state
        for param in self.param_groups[-1]["params"]:
            self.state[param]["momentum_buffer"] = torch.zeros_like(param)
        follow_found_inf(self, adamw)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters; one without a gradient as by a gradient of 0."""
        found_inf, grad_scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        step_inner(self, self.adamw)
        group, bad = self.param_groups[-1], None if found_inf is None else found_inf > 0
        updates = []
        for param in group["params"]:
            gradient = torch.zeros_like(param) if param.grad is None else param.grad
            gradient = gradient if grad_scale is None else gradient / grad_scale
            before = self.state[param]["momentum_buffer"]
            after = before.lerp(gradient, 1 - group["momentum"])
            updates.append(gradient.lerp(after, group["momentum"]).to(self.matrices.dtype))
            before.copy_(after if bad is None else torch.where(bad, before, after))
        for param, update in zip(
            group["params"], self.matrices.map(orthogonalize, updates), strict=True
        ):
            decay = group["lr"] * group["weight_decay"]
            if self.cautious_decay:
                after = param - decay * param * (param * update >= 0)
            else:
                after = param * (1 - decay)
            after.sub_(update, alpha=group["lr"])
            param.copy_(after if bad is None else torch.where(bad, param, after))
