"""Peaks of matrix products from vendor data sheets: pure data, by the exact name that the driver reports.

Out: PEAK_FLOPS, device name -> precision -> FLOP/s of dense products ("tf32": fp32 products with TF32 allowed). A
precision that is missing is slow or emulated there. A device that is missing has no peak: names are never guessed, what
it reaches is measured (device.py). Left out for that reason: laptop parts (their rate follows their power limit),
vGPU and MIG slices, and names that different parts share (AMD's "MI250X / MI250").
"""

Peaks = dict[str, float]


def _row(fp32: float, *, tf32: float = 0.0, fp16: float = 0.0, bf16: float = 0.0) -> Peaks:
    """TFLOP/s as data sheets print them, to FLOP/s; 0 for what there is not."""
    rates = {"fp32": fp32, "tf32": tf32, "fp16": fp16, "bf16": bf16}
    return {precision: float(round(rate * 1e12)) for precision, rate in rates.items() if rate}


def _tensor(fp32: float, tf32: float, half: float) -> Peaks:
    """Ampere and newer, CDNA 3: fp16 and bf16 alike."""
    return _row(fp32, tf32=tf32, fp16=half, bf16=half)


def _geforce(fp32: float) -> Peaks:
    """GeForce since Ampere: training sums in fp32, which these cards do at half the fp16-sum rate of the adverts."""
    return _tensor(fp32, fp32, 2 * fp32)


def _workstation(fp32: float) -> Peaks:
    """The same chips as GeForce's, sold for workstations: full rate with sums in fp32."""
    return _tensor(fp32, 2 * fp32, 4 * fp32)


def _apple(cores: int, megahertz: int) -> Peaks:
    """128 fused multiply-adds a GPU core and clock."""
    return _row(round(cores * 128 * 2 * megahertz / 1e6, 2))


_PASCAL_VOLTA_TURING = {
    # Tesla P100 data sheet, 2016. No tensor cores: fp16 at twice the fp32 rate.
    "Tesla P100-PCIE-12GB": _row(9.3, fp16=18.7),
    "Tesla P100-PCIE-16GB": _row(9.3, fp16=18.7),
    "Tesla P100-SXM2-16GB": _row(10.6, fp16=21.2),
    # V100 data sheet, 2020, and DGX-2's for SXM3.
    "Tesla V100-PCIE-16GB": _row(14.0, fp16=112.0),
    "Tesla V100-PCIE-32GB": _row(14.0, fp16=112.0),
    "Tesla V100-SXM2-16GB": _row(15.7, fp16=125.0),
    "Tesla V100-SXM2-32GB": _row(15.7, fp16=125.0),
    "Tesla V100-SXM3-32GB": _row(15.7, fp16=125.0),
    "Tesla V100S-PCIE-32GB": _row(16.4, fp16=130.0),
    # T4 data sheet, 2018.
    "Tesla T4": _row(8.1, fp16=65.0),
    # Turing architecture whitepaper, reference clocks; GeForce with sums in fp32, at half the fp16-sum rate. The
    # 12 GB card of 2021 shares the 2060's name and is a tenth faster.
    "NVIDIA GeForce RTX 2060": _row(6.5, fp16=25.8),
    "NVIDIA GeForce RTX 2060 SUPER": _row(7.2, fp16=28.7),
    "NVIDIA GeForce RTX 2070": _row(7.5, fp16=29.9),
    "NVIDIA GeForce RTX 2070 SUPER": _row(9.1, fp16=36.3),
    "NVIDIA GeForce RTX 2080": _row(10.1, fp16=40.3),
    "NVIDIA GeForce RTX 2080 SUPER": _row(11.2, fp16=44.6),
    "NVIDIA GeForce RTX 2080 Ti": _row(13.4, fp16=53.8),
    "NVIDIA TITAN RTX": _row(16.3, fp16=130.5),
    "Quadro RTX 6000": _row(16.3, fp16=130.5),
    "Quadro RTX 8000": _row(16.3, fp16=130.5),
}

_AMPERE = {
    # A100 data sheet, 2021: all forms alike.
    "NVIDIA A100-PCIE-40GB": _tensor(19.5, 156.0, 312.0),
    "NVIDIA A100 80GB PCIe": _tensor(19.5, 156.0, 312.0),
    "NVIDIA A100-SXM4-40GB": _tensor(19.5, 156.0, 312.0),
    "NVIDIA A100-SXM4-80GB": _tensor(19.5, 156.0, 312.0),
    # Data sheets of A10, A30 and A40, 2021; of A10G, 2022 (made for AWS, with a lower tensor rate than the A10).
    "NVIDIA A10": _tensor(31.2, 62.5, 125.0),
    "NVIDIA A10G": _tensor(35.0, 35.0, 70.0),
    "NVIDIA A30": _tensor(10.3, 82.0, 165.0),
    "NVIDIA A40": _tensor(37.4, 74.8, 149.7),
    # GA102 architecture whitepaper and product pages: 2 * cores * boost clock. The 12 GB card shares the 3080's name
    # and is 3% faster.
    "NVIDIA GeForce RTX 3060": _geforce(12.7),
    "NVIDIA GeForce RTX 3060 Ti": _geforce(16.2),
    "NVIDIA GeForce RTX 3070": _geforce(20.3),
    "NVIDIA GeForce RTX 3070 Ti": _geforce(21.7),
    "NVIDIA GeForce RTX 3080": _geforce(29.8),
    "NVIDIA GeForce RTX 3080 Ti": _geforce(34.1),
    "NVIDIA GeForce RTX 3090": _geforce(35.6),
    "NVIDIA GeForce RTX 3090 Ti": _geforce(40.0),
    # Data sheets of each, 2021-2022 (their tensor figure is sparse: halved).
    "NVIDIA RTX A4000": _workstation(19.2),
    "NVIDIA RTX A4500": _workstation(23.7),
    "NVIDIA RTX A5000": _workstation(27.8),
    "NVIDIA RTX A5500": _workstation(34.1),
    "NVIDIA RTX A6000": _workstation(38.7),
}

_ADA = {
    # Data sheets of L4, L40 and L40S, 2023: the L40 is given at GeForce's half rate, the L40S at the full one.
    "NVIDIA L4": _tensor(30.3, 60.0, 121.0),
    "NVIDIA L40": _tensor(90.5, 90.5, 181.05),
    "NVIDIA L40S": _tensor(91.6, 183.0, 362.05),
    # Ada architecture whitepaper and product pages: 2 * cores * boost clock.
    "NVIDIA GeForce RTX 4060": _geforce(15.1),
    "NVIDIA GeForce RTX 4060 Ti": _geforce(22.1),
    "NVIDIA GeForce RTX 4070": _geforce(29.1),
    "NVIDIA GeForce RTX 4070 SUPER": _geforce(35.5),
    "NVIDIA GeForce RTX 4070 Ti": _geforce(40.1),
    "NVIDIA GeForce RTX 4070 Ti SUPER": _geforce(44.1),
    "NVIDIA GeForce RTX 4080": _geforce(48.7),
    "NVIDIA GeForce RTX 4080 SUPER": _geforce(52.2),
    "NVIDIA GeForce RTX 4090": _geforce(82.6),
    "NVIDIA GeForce RTX 4090 D": _geforce(73.5),
    # Data sheets of each, 2022-2023 (their tensor figure is sparse fp8: a quarter of it).
    "NVIDIA RTX 4000 Ada Generation": _workstation(26.7),
    "NVIDIA RTX 4500 Ada Generation": _workstation(39.6),
    "NVIDIA RTX 5000 Ada Generation": _workstation(65.3),
    "NVIDIA RTX 6000 Ada Generation": _workstation(91.1),
}

_HOPPER = {
    # H100 data sheet, 2023-2024; H200 and GH200 data sheets: the same chip with other memory.
    "NVIDIA H100 PCIe": _tensor(51.0, 378.0, 756.0),
    "NVIDIA H100 NVL": _tensor(60.0, 417.5, 835.0),
    "NVIDIA H100 80GB HBM3": _tensor(67.0, 494.7, 989.4),
    "NVIDIA H200": _tensor(67.0, 494.7, 989.4),
    "NVIDIA H200 NVL": _tensor(60.0, 417.5, 835.0),
    "NVIDIA GH200 120GB": _tensor(67.0, 494.7, 989.4),
    "NVIDIA GH200 480GB": _tensor(67.0, 494.7, 989.4),
    "NVIDIA GH200 144G HBM3e": _tensor(67.0, 494.7, 989.4),
}

_BLACKWELL = {
    # HGX B200 and GB200 NVL72 data sheets, 2025, an eighth and a 72nd of the whole.
    "NVIDIA B200": _tensor(75.0, 1125.0, 2250.0),
    "NVIDIA GB200": _tensor(80.0, 1250.0, 2500.0),
    # RTX Blackwell architecture whitepaper and product pages: 2 * cores * boost clock.
    "NVIDIA GeForce RTX 5060": _geforce(19.2),
    "NVIDIA GeForce RTX 5060 Ti": _geforce(23.7),
    "NVIDIA GeForce RTX 5070": _geforce(30.9),
    "NVIDIA GeForce RTX 5070 Ti": _geforce(43.9),
    "NVIDIA GeForce RTX 5080": _geforce(56.3),
    "NVIDIA GeForce RTX 5090": _geforce(104.8),
    # RTX PRO Blackwell architecture whitepaper and data sheets, 2025.
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": _workstation(110.0),
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": _workstation(120.0),
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": _workstation(126.0),
}

_AMD = {
    # Data sheets of MI210, MI250, MI250X, MI300X and MI325X, rates of the matrix units. An MI250 is two devices to
    # torch, so half of its figures here. TF32 begins with CDNA 3.
    "AMD Instinct MI210": _row(45.3, fp16=181.0, bf16=181.0),
    "AMD Instinct MI250": _row(45.3, fp16=181.0, bf16=181.0),
    "AMD Instinct MI250X": _row(47.9, fp16=191.5, bf16=191.5),
    "AMD Instinct MI300X": _tensor(163.4, 653.7, 1307.4),
    "AMD Instinct MI325X": _tensor(163.4, 653.7, 1307.4),
}

_APPLE = {
    # The whole GPU of each chip at its highest clock; chips sold with fewer GPU cores share the name and read low.
    # Apple's own figures are 2.6, 5.2, 10.4 and 21 TFLOP/s for M1 and 3.6 for M2; later it printed none.
    "Apple M1": _apple(8, 1278),
    "Apple M1 Pro": _apple(16, 1278),
    "Apple M1 Max": _apple(32, 1278),
    "Apple M1 Ultra": _apple(64, 1278),
    "Apple M2": _apple(10, 1398),
    "Apple M2 Pro": _apple(19, 1398),
    "Apple M2 Max": _apple(38, 1398),
    "Apple M2 Ultra": _apple(76, 1398),
    "Apple M3": _apple(10, 1398),
    "Apple M3 Pro": _apple(18, 1398),
    "Apple M3 Max": _apple(40, 1398),
    "Apple M3 Ultra": _apple(80, 1398),
    "Apple M4": _apple(10, 1578),
    "Apple M4 Pro": _apple(20, 1578),
    "Apple M4 Max": _apple(40, 1578),
}

PEAK_FLOPS: dict[str, Peaks] = _PASCAL_VOLTA_TURING | _AMPERE | _ADA | _HOPPER | _BLACKWELL | _AMD | _APPLE
