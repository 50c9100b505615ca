"""Time training on windows and packed documents, with masks and with FlashAttention-2's lengths.

    python -m benchmarks.documents [--mode blocks]

Needs an NVIDIA GPU. Times attention of GPT-2 124M alone, forward and backward, then whole steps. A
document begins every 600 tokens on average. Prints a JSON line after each variant, with all so far:
median milliseconds, and peak GB of the steps.
"""

import argparse
import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from unittest.mock import patch

import torch
from torch import Tensor

from megatoken.base.config.presets import PRESETS
from megatoken.base.config.schema import MachineConfig
from megatoken.base.system.device import Device, open_device
from megatoken.base.system.timing import time_interleaved
from megatoken.data.dataloader import Batch
from megatoken.model.kernels import attention
from megatoken.model.masks import TreeMask, separate_conversations
from megatoken.study.bench.workload import build_workload, draw_batch
from megatoken.train import step

MODEL = PRESETS["gpt2-124m"]
DOCUMENT = 600
WINDOW = 256


def draw_starts(rows: int) -> Tensor:
    T = MODEL.seq_len
    generator = torch.Generator().manual_seed(0)
    is_start = torch.rand(rows, T, generator=generator) < 1 / DOCUMENT
    return torch.where(is_start, torch.arange(T), 0).cummax(1).values


def build_mask(starts: Tensor, device: Device) -> TreeMask:
    mask = separate_conversations(starts, torch.device("cpu"))
    target = device.torch_device
    return TreeMask(mask.positions_BT.to(target), mask.attn_mask.to(target))


def time_attention(starts: Tensor, device: Device, repeats: int) -> dict[str, float]:
    """Return milliseconds of forward and backward in one layer."""
    shape = len(starts), MODEL.seq_len, MODEL.n_head, MODEL.d_head
    q, k, v, grad = torch.randn(4, *shape, device=device.torch_device, dtype=device.dtype)
    inputs = [x.transpose(1, 2).requires_grad_() for x in (q, k, v)]
    mask = build_mask(starts, device).attn_mask
    near = attention.causal_mask(MODEL.seq_len, WINDOW, device.torch_device)
    bounds = separate_conversations(starts, device.torch_device).attn_mask
    flash = attention.flash_attention

    def attend_masked(mask: Tensor | None) -> Tensor:
        return flash(*inputs, mask=mask, causal=mask is None, dropout=None)

    forwards: dict[str, Callable[[], Tensor]] = {
        "causal": lambda: attend_masked(None),
        "documents mask": lambda: attend_masked(mask),
        "documents varlen": lambda: attention.attend_documents(
            flash, *inputs, bounds=bounds, dropout=None
        ),
        "window mask": lambda: attend_masked(near),
        "window varlen": lambda: flash(
            *inputs, mask=None, causal=True, dropout=None, window=WINDOW
        ),
    }

    def make_call(forward: Callable[[], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(forward(), inputs, grad.transpose(1, 2))

    calls = {name: make_call(forward) for name, forward in forwards.items()}
    timings = time_interleaved(calls, repeats=repeats, synchronize=device.synchronize)
    return {name: round(timing.median * 1e3, 3) for name, timing in timings.items()}


def time_step(case: str, variant: str, starts: Tensor, options: argparse.Namespace) -> list[float]:
    """Return milliseconds and peak GB of a training step."""
    model = replace(MODEL, window=WINDOW) if case == "window" else MODEL
    machine = MachineConfig(
        attention="flash", fused="on", master_weights="on", compile=options.mode
    )
    rows = len(starts)
    workload = build_workload(model, machine, batch_seqs=rows, micro_batch=rows)
    state, step_config, device = workload.state, workload.step_config, workload.device
    assert not workload.tuning.note
    batch = draw_batch(model, rows, 0, device)
    if case == "documents":
        batch = Batch(batch.inputs_BT, batch.targets_BT, starts)
    torch.cuda.reset_peak_memory_stats()
    with ExitStack() as stack:
        if variant == "mask":
            mask = build_mask(starts, device)
            stack.enter_context(patch.object(attention, "supports_varlen", lambda _: False))
            stack.enter_context(patch.object(step, "separate_conversations", lambda *_: mask))
        timings = time_interleaved(
            {"step": lambda: step.train_step(state, step_config, device, batch)},
            repeats=options.repeats,
            warmup=2,
            synchronize=device.synchronize,
        )
    torch.compiler.reset()
    peak = torch.cuda.max_memory_allocated() / 1e9
    return [round(timings["step"].median * 1e3, 2), round(peak, 2)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch-seqs", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--mode", default="off", help="off or blocks (default off)")
    options = parser.parse_args()
    starts = draw_starts(options.batch_seqs)
    result: dict[str, object] = {
        "bench": "documents",
        "batch_seqs": options.batch_seqs,
        "documents": int((starts == torch.arange(MODEL.seq_len)).sum()),
        "window": WINDOW,
        "mode": options.mode,
        "attention_ms": time_attention(starts, open_device(MachineConfig()), options.repeats),
    }
    for name in (
        "full plain",
        "documents mask",
        "documents varlen",
        "window mask",
        "window varlen",
    ):
        result[f"{name}: ms, GB"] = time_step(*name.split(), starts, options)
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
