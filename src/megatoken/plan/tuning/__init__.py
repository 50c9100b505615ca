"""Choose kernels, micro-batch and compilation by measurement, and measure the device's peak."""
