"""Derive a compute-optimal run from its number of layers: the recipes `depth-N`.

These recipes are modern-124m, except that sizes, length, batch and learning rates are computed from
N by published rules. The rules use C, the FLOPs of the run without embedding and output layer,
counted as (72 L d^2 + 12 L d T) per token, as in Bi et al. Learning rates are scaled from those of
modern-124m (docs/recipes.md, Muon).
"""

import math
import re
from collections.abc import Iterator

from megatoken.base.config.presets import PRESETS
from megatoken.base.errors import ConfigError

RECIPE = "modern-124m"  # the source of all other settings
NAME = re.compile(r"depth-(\d+)")
DEEPEST = 200
WIDTH_PER_LAYER = 64
TOKENS_PER_WEIGHT = 20
# Values of modern-124m, from which others are scaled.
LR = 4e-3
MATRIX_LR = 0.02
WIDTH = 768
BATCH_TOKENS = 524288


def derive_run(depth: int) -> Iterator[tuple[str, str, str]]:
    """Yield each setting of a run with `depth` layers as (key, value, rule it follows from).

    Raises ConfigError if the depth is out of range.
    """
    if not 1 <= depth <= DEEPEST:
        raise ConfigError(f"no recipe of {depth} layers", "recipe", f"use depth-1 to -{DEEPEST}")
    d = WIDTH_PER_LAYER * depth
    d_head = 128 if d % 128 == 0 else 64
    seq_len = PRESETS[RECIPE].seq_len
    weights = 12 * depth * d**2 + PRESETS[RECIPE].vocab_size * d
    tokens = TOKENS_PER_WEIGHT * weights
    flops = (72 * depth * d**2 + 12 * depth * d * seq_len) * tokens
    batch = 0.2920 * flops**0.3271
    batch_tokens = 2 ** max(round(math.log2(batch)), math.ceil(math.log2(seq_len)))
    matrix_lr = MATRIX_LR * math.sqrt(batch_tokens / BATCH_TOKENS)
    lr = LR * math.sqrt(batch_tokens / BATCH_TOKENS) * math.sqrt(WIDTH / d)
    by_batch = f"{RECIPE}'s x square root of the batch (Malladi et al. 2022)"
    yield "model.preset", RECIPE, "switches of the architecture"
    yield "model.n_layer", str(depth), "depth"
    yield "model.d_model", str(d), "64 per layer, as in nanochat (Karpathy 2025)"
    yield "model.n_head", str(d // d_head), f"heads of {d_head}"
    yield "budget.tokens", str(tokens), "20 per weight in matrix products (Hoffmann et al. 2022)"
    rule = f"0.2920 C^0.3271 = {batch:,.0f} for C = {flops:.2e} (Bi et al. 2024, DeepSeek LLM)"
    yield "budget.batch_tokens", str(batch_tokens), rule
    yield "optim.matrix_lr", f"{matrix_lr:.2e}", by_batch
    yield "optim.lr", f"{lr:.2e}", f"{by_batch}, / square root of the width (nanochat)"
