"""Compare runs and machines: races, sweeps, scaling, benchmarks, reports, plots."""
