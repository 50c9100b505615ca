"""Fine-tune: SFT, DPO, KTO, reward models, GRPO, PPO and LoRA."""
