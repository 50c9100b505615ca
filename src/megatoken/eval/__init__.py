"""Validation loss, multiple-choice tasks, lm-evaluation-harness."""
