"""The training objective: pre-training, fine-tuning, preferences, reinforcement learning."""

from dataclasses import dataclass
from typing import Literal

from megatoken.config.fields import config_field

IF_SAMPLED = "objective.name=grpo|ppo"
IF_PPO = "objective.name=ppo"
IF_KTO = "objective.name=kto"


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """The training objective and its settings."""

    name: Literal["pretrain", "sft", "dpo", "kto", "reward", "grpo", "ppo"] = config_field(
        "pretrain",
        "objective; pretrain: all tokens of text; sft: the assistant's tokens in conversations; "
        "dpo: preferences; kto: rated answers; reward: a reward model of preferences; grpo, ppo: "
        "rewards of sampled answers",
    )
    beta: float = config_field(
        0.1,
        "dpo, kto: strength of the KL constraint to the reference model",
        open_low=True,
        only_if="objective.name=dpo|kto",
    )
    desirable_weight: float = config_field(
        1.0, "kto: weight of the loss of desirable answers", only_if=IF_KTO
    )
    undesirable_weight: float = config_field(
        1.0, "kto: weight of the loss of undesirable answers", only_if=IF_KTO
    )
    reward: str = config_field(
        "exact",
        "grpo, ppo: exact, number, gsm8k, or the run of a reward model; --reward module:function "
        "for your own",
        only_if=IF_SAMPLED,
    )
    group: int = config_field(8, "grpo, ppo: answers per prompt", low=1, only_if=IF_SAMPLED)
    updates: int = config_field(
        1, "grpo, ppo: optimizer steps on each set of answers", low=1, only_if=IF_SAMPLED
    )
    temperature: float = config_field(
        1.0,
        "grpo, ppo: sampling temperature, also applied to the logits in training",
        low=0.01,
        only_if=IF_SAMPLED,
    )
    max_new_tokens: int = config_field(
        64, "grpo, ppo: longest answer", "tokens", low=1, only_if=IF_SAMPLED
    )
    kl: float = config_field(
        0.0,
        "grpo, ppo: weight of the KL divergence from the initial model; 0: none",
        only_if=IF_SAMPLED,
    )
    clip: float = config_field(
        0.2, "grpo, ppo: clip range of the probability ratio", open_low=True, only_if=IF_SAMPLED
    )
    gamma: float = config_field(1.0, "ppo: discount per token", high=1.0, only_if=IF_PPO)
    lam: float = config_field(
        0.95, "ppo: lambda of generalized advantage estimation", high=1.0, only_if=IF_PPO
    )
    value_clip: float = config_field(
        0.2, "ppo: clip range of the value update", open_low=True, only_if=IF_PPO
    )
    value_weight: float = config_field(0.1, "ppo: weight of the value loss", only_if=IF_PPO)

    @property
    def samples(self) -> bool:
        """Whether the objective trains on answers sampled from the model."""
        return self.name in ("grpo", "ppo")

    @property
    def rollout_steps(self) -> int:
        """The number of steps from one sampling of answers to the next; 1 without sampling."""
        return self.updates if self.samples else 1

    @property
    def answers(self) -> int:
        """The number of sequences trained on per row of the dataset."""
        return self.group * self.updates if self.samples else 1
