"""Training: its state, one step, the loop, logs and recovery."""
