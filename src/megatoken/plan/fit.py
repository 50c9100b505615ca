"""Whether what a dry run found fits on a GPU, and which knob would make it fit.

In: an Estimate, the name of a GPU. Out: a table for people, advice.
"""

from megatoken.config import Run
from megatoken.console import format_quantity
from megatoken.errors import Exit, Fault
from megatoken.plan.dryrun import MACHINE, Estimate

# Memory of one GPU in GB, by vendor data sheets.
CARDS = {
    "t4": 16, "v100": 32, "a10": 24, "a30": 24, "a40": 48, "a100-40": 40, "a100": 80, "l4": 24, "l40s": 48, "h100": 80,
    "h200": 141, "b200": 180, "rtx3090": 24, "rtx4090": 24, "rtx5090": 32, "mi250x": 64, "mi300x": 192, "mi325x": 256,
}  # fmt: skip
USABLE = 0.9  # of it: the context, NCCL's buffers and gaps between blocks want the rest


def find_card_bytes(name: str) -> float:
    """Memory of a GPU by its name, or by a number of GB. Raises Fault(CONFIG) for neither."""
    known = CARDS.get(name.lower())
    if known is None:
        try:
            known = int(name.lower().removesuffix("gb"))
        except ValueError:
            fix = f"use a number of GB, or one of {', '.join(CARDS)}"
            raise Fault(Exit.CONFIG, f"unknown GPU '{name}'", "--gpu", fix) from None
    return known * 1e9


def describe(estimate: Estimate) -> list[tuple[str, str]]:
    """Rows of a table: what one process holds, the largest first, and what it sends."""
    parts = {
        "parameters": estimate.parameter_bytes,
        "gradients": estimate.gradient_bytes,
        "optimizer": estimate.optimizer_bytes,
        "activations": estimate.activation_bytes,
    }
    rows = [
        (name, f"{format_quantity(size, 'B'):>9} {size / estimate.total_bytes:5.0%}")
        for name, size in sorted(parts.items(), key=lambda part: -part[1])
    ]
    sent = ", ".join(f"{kind} {format_quantity(size, 'B')}" for kind, size in estimate.communication.items())
    total = format_quantity(estimate.communication_bytes_per_step, "B")
    cut = f"{estimate.micro_steps:,} micro-batches of {estimate.micro_batch} on each of {estimate.readers:,} readers"
    return [
        ("layout", f"sharded {estimate.shard}, tensor parallel {estimate.tensor_parallel}"),
        ("step", f"{cut}, {estimate.precision}"),
        *rows,
        ("in all", f"{format_quantity(estimate.total_bytes, 'B'):>9} at most at one moment"),
        ("sent", f"{total:>9} a step" + (f": {sent} (rings)" if sent else "")),
    ]


def judge(estimate: Estimate, run: Run, card: str, card_bytes: float) -> tuple[bool, str]:
    """Whether it fits on a GPU of this name and size, in one line with what to change where it does not."""
    usable = USABLE * card_bytes
    share = f"{estimate.total_bytes / usable:.0%} of what {card} can hold ({format_quantity(usable, 'B')})"
    if estimate.total_bytes <= usable:
        return True, f"fits: {share}"
    return False, f"does not fit: {share}; {advise(estimate, run)}"


def advise(estimate: Estimate, run: Run) -> str:
    """The next knob to turn, by what takes most."""
    ladder = ("none", "zero1", "zero2", "zero3")
    place = ladder.index(estimate.shard) if estimate.shard in ladder else len(ladder)
    if estimate.activation_bytes > estimate.total_bytes / 2:
        if estimate.shard in ("zero1", "zero2"):
            return "--shard zero3 gathers one layer's weights at a time instead of all"
        if estimate.micro_batch > 1:
            return f"machine.micro_batch={estimate.micro_batch // 2} halves the activations"
        if run.machine.recompute != "block":
            return "machine.recompute=block keeps what enters a block and computes the rest again"
    elif estimate.readers > 1 and place + 1 < len(ladder):
        return f"--shard {ladder[place + 1]} shares more of the state among {estimate.readers:,}"
    if estimate.tensor_parallel < MACHINE:
        return f"--tp {2 * estimate.tensor_parallel} halves every layer"
    return f"--gpus {2 * estimate.processes} halves the state"
