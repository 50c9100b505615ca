"""DPO, reward models, GRPO and PPO: losses, batches, rewards. Does not depend on the trainer."""
