"""Memory as benches see it: what is free, what a step will hold, the most that was held, how fast it is copied.

In: a device, a shape. Out: bytes, and bytes a second. Estimates are rough and rather too high: they decide only
whether to try, on devices where trying too much would take the whole machine down.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch

from megatoken.device import Device
from megatoken.hardware import free_memory_bytes
from megatoken.model.count import state_bytes
from megatoken.presets import Shape
from megatoken.timing import Timing

SHARE = 0.8  # of the free memory that a bench lets itself use
LARGEST_COPY = {"cpu": 1 << 28, "mps": 1 << 28, "cuda": 1 << 30}  # bytes moved: far beyond every cache
SMALLEST_COPY = 1 << 14


def find_free_bytes(device: Device) -> float:
    """Memory that can still be taken without swapping, on CUDA the device's; infinite where nobody tells."""
    if device.place.type == "cuda":
        return float(torch.cuda.mem_get_info(device.place)[0])
    return float(free_memory_bytes() or math.inf)


def estimate_step_bytes(shape: Shape, tokens: int, *, chunk: int) -> float:
    """What training on a micro-batch of `tokens` holds at its peak, in fp32.

    Weights, two moments and the gradient; per layer and token eight rows of the width, two of the MLP (of a gated one
    four) and half a row of attention weights a head; the logits of a chunk of tokens (0: of all) and their gradient.
    """
    wide = 4 if shape.mlp == "swiglu" else 2
    kept = 8 * shape.d_model + wide * shape.d_ff + shape.n_head * shape.seq_len / 2
    logits = min(tokens, chunk or tokens) * shape.padded_vocab_size
    return state_bytes(shape) * 4 / 3 + 4 * (shape.n_layer * tokens * kept + 2 * logits)


def forget_peak(device: Device) -> None:
    """Begin to watch for the most memory held anew, where that can be done: on CUDA."""
    if device.place.type == "cuda":
        torch.cuda.synchronize(device.place)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device.place)


def choose_copy(moved: int, largest: int) -> int:
    """The power of two of bytes moved by which a part that moves `moved` bytes is judged."""
    return min(max(SMALLEST_COPY, 1 << (moved.bit_length() - 1)), largest)


def list_copies(device: Device, sizes: Iterable[int]) -> dict[str, Callable[[], object]]:
    """Calls that move each of `sizes` bytes, half of them read and half written: from tensor to tensor, and in place.

    Where memory is there already: a fresh tensor on a CPU costs page faults besides. In place spares a CPU the read of
    what is overwritten, so the faster of both is the bound. Small sizes stay in the caches, as small tensors do.
    """
    calls: dict[str, Callable[[], object]] = {}
    for size in sorted(set(sizes)):
        noise = torch.Generator(device.place).manual_seed(0)
        source = torch.randn(size // 8, device=device.place, generator=noise)
        calls[f"copy of {size}"] = partial(torch.zeros_like(source).copy_, source)
        calls[f"change of {size}"] = torch.randn_like(source).neg_
    return calls


def read_speeds(timings: Mapping[str, Timing], sizes: Iterable[int]) -> dict[int, float]:
    """Bytes a second by size, best of all rounds of `list_copies`. No size is slower than a larger one: what moves
    faster at a larger size could, but for the overhead of a call or for noise, at the smaller."""
    speeds: dict[int, float] = {}
    for size in sorted(set(sizes), reverse=True):
        seconds = min(timings[f"{kind} of {size}"].best for kind in ("copy", "change"))
        speeds[size] = max(size / seconds, *speeds.values(), 0.0)
    return dict(reversed(speeds.items()))
