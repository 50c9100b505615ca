"""The training objective: pre-training, fine-tuning, preferences, reinforcement learning."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """The training objective and its settings."""

    name: Literal["pretrain", "sft", "dpo", "kto", "reward", "grpo", "ppo"] = "pretrain"
    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    reward: str = "exact"
    group: int = 8
    updates: int = 1
    temperature: float = 1.0
    max_new_tokens: int = 64
    kl: float = 0.0
    clip: float = 0.2
    gamma: float = 1.0
    lam: float = 0.95
    value_clip: float = 0.2
    value_weight: float = 0.1

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
