"""The micro-batch: the fastest that fits, measured on the model itself before the first step.

Nothing of the run changes: gradients are thrown away, no weight, moment or random state is touched.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress

import torch

from megatoken.device import Device
from megatoken.errors import Exit, Fault
from megatoken.hardware import return_freed_memory
from megatoken.train.state import Plan, State
from megatoken.train.step import accumulate_gradients

# Larger forwards stop paying on a CPU once products fill its caches; on a GPU memory decides.
LARGEST_CPU_TOKENS = 8192
CLEARLY = 1.05  # how much faster a size must be than a larger one, which adds up gradients less often


def rate_micro_batches(state: State, plan: Plan, device: Device, batch_seqs: int) -> dict[int, float]:
    """Tokens/s of every size that is worth trying, ascending; not measured (0) where there is but one.

    All ranks measure together.
    """
    sizes = candidate_sizes(batch_seqs, state.model.shape.seq_len, device.place.type)
    if len(sizes) == 1:
        return {sizes[0]: 0.0}
    rates = dict(measure_micro_batches(state, {size: plan.with_micro_batch(size) for size in sizes}, device))
    return_freed_memory()
    return rates


def pick_micro_batch(rates: Mapping[int, float]) -> int:
    """The largest size than which no smaller one is clearly faster."""
    best = max(rates.values())
    return max(size for size, rate in rates.items() if rate * CLEARLY >= best)


def candidate_sizes(batch_seqs: int, seq_len: int, device_type: str) -> list[int]:
    """Divisors of the batch to try, ascending: each at least 1.5 times the one before."""
    most = batch_seqs if device_type != "cpu" else max(1, LARGEST_CPU_TOKENS // seq_len)
    sizes: list[int] = []
    for size in range(1, min(batch_seqs, most) + 1):
        if batch_seqs % size == 0 and (not sizes or size >= 1.5 * sizes[-1]):
            sizes.append(size)
    return sizes


def measure_micro_batches(
    state: State, plan_of: dict[int, Plan], device: Device, *, repeats: int = 2
) -> Iterator[tuple[int, float]]:
    """Yield (micro-batch, tokens/s) for growing sizes, until memory ends or two sizes in a row were no faster."""
    shape = state.model.shape
    best, worse = 0.0, 0
    for size, plan in plan_of.items():
        # Many different ids, as in text, without drawing from the random state.
        ids = torch.arange(size * shape.seq_len, device=device.place).remainder(shape.vocab_size).view(size, -1)
        seconds = None
        with suppress(torch.OutOfMemoryError):  # the others hear of it before anybody goes on
            seconds = min(_time_once(state, plan, device, ids) for _ in range(repeats + 1))
        _forget(state, device)
        if state.ranks.any(seconds is None):
            if not best:
                fix = "lower model.seq_len or the model's size"
                raise Fault(Exit.CONFIG, "one sequence does not fit in memory", str(device.place), fix)
            return
        seconds = state.ranks.agree(seconds)
        rate = ids.numel() / seconds
        yield size, rate
        worse = worse + 1 if rate < 1.02 * best else 0
        best = max(best, rate)
        if worse == 2:
            return


def _time_once(state: State, plan: Plan, device: Device, ids: torch.Tensor) -> float:
    device.synchronize()
    begin = time.perf_counter()
    accumulate_gradients(state, plan, device, ids, ids)
    device.synchronize()
    state.optimizer.zero_grad(set_to_none=True)
    return time.perf_counter() - begin


def _forget(state: State, device: Device) -> None:
    state.working.zero_grad(set_to_none=True)
    state.optimizer.zero_grad(set_to_none=True)
    if device.place.type == "cuda":
        torch.cuda.empty_cache()


def try_compile(state: State, plan: Plan, device: Device, kind: str = "on") -> str:
    """Compile what is trained through and prove it on one micro-batch; on failure leave it plain and return why.

    kind: `on` the whole model, `blocks` one after another (they share what is compiled for the first), `graphs` the
    model into CUDA graphs. The proof costs nothing: the first step would have compiled the same shapes.
    """
    working = state.working
    ids = torch.zeros(plan.micro_batch, state.model.shape.seq_len, dtype=torch.int64, device=device.place)
    try:
        if kind == "blocks":
            for block in working.blocks:
                block.compile()
        else:
            state.graphs = kind == "graphs"
            state.forward = torch.compile(working, mode="reduce-overhead" if state.graphs else None)
        accumulate_gradients(state, plan, device, ids, ids)
    except Exception as wrong:  # a compiler fails in as many ways as there are compilers
        state.forward, state.graphs = working, False
        for block in working.blocks:
            block._compiled_call_impl = None  # torch has no public way back
        reason = str(wrong).strip().splitlines()[0] if str(wrong).strip() else type(wrong).__name__
        return f"torch.compile failed, the model runs uncompiled: {reason}"
    finally:
        _forget(state, device)
    return ""
