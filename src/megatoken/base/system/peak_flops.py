"""Peak FLOP/s of matmuls, without sparsity, from vendor data sheets (peak_flops.toml).

PEAK_FLOPS[device name][precision]. Device names must match exactly. Devices that are not in the
table are measured (device.py). The table leaves out vGPU and MIG slices, Apple's chips, and names
that different devices share. It also leaves out laptop GPUs, because their speed depends on a power
limit.
"""

from megatoken.base.system.table import read_table

PEAK_FLOPS: dict[str, dict[str, float]] = {
    name: {precision: float(round(rate * 1e12)) for precision, rate in rates.items()}
    for name, rates in read_table(__file__).items()
}
