"""Benchmarks of this machine on the real `train_step`; each prints a table and writes a record."""
