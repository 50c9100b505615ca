"""Compare preference and policy losses with trl's code on random numbers.

    python benchmarks/trl_oracle.py [--ppo FILE]

DPO and GRPO: `_compute_loss` of the installed trl's trainers. PPO: FILE is ppo_trainer.py of trl
1.12.0 (trl/experimental/ppo in its wheel), the last release that has the file; its statements for
GAE and value clipping are run. Prints one JSON line: the largest differences of losses, rewards and
gradients.
"""

import argparse
import json
import textwrap
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatoken.posttrain.losses import pairwise_loss
from megatoken.posttrain.policy_loss import (
    clipped_loss,
    clipped_value_loss,
    gae,
    group_advantages,
    kl_k3,
    moments,
    whiten,
)

B, T, GROUP, ROUNDS = 16, 12, 4, 50
ACCELERATOR = SimpleNamespace(
    gather=lambda x: x,
    gather_for_metrics=lambda x: x,
    reduce=lambda x, reduction: x,
    num_processes=1,
    device="cpu",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ppo", type=Path)
    options = parser.parse_args()
    worst: dict[str, float] = defaultdict(float)

    def compare(name: str, ours: Tensor, theirs: Tensor) -> None:
        worst[name] = max(
            worst[name], float((ours.detach().double() - theirs.detach().double()).abs().max())
        )

    for seed in range(ROUNDS):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, T + 1, (B,), generator=generator)
        mask = (torch.arange(T)[None] < lengths[:, None]).float()
        compare_dpo(compare, generator, mask)
        compare_grpo(compare, generator, mask)
        if options.ppo:
            compare_ppo(compare, generator, mask, options.ppo.read_text(encoding="utf-8"))
    print(json.dumps({"trl": version("trl"), "rounds": ROUNDS, "largest_difference": dict(worst)}))


def compare_dpo(compare: Any, generator: torch.Generator, mask: Tensor) -> None:
    """Compare losses, rewards, and gradients of the tokens' log-probabilities."""
    from trl.trainer.dpo_trainer import DPOTrainer

    log_probs, reference = (-3 * torch.rand(B, T, generator=generator) * mask for _ in range(2))
    theirs, ours = (log_probs.clone().requires_grad_() for _ in range(2))
    zeros = torch.zeros(B, T)
    outputs = SimpleNamespace(
        log_probs=theirs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool()
    )
    metrics: Any = {"train": defaultdict(list)}
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True), accelerator=ACCELERATOR, aux_loss_enabled=False, ld_alpha=None, beta=0.1,
        precompute_ref_logps=True, f_divergence_type="reverse_kl", loss_types=["sigmoid"], loss_weights=[1.0],
        use_weighting=False, _metrics=metrics, _total_train_tokens=0, _tp_size=1, args=SimpleNamespace(),
    )  # fmt: skip
    first = torch.ones(B, 1)  # of the prompt
    sums = reference.sum(1)
    inputs = {
        "completion_mask": torch.cat([0 * first, mask], 1),
        "input_ids": torch.ones(B, T + 1, dtype=torch.long),
        "attention_mask": torch.cat([first, mask], 1),
        "ref_chosen_logps": sums[: B // 2],
        "ref_rejected_logps": sums[B // 2 :],
    }
    loss = DPOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, False)
    chosen, rejected = (0.1 * (ours.sum(1) - sums)).chunk(2)
    losses = pairwise_loss(chosen, rejected)
    loss.backward()
    losses.mean().backward()
    compare("dpo_loss", losses.mean(), loss)
    compare("dpo_gradient", ours.grad, theirs.grad)
    compare("dpo_reward_chosen", chosen.mean(), torch.tensor(metrics["train"]["rewards/chosen"][0]))
    compare(
        "dpo_reward_rejected",
        rejected.mean(),
        torch.tensor(metrics["train"]["rewards/rejected"][0]),
    )


def compare_grpo(compare: Any, generator: torch.Generator, mask: Tensor) -> None:
    """Compare loss (`dapo`, trl's default), gradients, KL and clipped share; advantages by trl's
    nanstd.
    """
    from trl.trainer.grpo_trainer import GRPOTrainer, nanstd

    old, reference = (-3 * torch.rand(B, T, generator=generator) for _ in range(2))
    new = old + 0.3 * torch.randn(B, T, generator=generator)
    rewards = torch.randn(B, generator=generator)
    grouped = rewards.view(-1, GROUP)
    expected = (grouped - grouped.nanmean(1, keepdim=True)) / (
        nanstd(grouped, dim=1)[:, None] + 1e-4
    )
    advantages = group_advantages(grouped)
    compare("grpo_advantages", advantages, expected)
    advantages_B = advantages.flatten()
    theirs, ours = (new.clone().requires_grad_() for _ in range(2))
    metrics: Any = {"train": defaultdict(list)}
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (theirs, torch.zeros(B, T), None), aux_loss_enabled=False,
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, importance_sampling_level="token", beta=0.04,
        loss_type="dapo", epsilon_low=0.2, epsilon_high=0.2, use_vllm=False, _entropy_bonus_enabled=False,
        model=SimpleNamespace(training=True), accelerator=ACCELERATOR, current_gradient_accumulation_steps=1,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1), _metrics=metrics,
    )  # fmt: skip
    ones = torch.ones(B, 1, dtype=torch.long)
    inputs = {
        "prompt_ids": ones, "prompt_mask": ones, "completion_ids": ones.expand(B, T), "completion_mask": mask,
        "advantages": advantages_B, "old_per_token_logps": old, "ref_per_token_logps": reference,
        "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    losses, clipped = clipped_loss(ours, old, advantages_B[:, None], clip=0.2)
    kl = kl_k3(ours, reference)
    total = ((losses + 0.04 * kl) * mask).sum() / mask.sum()
    loss.backward()
    total.backward()
    compare("grpo_loss", total, loss)
    compare("grpo_gradient", ours.grad, theirs.grad)
    for name, values, key in (("kl", kl, "kl"), ("clip_share", clipped, "clip_ratio/region_mean")):
        compare(
            f"grpo_{name}",
            (values * mask).sum() / mask.sum(),
            torch.tensor(metrics["train"][key][0]),
        )


def compare_ppo(compare: Any, generator: torch.Generator, mask: Tensor, source: str) -> None:
    """Compare whitened advantages, returns, and the clipped value loss."""
    rewards, values = (torch.randn(B, T, generator=generator) * mask for _ in range(2))
    names: dict[str, Any] = {
        "torch": torch,
        "responses": mask,
        "rewards": rewards,
        "values": values,
    }
    names |= {
        "padding_mask": mask == 0,
        "args": SimpleNamespace(gamma=0.98, lam=0.95, cliprange_value=0.2),
    }
    for function in ("masked_mean", "masked_var", "masked_whiten"):
        names |= run_statements(source, f"def {function}(", "\n\n\n", names)
    names = run_statements(
        source, "                lastgaelam = 0", "                empty_cache()", names
    )
    advantages, returns = gae(rewards, values, mask, gamma=0.98, lam=0.95)
    compare(
        "ppo_advantages", whiten(advantages, mask, moments(advantages, mask)), names["advantages"]
    )
    compare("ppo_returns", returns, names["returns"] * mask)
    predicted = values + 0.5 * torch.randn(B, T, generator=generator) * mask
    names |= {
        "vpred": predicted,
        "mb_values": values,
        "mb_return": returns,
        "micro_batch_inds": slice(None),
    }
    names["padding_mask_p1"] = mask == 0
    names = run_statements(
        source, "vpredclipped = torch.clamp(", "                            vf_clipfrac", names
    )
    losses = clipped_value_loss(predicted, values, returns, clip=0.2)
    compare("ppo_value_loss", (losses * mask).sum() / mask.sum(), names["vf_loss"])


def run_statements(source: str, first: str, end: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run the lines of a file from the line with `first` up to `end`; return all variables."""
    start = source.rindex("\n", 0, source.index(first)) + 1
    found = dict(names)
    exec(textwrap.dedent(source[start : source.index(end, start + len(first))]), found)
    return found


if __name__ == "__main__":
    main()
