"""Find GPUs by name, with their memory, speed, price and power from a table (gpus.toml)."""

import re
from dataclasses import dataclass

from megatoken.base.errors import ConfigError
from megatoken.base.suggest import suggest
from megatoken.base.system.peak_flops import PEAK_FLOPS
from megatoken.base.system.table import read_table

NOISE = re.compile(r"nvidia|geforce|tesla|amd|instinct|rtx|gb\b|sxm\d?|hbm\d?e?|[^a-z0-9]")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU model. Rates are in bytes per second per direction; prices in US dollars per hour.

    driver: the name that its driver reports, as in PEAK_FLOPS.
    peaks: peak FLOP/s of matmuls by precision, without sparsity.
    memory_gib: as torch reports it, which is less than the nominal size.
    link_rate: rate between GPUs in one machine.
    network_rate: a GPU's share of the rate between machines.
    price: 0 if unknown.
    aliases: other names by which it is found.
    """

    name: str
    driver: str
    architecture: str
    peaks: dict[str, float]
    memory_gib: float
    memory_rate: float
    multiprocessors: int
    link_rate: float
    network_rate: float
    watts: float
    price: float
    per_machine: int = 8
    price_source: str = "RunPod's list of March 2026"
    aliases: tuple[str, ...] = ()

    @property
    def memory_bytes(self) -> int:
        return round(self.memory_gib * 2**30)

    def compute_precision(self, precision: str) -> str:
        """Return the precision in which matmuls run: the given one, or fp32 if not supported."""
        return precision if precision in self.peaks else "fp32"

    def peak_flops(self, precision: str) -> float:
        """Return the peak FLOP/s of matmuls in a precision."""
        return self.peaks[self.compute_precision(precision)]


GPUS = {
    name: Gpu(name=name, peaks=PEAK_FLOPS[row["driver"]], **row)
    for name, row in read_table(__file__).items()
}


def _simplify(name: str) -> str:
    return NOISE.sub("", name.lower())


_BY_NAME = {
    _simplify(name): gpu for gpu in GPUS.values() for name in (gpu.name, gpu.driver, *gpu.aliases)
}


def find_driver(name: object) -> Gpu | None:
    """Return the GPU whose driver reports exactly `name`, or None."""
    return next((gpu for gpu in GPUS.values() if gpu.driver == name), None)


def find_gpu(name: str, where: str = "--gpus") -> Gpu:
    """Return the GPU with a short name or the name that its driver reports. Raises ConfigError."""
    gpu = _BY_NAME.get(_simplify(name))
    if gpu is None:
        near = suggest(_simplify(name), _BY_NAME)
        fix = f"did you mean {_BY_NAME[near].name}? " if near else ""
        fix += "see plan --gpus list, or measure with plan --calibrate"
        raise ConfigError(f"unknown GPU '{name}'", where, fix)
    return gpu


def parse_gpus(text: str) -> tuple[list[int], Gpu]:
    """Parse text such as `8xA100-40GB`, `8,16xH100` or `H100` into numbers of GPUs and their model.

    Raises ConfigError.
    """
    match = re.fullmatch(r"\s*([1-9]\d{0,4}(?:,[1-9]\d{0,4})*)\s*[x*]\s*(\S.*)", text)
    counts, name = match.groups() if match else ("1", text)
    return [int(count) for count in counts.split(",")], find_gpu(name)
