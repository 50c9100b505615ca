"""Training: its state, one step, autotuning, the metrics log and the handling of preemption."""
