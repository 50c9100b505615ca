"""The settings of fine-tuning objectives (settings.toml)."""

from dataclasses import dataclass

from megatoken.base.rooms import list_entries

REWARD = (
    f"reward of grpo and ppo: {', '.join(list_entries('reward'))}, or module:function"  # --reward
)
OBJECTIVES = ("sft", "dpo", "kto", "reward", "grpo", "ppo")
SAMPLING = ("grpo", "ppo")  # objectives that train on completions sampled from the model


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """The settings of the objectives of this room."""

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
