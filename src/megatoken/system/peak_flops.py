"""Dense peak FLOP/s of matrix products from vendor data sheets, by the exact device name that the driver reports.

PEAK_FLOPS[name][precision]; "tf32" is fp32 with TF32 allowed. A missing precision is slow or emulated there. Names are
never guessed: a device that is missing is measured (device.py), like laptop parts (their rate depends on a power
limit), vGPU and MIG slices, Apple's chips, and names that different parts share.
"""


def _row(fp32: float, tf32: float = 0.0, fp16: float = 0.0, bf16: float = 0.0) -> dict[str, float]:
    """TFLOP/s as data sheets print them; 0 where there is none."""
    rates = {"fp32": fp32, "tf32": tf32, "fp16": fp16, "bf16": bf16}
    return {precision: float(round(rate * 1e12)) for precision, rate in rates.items() if rate}


# fmt: off
# fp32, fp16 TFLOP/s before Ampere. Data sheets of P100, 2016, T4, 2018, and V100, 2020; Turing architecture whitepaper;
# GTX 1080 Ti: 2 * cores * boost clock.
_BEFORE_AMPERE = {
    "Tesla P100-PCIE-16GB": (9.3, 18.7), "Tesla P100-SXM2-16GB": (10.6, 21.2), "Tesla T4": (8.1, 65.0),
    "Tesla V100-PCIE-16GB": (14.0, 112.0), "Tesla V100-PCIE-32GB": (14.0, 112.0),
    "Tesla V100S-PCIE-32GB": (16.4, 130.0), "Tesla V100-SXM2-16GB": (15.7, 125.0),
    "Tesla V100-SXM2-32GB": (15.7, 125.0), "NVIDIA GeForce RTX 2080 Ti": (13.4, 53.8),
    "NVIDIA TITAN RTX": (16.3, 130.5), "NVIDIA GeForce GTX 1080 Ti": (11.3, 0.0),
}
# fp32, tf32, and fp16 or bf16 TFLOP/s. Data sheets: A100, A10, A30, A40, 2021; A10G (made for AWS), 2022; L4, L40 (at
# GeForce's half rate), L40S, 2023; H100, H200, GH200, 2023-2024; HGX B200 and GB200 NVL72, 2025, an eighth and a 72nd
# of the whole; MI210 to MI325X, rates of the matrix units, of one of an MI250X's two devices.
_DATA_CENTER = {
    "NVIDIA A100-PCIE-40GB": (19.5, 156.0, 312.0), "NVIDIA A100 80GB PCIe": (19.5, 156.0, 312.0),
    "NVIDIA A100-SXM4-40GB": (19.5, 156.0, 312.0), "NVIDIA A100-SXM4-80GB": (19.5, 156.0, 312.0),
    "NVIDIA A10": (31.2, 62.5, 125.0), "NVIDIA A10G": (35.0, 35.0, 70.0), "NVIDIA A30": (10.3, 82.0, 165.0),
    "NVIDIA A40": (37.4, 74.8, 149.7), "NVIDIA L4": (30.3, 60.0, 121.0), "NVIDIA L40": (90.5, 90.5, 181.05),
    "NVIDIA L40S": (91.6, 183.0, 362.05), "NVIDIA H100 PCIe": (51.0, 378.0, 756.0),
    "NVIDIA H100 NVL": (60.0, 417.5, 835.0), "NVIDIA H100 80GB HBM3": (67.0, 494.7, 989.4),
    "NVIDIA H200": (67.0, 494.7, 989.4), "NVIDIA H200 NVL": (60.0, 417.5, 835.0),
    "NVIDIA GH200 120GB": (67.0, 494.7, 989.4), "NVIDIA GH200 480GB": (67.0, 494.7, 989.4),
    "NVIDIA B200": (75.0, 1125.0, 2250.0), "NVIDIA GB200": (80.0, 1250.0, 2500.0),
    "AMD Instinct MI210": (45.3, 0.0, 181.0), "AMD Instinct MI250X": (47.9, 0.0, 191.5),
    "AMD Instinct MI300X": (163.4, 653.7, 1307.4), "AMD Instinct MI325X": (163.4, 653.7, 1307.4),
}
# fp32 TFLOP/s: 2 * cores * boost clock (GA102, Ada and Blackwell whitepapers, product pages). tf32 is as fast as fp32,
# and bf16 twice: with fp32 accumulation these cards have half the advertised rate. The 12 GB 3080 is 3% faster.
_GEFORCE = {
    "3060": 12.7, "3060 Ti": 16.2, "3070": 20.3, "3070 Ti": 21.7, "3080": 29.8, "3080 Ti": 34.1, "3090": 35.6,
    "3090 Ti": 40.0, "4060": 15.1, "4060 Ti": 22.1, "4070": 29.1, "4070 SUPER": 35.5, "4070 Ti": 40.1,
    "4070 Ti SUPER": 44.1, "4080": 48.7, "4080 SUPER": 52.2, "4090": 82.6, "5060 Ti": 23.7, "5070": 30.9,
    "5070 Ti": 43.9, "5080": 56.3, "5090": 104.8,
}
# The same chips for workstations: tf32 at twice and bf16 at four times fp32 (data sheets of each, 2021-2025).
_WORKSTATION = {
    "A4000": 19.2, "A5000": 27.8, "A6000": 38.7, "4000 Ada Generation": 26.7, "5000 Ada Generation": 65.3,
    "6000 Ada Generation": 91.1, "PRO 6000 Blackwell Workstation Edition": 126.0,
}
# fmt: on

PEAK_FLOPS: dict[str, dict[str, float]] = {
    **{name: _row(fp32, fp16=fp16) for name, (fp32, fp16) in _BEFORE_AMPERE.items()},
    **{name: _row(fp32, tf32, half, half) for name, (fp32, tf32, half) in _DATA_CENTER.items()},
    **{
        f"NVIDIA GeForce RTX {model}": _row(fp32, fp32, 2 * fp32, 2 * fp32)
        for model, fp32 in _GEFORCE.items()
    },
    **{
        f"NVIDIA RTX {model}": _row(fp32, 2 * fp32, 4 * fp32, 4 * fp32)
        for model, fp32 in _WORKSTATION.items()
    },
}
