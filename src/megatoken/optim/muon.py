"""Muon: orthogonalized momentum for hidden matrices (Jordan et al. 2024), AdamW for the rest.

If U S V^T is the singular value decomposition of a hidden matrix's momentum, its update is
approximately U V^T times sqrt(max(1, rows / columns)), computed by five steps of a Newton-Schulz
iteration. Layer outputs then change by the same amount at any width, so one learning rate fits all
widths (Yang et al. 2023; Bernstein 2025). Queries, keys and values are treated as separate
matrices, although one parameter holds them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatoken.base.config.schema import OptimConfig
from megatoken.base.system.torch_compat import follow_found_inf, step_inner
from megatoken.model.gpt import GPT
from megatoken.optim.costs import ORTHOGONALIZE_STEPS, STATE_BYTES
from megatoken.optim.optimizer import (
    Matrices,
    MatrixFn,
    MatrixOptimizer,
    OptimizerSpec,
    ParamGroup,
    build_adamw,
)

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of a x + b x^3 + c x^5 (Jordan et al. 2024)
EPS = 1e-7  # the smallest norm to divide by
# Elements per batched matmul: few enough for a CPU's caches, enough to keep a GPU busy.
BATCH_NUMBERS = {"cpu": 1 << 19, "cuda": 1 << 26}


@dataclass(frozen=True)
class WholeMatrices:
    """`Matrices` of a single process, without communication.

    rows: by parameter name, the number of rows of each matrix in it, as from
    `list_hidden_matrices`.
    """

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
    """Map the name of each hidden weight to a list with the number of rows of each matrix in it.

    The list has one entry, except for the weight that holds queries, keys and values.
    """
    rows: dict[str, list[int]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "head":
            rows[f"{name}.weight"] = [module.out_features]
            if isinstance(model, GPT) and name.endswith("attention.qkv"):
                rows[f"{name}.weight"] = model.config.qkv_rows
    return rows


def orthogonalize(matrices: list[Tensor], *, equal_rows: bool = False) -> list[Tensor]:
    """Return approximately U V^T sqrt(max(1, rows / columns)) for each matrix U S V^T.

    equal_rows: whether to then scale all rows to their root mean square norm.
    """
    wide = [each if each.shape[0] <= each.shape[1] else each.mT for each in matrices]
    batches: dict[torch.Size, list[int]] = {}
    for index, matrix in enumerate(wide):
        batches.setdefault(matrix.shape, []).append(index)
    results = list(matrices)
    for shape, indices in batches.items():
        numbers = BATCH_NUMBERS.get(wide[indices[0]].device.type, 1 << 26)
        size = max(1, numbers // shape.numel())
        for start in range(0, len(indices), size):
            batch = indices[start : start + size]
            stacked = torch.stack([wide[index] for index in batch])
            for index, result_RC in zip(batch, _newton_schulz(stacked), strict=True):
                result = result_RC if wide[index] is matrices[index] else result_RC.mT
                scale = max(1.0, result.shape[0] / result.shape[1]) ** 0.5
                results[index] = result if scale == 1 else result * scale
    return [_equalize_rows(result) for result in results] if equal_rows else results


def _equalize_rows(matrix: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(matrix, dim=1, keepdim=True, dtype=torch.float32)
    scale: Tensor = norms.square().mean().sqrt() / norms.clamp(min=EPS)
    return matrix * scale.to(matrix.dtype)


def _newton_schulz(x_NRC: Tensor) -> Tensor:
    """Change the singular values of N matrices (R, C), R <= C, to values between 0.7 and 1.2."""
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


def open_whole_matrices(model: nn.Module) -> WholeMatrices:
    """Return the hidden matrices of an unsharded model."""
    return WholeMatrices(list_hidden_matrices(model))


class Muon(MatrixOptimizer):
    """Muon with Nesterov momentum and decoupled weight decay for one group, AdamW for the others.

    adamw: optimizer of all other parameters; its groups and state become part of this one's.
    group: a dict with the keys `params`, `weight_decay` and optionally `lr_scale`. `params` are the
        hidden weights in the order of `matrices.names`.
    """

    def __init__(
        self,
        adamw: torch.optim.AdamW,
        group: dict[str, Any],
        matrices: Matrices,
        *,
        lr: float,
        momentum: float,
        cautious_decay: bool,
        equal_rows: bool = False,
    ) -> None:
        super().__init__([*adamw.param_groups, group | {"momentum": momentum}], {"lr": lr})
        self.adamw = adamw
        self.matrices = matrices
        self.cautious_decay = cautious_decay
        self.equal_rows = equal_rows
        self.state = adamw.state
        for param in self.param_groups[-1]["params"]:
            self.state[param]["momentum_buffer"] = torch.zeros_like(param)
        follow_found_inf(self, adamw)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters; a hidden matrix without a gradient is updated as if it were 0."""
        step_inner(self, self.adamw)
        found_inf = getattr(self, "found_inf", None)
        grad_scale = getattr(self, "grad_scale", None)
        group = self.param_groups[-1]
        is_bad = None if found_inf is None else found_inf > 0
        updates = []
        for param in group["params"]:
            gradient = torch.zeros_like(param) if param.grad is None else param.grad
            gradient = gradient if grad_scale is None else gradient / grad_scale
            momentum = self.state[param]["momentum_buffer"]
            new_momentum = momentum.lerp(gradient, 1 - group["momentum"])
            updates.append(gradient.lerp(new_momentum, group["momentum"]).to(self.matrices.dtype))
            if is_bad is not None:
                new_momentum = torch.where(is_bad, momentum, new_momentum)
            momentum.copy_(new_momentum)
        function = partial(orthogonalize, equal_rows=self.equal_rows)
        for param, update in zip(
            group["params"], self.matrices.map(function, updates), strict=True
        ):
            decay = group["lr"] * group["weight_decay"]
            if self.cautious_decay:
                new_param = param - decay * param * (param * update >= 0)
            else:
                new_param = param * (1 - decay)
            new_param.sub_(update, alpha=group["lr"])
            param.copy_(new_param if is_bad is None else torch.where(is_bad, param, new_param))


def build_muon(groups: list[ParamGroup], optim: OptimConfig, implementation: str) -> Muon:
    """Build Muon for the last group and AdamW for the others.

    Their learning rates keep the ratio of `optim.matrix_lr` to `optim.lr`.
    """
    *others, hidden = groups
    hidden["lr_scale"] = optim.matrix_lr / optim.lr if optim.lr else 1.0
    matrices = hidden.pop("matrices")
    return Muon(
        build_adamw(others, optim, implementation),
        hidden,
        matrices,
        lr=optim.lr,
        momentum=optim.momentum,
        cautious_decay=optim.cautious_decay,
        equal_rows=optim.equal_rows,
    )


MUON = OptimizerSpec(build=build_muon, bytes_per_param=STATE_BYTES["muon"], hidden_group=True)
