"""Benchmarks against other programs, run from a checkout: `python -m benchmarks`."""
