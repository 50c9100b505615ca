"""Sweep the learning rates of Muon and AdamW over three widths, and compare Muon's options.

    python -m experiments.muon_sweep

Trains small GPTs on bytes of text (default: the standard library) with one seed and data order, at
six rates for each width and optimizer. The best rate is the lowest point of a parabola
through the best loss and its neighbors, over the log of the rate. Then each option is trained
with three seeds at the middle width. Losses are measured on held-out windows. Prints one JSON line.
"""

import argparse
import json
import math
import statistics
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatoken.base.config.fields import Duration
from megatoken.base.config.model_config import ModelConfig
from megatoken.base.config.schema import MachineConfig, OptimConfig, build_config
from megatoken.base.system.device import Device, open_device
from megatoken.data.dataloader import Batch
from megatoken.model.gpt import GPT
from megatoken.optim.muon import Muon, WholeMatrices, list_hidden_matrices
from megatoken.train.state import build_state, build_step_config
from megatoken.train.step import train_step

WIDTHS = (32, 64, 128)
RATES = {"muon": [0.0025 * 2**n for n in range(6)], "adamw": [5e-4 * 2**n for n in range(6)]}
CONTEXT, BATCH, VALIDATED = 64, 16, 512  # tokens, sequences, windows
# AdamW's rate for all but hidden matrices falls with the root of the width.
ADAMW_RATE, ADAMW_WIDTH = 4e-3, 64
CHOICES: dict[str, dict[str, Any]] = {
    "muon": {},
    "queries, keys, values as one matrix": {},
    "momentum growing over the first fifth": {"momentum_warmup": Duration(0.2, "dur")},
    "cautious decay": {"cautious_decay": True},
    "no decay": {"weight_decay": 0.0},
    "momentum 0.9": {"momentum": 0.9},
}


@cache
def open_cpu() -> Device:
    return open_device(MachineConfig(device="cpu", precision="fp32", threads=1))


def train(
    text: Tensor, optim: OptimConfig, width: int, steps: int, seed: int, *, whole_qkv: bool = False
) -> float:
    """Train and return the held-out loss."""
    train_text, held_out = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    model_config = ModelConfig(
        n_layer=3, n_head=width // 16, d_model=width, seq_len=CONTEXT, vocab_size=256, bias=False
    )
    model_config = replace(model_config, pos_emb="rotary").resolve(256)
    budget = {
        "budget.steps": steps,
        "budget.batch_tokens": BATCH * CONTEXT,
        "model.seq_len": CONTEXT,
    }
    config = replace(build_config(budget), optim=optim)
    device = open_cpu()
    state = build_state(GPT(model_config, seed=seed), config, device)
    if whole_qkv:
        assert isinstance(state.optimizer, Muon)
        rows = {name: [sum(sizes)] for name, sizes in list_hidden_matrices(state.model).items()}
        state.optimizer.matrices = WholeMatrices(rows, state.optimizer.matrices.dtype)
    step_config = build_step_config(config, epoch_tokens=len(train_text), micro_batch=BATCH)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(0, len(train_text) - CONTEXT - 1, (BATCH,), generator=generator)
        rows_BT = torch.stack(
            [train_text[start : start + CONTEXT + 1] for start in starts.tolist()]
        )
        train_step(
            state,
            step_config,
            device,
            Batch(rows_BT[:, :-1].contiguous(), rows_BT[:, 1:].contiguous()),
        )
    windows = held_out[: VALIDATED * CONTEXT + 1]
    inputs_BT, targets_BT = windows[:-1].view(-1, CONTEXT), windows[1:].view(-1, CONTEXT)
    with torch.no_grad(), device.autocast():
        shares = zip(inputs_BT.split(64), targets_BT.split(64), strict=True)
        return statistics.mean(
            float(state.model.loss(inputs, targets)) for inputs, targets in shares
        )


def build_optim(name: str, rate: float, width: int, **values: Any) -> OptimConfig:
    common = {"warmup": Duration(0.1, "dur"), "schedule": "linear", "min_lr_ratio": 0.0, **values}
    if name == "adamw":
        return OptimConfig(lr=rate, **common)
    return OptimConfig(
        name="muon", lr=ADAMW_RATE * math.sqrt(ADAMW_WIDTH / width), matrix_lr=rate, **common
    )


def find_best(rates: list[float], losses: list[float]) -> float:
    """Return the rate at the lowest point of the parabola through the best loss and its neighbors."""
    middle = min(max(losses.index(min(losses)), 1), len(rates) - 2)
    before, at, after = losses[middle - 1 : middle + 2]
    return rates[middle] * 2 ** ((before - after) / (2 * (before - 2 * at + after)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "text", type=Path, nargs="*", default=list(Path(statistics.__file__).parent.glob("*.py"))
    )
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    data = b"\n".join(path.read_bytes() for path in sorted(options.text))
    text = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
    sweep: dict[str, dict[int, Any]] = {}
    for name, rates in RATES.items():
        for width in WIDTHS:
            losses = [
                train(text, build_optim(name, rate, width), width, options.steps, 0)
                for rate in rates
            ]
            best = find_best(rates, losses)
            sweep.setdefault(name, {})[width] = {
                "rates": rates,
                "losses": losses,
                "best_rate": best,
            }
            print(
                f"{name} {width}: best {best:.4g} of {[round(loss, 4) for loss in losses]}",
                file=sys.stderr,
            )
    ratios = {
        name: rows[WIDTHS[-1]]["best_rate"] / rows[WIDTHS[0]]["best_rate"]
        for name, rows in sweep.items()
    }
    choices = {}
    for name, values in CHOICES.items():
        optim = build_optim("muon", 0.02, WIDTHS[1], **values)
        whole = "one matrix" in name
        losses = [
            train(text, optim, WIDTHS[1], options.steps, s, whole_qkv=whole)
            for s in range(options.seeds)
        ]
        choices[name] = losses
        print(f"{name}: {[round(loss, 4) for loss in losses]}", file=sys.stderr)
    about = {
        "tokens": options.steps * BATCH * CONTEXT,
        "bytes": len(data),
        "threads": torch.get_num_threads(),
    }
    result = {
        "soak": "muon-sweep",
        **about,
        "sweep": sweep,
        "largest_by_smallest": ratios,
        "choices": choices,
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
