"""Evaluate models by loss, multiple-choice tasks, generated answers or lm-evaluation-harness."""
