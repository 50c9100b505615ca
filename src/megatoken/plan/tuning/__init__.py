"""Choose kernels, micro-batch and compilation by measurement, before the first step."""
