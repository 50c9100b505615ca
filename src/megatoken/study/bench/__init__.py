"""Benchmarks of this machine with the real `train_step`; each prints a table and saves a record."""
