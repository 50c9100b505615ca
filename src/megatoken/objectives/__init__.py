"""DPO, reward models, GRPO and PPO: losses, batches, rewards. Nothing here knows the trainer."""
