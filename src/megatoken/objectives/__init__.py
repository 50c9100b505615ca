"""DPO, reward models, GRPO and PPO: losses, batches and rewards, independent of the trainer."""
