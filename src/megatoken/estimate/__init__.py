"""Estimate a run's memory, speed, cost and loss without its devices."""
