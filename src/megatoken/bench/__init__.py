"""Benches: each measures this machine on the real `train_step` or part of it, prints a table and writes a record."""
