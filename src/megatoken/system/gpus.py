"""GPUs by name: what the driver reports of them, and what data sheets, clouds and power bills say. No torch.

Peak FLOP/s stand in peak_flops.py, under the name that the driver reports.
"""

import re
from dataclasses import dataclass

from megatoken.errors import ConfigError
from megatoken.suggest import suggest
from megatoken.system.peak_flops import PEAK_FLOPS

MOST_GPUS = 100_000
NOISE = re.compile(r"nvidia|geforce|tesla|amd|instinct|rtx|gb\b|sxm\d?|hbm\d?e?|[^a-z0-9]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU. Rates in bytes a second, of one direction; price in US dollars an hour, 0 where none is known.

    driver: the name that its driver reports, under which PEAK_FLOPS has it. memory_bytes: as torch reports them, less
    than the label's. link_rate: to another GPU of the machine; network_rate: its share of the machine's network.
    """

    name: str
    driver: str
    architecture: str
    memory_bytes: int
    memory_rate: float
    multiprocessors: int
    link_rate: float
    network_rate: float
    watts: float
    price: float
    per_machine: int = 8

    @property
    def price_source(self) -> str:
        return (
            "llm.c's account of 2024" if self.name == "A100-40GB" else "RunPod's list of March 2026"
        )

    def compute_precision(self, precision: str) -> str:
        """What products in fp32, tf32, bf16 or fp16 are computed in: fp32 where the card lacks the precision."""
        return precision if precision in PEAK_FLOPS[self.driver] else "fp32"

    def peak_flops(self, precision: str) -> float:
        """Dense FLOP/s of products in a precision."""
        return PEAK_FLOPS[self.driver][self.compute_precision(precision)]


# fmt: off
# name: driver's name, architecture, GiB as torch reports them, memory GB/s, multiprocessors, link GB/s, network GB/s,
# watts, $/h. Data sheets as in peak_flops.py. Links: NVLink (SXM) or PCIe, one direction. Network: eight adapters of
# 200 Gb/s a machine for A100, of 400 from H100 on; one of 100 Gb/s before and for PCIe cards.
_ROWS = {
    "GTX-1080Ti": ("NVIDIA GeForce GTX 1080 Ti", "pascal", 10.91, 484, 28, 16, 1.6, 250, 0),
    "P100": ("Tesla P100-PCIE-16GB", "pascal", 15.9, 732, 56, 16, 1.6, 250, 0),
    "T4": ("Tesla T4", "turing", 14.74, 320, 40, 16, 1.6, 70, 0),
    "V100-16GB": ("Tesla V100-SXM2-16GB", "volta", 15.77, 900, 80, 150, 1.6, 300, 0),
    "V100-32GB": ("Tesla V100-SXM2-32GB", "volta", 31.74, 900, 80, 150, 1.6, 300, 0),
    "A10": ("NVIDIA A10", "ampere-graphics", 22.06, 600, 72, 32, 1.6, 150, 0),
    "A10G": ("NVIDIA A10G", "ampere-graphics", 22.06, 600, 80, 32, 1.6, 300, 0),
    "A30": ("NVIDIA A30", "ampere", 23.5, 933, 56, 32, 1.6, 165, 0),
    "A40": ("NVIDIA A40", "ampere-graphics", 44.4, 696, 84, 32, 1.6, 300, 0),
    "A100-40GB": ("NVIDIA A100-SXM4-40GB", "ampere", 39.4, 1555, 108, 300, 25, 400, 1.40),
    "A100-80GB": ("NVIDIA A100-SXM4-80GB", "ampere", 79.15, 2039, 108, 300, 25, 400, 1.39),
    "A100-PCIe-40GB": ("NVIDIA A100-PCIE-40GB", "ampere", 39.4, 1555, 108, 32, 1.6, 250, 0),
    "A100-PCIe-80GB": ("NVIDIA A100 80GB PCIe", "ampere", 79.15, 1935, 108, 32, 1.6, 300, 1.19),
    "L4": ("NVIDIA L4", "ada", 22.03, 300, 58, 32, 1.6, 72, 0.44),
    "L40": ("NVIDIA L40", "ada", 44.4, 864, 142, 32, 1.6, 300, 0.69),
    "L40S": ("NVIDIA L40S", "ada", 44.4, 864, 142, 32, 1.6, 350, 0.79),
    "H100": ("NVIDIA H100 80GB HBM3", "hopper", 79.18, 3350, 132, 450, 50, 700, 2.69),
    "H100-PCIe": ("NVIDIA H100 PCIe", "hopper", 79.18, 2000, 114, 64, 1.6, 350, 1.99),
    "H100-NVL": ("NVIDIA H100 NVL", "hopper", 93.0, 3938, 132, 64, 1.6, 400, 0),
    "H200": ("NVIDIA H200", "hopper", 139.8, 4800, 132, 450, 50, 700, 3.59),
    "GH200": ("NVIDIA GH200 480GB", "hopper", 94.5, 4000, 132, 450, 50, 900, 0),
    "B200": ("NVIDIA B200", "blackwell", 178.3, 8000, 148, 900, 50, 1000, 5.98),
    "RTX-2080Ti": ("NVIDIA GeForce RTX 2080 Ti", "turing", 10.75, 616, 68, 16, 1.6, 250, 0),
    "RTX-3080": ("NVIDIA GeForce RTX 3080", "ampere-graphics", 9.77, 760, 68, 16, 1.6, 320, 0),
    "RTX-3090": ("NVIDIA GeForce RTX 3090", "ampere-graphics", 23.69, 936, 82, 16, 1.6, 350, 0.22),
    "RTX-4090": ("NVIDIA GeForce RTX 4090", "ada", 23.64, 1008, 128, 16, 1.6, 450, 0.34),
    "RTX-5090": ("NVIDIA GeForce RTX 5090", "ada", 31.37, 1792, 170, 32, 1.6, 575, 0.69),
    "RTX-A6000": ("NVIDIA RTX A6000", "ampere-graphics", 47.5, 768, 84, 32, 1.6, 300, 0),
    "RTX-6000-Ada": ("NVIDIA RTX 6000 Ada Generation", "ada", 47.5, 960, 142, 32, 1.6, 300, 0),
    "MI250X": ("AMD Instinct MI250X", "cdna", 63.98, 1638, 110, 50, 12.5, 280, 0),
    "MI300X": ("AMD Instinct MI300X", "cdna", 191.98, 5300, 304, 64, 50, 750, 0),
    "MI325X": ("AMD Instinct MI325X", "cdna", 255.98, 6000, 304, 64, 50, 1000, 0),
}
# fmt: on
GPUS = {
    name: Gpu(
        name=name,
        driver=driver,
        architecture=architecture,
        memory_bytes=round(gib * 2**30),
        memory_rate=memory * 1e9,
        multiprocessors=multiprocessors,
        link_rate=link * 1e9,
        network_rate=network * 1e9,
        watts=float(watts),
        price=price,
    )
    for name, (
        driver,
        architecture,
        gib,
        memory,
        multiprocessors,
        link,
        network,
        watts,
        price,
    ) in _ROWS.items()
}


def _simplify(name: str) -> str:
    return NOISE.sub("", name.lower())


_BY_WORD = {_simplify(word): gpu for gpu in GPUS.values() for word in (gpu.name, gpu.driver)}
_BY_WORD |= {
    "a100": GPUS["A100-80GB"],
    "v100": GPUS["V100-32GB"],
    "a100pcie": GPUS["A100-PCIe-80GB"],
}
_BY_WORD |= {"h10080": GPUS["H100"], "h200141": GPUS["H200"]}


def find_driver(name: object) -> Gpu | None:
    """The GPU whose driver reports exactly this name, None where it is not in the table."""
    return next((gpu for gpu in GPUS.values() if gpu.driver == name), None)


def find_gpu(name: str, where: str = "--gpus") -> Gpu:
    """The GPU that a name means, in the driver's words or in short. Raises ConfigError with the nearest names."""
    if (gpu := _BY_WORD.get(_simplify(name))) is not None:
        return gpu
    near = suggest(_simplify(name), _BY_WORD)
    fix = f"did you mean {_BY_WORD[near].name}?" if near else f"choose among {', '.join(GPUS)}"
    raise ConfigError(f"unknown GPU '{name}'", where, fix)


def parse_gpus(text: str) -> tuple[int, Gpu]:
    """Number and kind of `8xA100-40GB` or `H100`. Raises ConfigError for a count or a name that is none."""
    match = re.fullmatch(r"\s*([-+\d.]+)\s*[x*]\s*(\S.*)", text)
    count, name = match.groups() if match else ("1", text)
    if not count.isdecimal() or not 1 <= int(count) <= MOST_GPUS:
        raise ConfigError(
            f"{count} GPUs", "--gpus", f"give a whole number from 1 to {MOST_GPUS:,}: 8xH100"
        )
    return int(count), find_gpu(name)
