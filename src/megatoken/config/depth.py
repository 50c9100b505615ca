"""A compute-optimal run from one number: `depth-N` is a recipe for every number N of layers.

It is the recipe modern-124m with the sizes, length, batch and rate that follow from N by published rules, which the
origins of the values and the notes of the recipe repeat. C is the run's FLOPs without the vocabulary, (72 L d^2 +
12 L d T) a token, as Bi et al. count them. Rates follow from modern-124m's.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from megatoken.config.presets import PRESETS
from megatoken.errors import ConfigError

RECIPE = "modern-124m"  # has all other settings
NAME = re.compile(r"depth-(\d+)")
DEEPEST = 200
WIDTH, SOURCE_OF_WIDTH = 64, "64 a layer, as nanochat (Karpathy 2025)"
TOKENS_PER_WEIGHT = 20
CHINCHILLA = (
    "20 for each weight in matrix products (Hoffmann et al. 2022), counted with GPT-2's vocabulary"
)
DEEPSEEK = "Bi et al. 2024 (DeepSeek LLM)"
# Of modern-124m, and its width and batch; what rates do with both: docs/recipes.md, Muon
RATE, MATRIX_RATE, OWN_WIDTH, OWN_BATCH = 4e-3, 0.02, 768, 524288
BATCH_ROOT, WIDTH_ROOT = (
    "the root of the batch (Malladi et al. 2022)",
    "the inverse root of the width (nanochat)",
)


class Derived(NamedTuple):
    """A setting, its value, and the rule it follows."""

    key: str
    value: str
    rule: str


def derive_run(depth: int) -> Iterator[Derived]:
    """The settings that follow from the number of layers. Raises ConfigError for one that no run has."""
    if not 1 <= depth <= DEEPEST:
        raise ConfigError(
            f"no run is {depth} layers deep", "recipe", f"give 1 to {DEEPEST}, such as depth-12"
        )
    d = WIDTH * depth
    d_head = 128 if d % 128 == 0 else 64
    model = replace(PRESETS[RECIPE], n_layer=depth, d_model=d, n_head=d // d_head)
    weights = 12 * depth * d**2 + model.vocab_size * d
    tokens = TOKENS_PER_WEIGHT * weights
    flops = (72 * depth * d**2 + 12 * depth * d * model.seq_len) * tokens
    batch = 0.2920 * flops**0.3271
    rounded = 2 ** max(round(math.log2(batch)), math.ceil(math.log2(model.seq_len)))
    root = math.sqrt(rounded / OWN_BATCH)
    yield Derived("model.preset", RECIPE, "its switches")
    yield Derived("model.n_layer", str(depth), "the depth")
    yield Derived("model.d_model", str(d), SOURCE_OF_WIDTH)
    yield Derived("model.n_head", str(model.n_head), f"heads of {d_head}")
    yield Derived("budget.tokens", str(tokens), CHINCHILLA)
    yield Derived(
        "budget.batch_tokens",
        str(rounded),
        f"0.2920 C^0.3271 = {batch:,.0f}, C = {flops:.2e}: {DEEPSEEK}",
    )
    yield Derived("optim.matrix_lr", f"{MATRIX_RATE * root:.2e}", f"{RECIPE}'s times {BATCH_ROOT}")
    rate = RATE * root * math.sqrt(OWN_WIDTH / d)
    yield Derived("optim.lr", f"{rate:.2e}", f"{RECIPE}'s times {BATCH_ROOT} and {WIDTH_ROOT}")
