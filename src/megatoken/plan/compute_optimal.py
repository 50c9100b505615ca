"""Find the compute-optimal model and number of tokens for a budget in dollars.

Source: Hoffmann et al. 2022.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatoken.base.config.model_config import ModelConfig
from megatoken.base.config.presets import PRESETS
from megatoken.base.config.schema import Config
from megatoken.base.errors import ConfigError
from megatoken.base.system.gpus import Gpu
from megatoken.model.flops import count_parameters
from megatoken.plan.estimate import TOKENS_PER_PARAMETER, Plan, optimal_tokens, plan_run
from megatoken.plan.loss_law import Law


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """The model size and number of tokens with the lowest loss for some FLOPs.

    loss: in nats, predicted by FITTED.
    """

    parameters: float
    tokens: float
    loss: float
    flops: float
    law: str
    nearest: str  # preset
    fitting: str  # nearest preset that fits on these GPUs and gives the speed


# Approach 3, on MassiveText.
FITTED = Law(("N", "D"), 1.69, factors=(406.4, 410.7), exponents=(0.34, 0.28))
SMALLEST_FITTED = 44e6  # parameters of their smallest model (table A9)


def split_compute(flops: float, law: str) -> tuple[float, float]:
    """Return the optimal (parameters, tokens) for `flops`, at 6 FLOPs per parameter and token.

    law: `chinchilla` (20 tokens per parameter) or `fitted` (the minimum of FITTED).
    """
    if law == "chinchilla":
        parameters = math.sqrt(flops / 6 / TOKENS_PER_PARAMETER)
        return parameters, flops / 6 / parameters
    return FITTED.best_split(flops)


def spend_budget(
    config: Config, dollars: float, plan: Plan, law: str, modes: Sequence[str]
) -> Optimum:
    """Return the compute-optimal model size and number of tokens for a budget in dollars.

    Assumes the speed of the nearest GPT-3 preset that fits on the GPUs of `plan`, and its first
    price. modes: kinds of activation checkpointing to choose from. Raises ConfigError if the price
    is unknown, no GPT-3 fits, or the model is smaller than those that the law was fitted to.
    """
    gpu, gpus = plan.gpu, plan.layout.gpus
    if not plan.prices:
        raise ConfigError(f"unknown price of {gpu.name}", "--budget", "give --price per GPU-hour")
    gpu_seconds = dollars / plan.prices[0] * 3600
    family = {name: model for name, model in PRESETS.items() if name.startswith("gpt3-")}
    plans = {name: plan_preset(config, model, gpu, gpus, modes) for name, model in family.items()}
    if not any(plan.fits for plan in plans.values()):
        raise ConfigError(f"no GPT-3 fits on {gpus:,} x {gpu.name}", "--budget", "use more --gpus")
    flops = 0.4 * gpu_seconds * gpu.peak_flops("bf16")
    for _ in range(4):  # speed and size depend on each other
        parameters, _ = split_compute(flops, law)
        ratios = {name: count_parameters(model) / parameters for name, model in family.items()}
        nearest = sorted(ratios, key=lambda name: max(ratios[name], 1 / ratios[name]))
        fitting = next(name for name in nearest if plans[name].fits)
        rate = plans[fitting].tokens_per_second / gpus
        flops = 6 * count_parameters(family[fitting]) * rate * gpu_seconds
    parameters, tokens = split_compute(flops, law)
    if parameters < SMALLEST_FITTED:
        what = f"${dollars:g} buys {parameters:,.0f} parameters, fewer than the law was fitted to"
        raise ConfigError(what, "--budget", f"give enough for {SMALLEST_FITTED:,.0f} parameters")
    return Optimum(
        parameters=parameters,
        tokens=tokens,
        loss=FITTED.loss(parameters, tokens),
        flops=flops,
        law=law,
        nearest=nearest[0],
        fitting=fitting,
    )


def plan_preset(
    config: Config, model: ModelConfig, gpu: Gpu, gpus: int, modes: Sequence[str]
) -> Plan:
    """Plan another model with about the config's batch, rounded to divide among the GPUs."""
    seqs = max(config.budget.batch_tokens // model.seq_len, gpus) // gpus * gpus
    budget = replace(config.budget, batch_tokens=seqs * model.seq_len)
    sized = replace(config, model=model, budget=budget)
    return plan_run(sized, gpu, gpus, tokens=optimal_tokens(model), modes=modes)
