"""DPO, reward models, GRPO and PPO: their losses, and where their batches come from."""
