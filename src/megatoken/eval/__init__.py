"""Validation loss, multiple-choice tasks, scored answers, and lm-evaluation-harness."""
