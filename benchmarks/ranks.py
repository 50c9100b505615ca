"""Data-parallel processes: overlap of communication and computation, and equal curves.

    python -m benchmarks.ranks overlap [--trace FILE]
    python -m benchmarks.ranks curves [--out FILE]

overlap: share of the all-reduce that runs during the backward, from a Chrome trace of a step on two
processes. curves: losses of 1, 2, 3 and 4 processes with micro-batches 4, 1, 2 and 1 in one
picture, and whether 1, 2 and 4 give the same bits in deterministic mode. Prints one JSON line.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.profiler import ProfilerActivity, profile

from benchmarks.ranks_race import write_data
from megatoken.base.config.model_config import ModelConfig
from megatoken.base.console import format_count
from megatoken.base.system.device import Device
from megatoken.base.system.metrics_log import read_metrics
from megatoken.data.dataloader import Batch
from megatoken.distributed.comm import Comm
from megatoken.distributed.env import DistEnv
from megatoken.distributed.parallel_dims import build_dims
from megatoken.model.gpt import GPT
from megatoken.study.plots import PANELS, draw_curves
from megatoken.train.state import build_state, build_step_config
from megatoken.train.step import train_step
from tests.tiny_model import tiny_config
from tests.tiny_run import TINY

Span = tuple[float, float]
CPU = Device(
    torch_device=torch.device("cpu"),
    name="cpu",
    precision="fp32",
    peak_flops=0.0,
    peak_source="unknown",
)
WIDE = ModelConfig(n_layer=8, n_head=8, d_model=512, d_ff=2048, vocab_size=8192, seq_len=128)
CURVES = {1: 4, 2: 1, 3: 2, 4: 1}  # micro-batch by processes
DETERMINISTIC = 1, 2, 4  # processes


def trace_step(rank: int, folder: str, trace: str) -> None:
    """Run a step of two micro-batches, the second with communication; rank 0 writes its trace."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/join", rank=rank, world_size=2)
    comm = Comm(
        DistEnv(rank=rank, world_size=2, local_rank=rank, local_world_size=2), dist.new_group()
    )
    config = tiny_config(model__seq_len=WIDE.seq_len, budget__batch_tokens=16 * WIDE.seq_len)
    dims = build_dims("none", 1, DistEnv(rank=rank, world_size=2))
    state = build_state(GPT(WIDE), config, CPU, dims, comm=comm)
    state.start_grad_reduction()
    step_config = build_step_config(config, epoch_tokens=1 << 20, micro_batch=4)
    ids = torch.randint(0, WIDE.vocab_size, (8, WIDE.seq_len))
    train_step(state, step_config, CPU, Batch(ids, ids))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        train_step(state, step_config, CPU, Batch(ids, ids))
    if rank == 0:
        profiler.export_chrome_trace(trace)
    comm.barrier()
    dist.destroy_process_group()


def measure_overlap(trace: Path) -> dict[str, float]:
    """Return the share of the all-reduce time during which the backward computes."""
    events = [
        event for event in json.loads(trace.read_text())["traceEvents"] if event.get("ph") == "X"
    ]
    spans: dict[bool, list[Span]] = {True: [], False: []}
    for event in events:
        name = event["name"]
        if name.startswith("gloo:all_reduce") or (name.startswith("aten::") and "item" not in name):
            spans[name.startswith("gloo")].append((event["ts"], event["ts"] + event["dur"]))
    sending, computing = join_spans(spans[True]), join_spans(spans[False])
    both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in sending for b in computing)
    total = sum(end - start for start, end in sending)
    return {
        "sending_ms": total / 1e3,
        "overlapped_ms": both / 1e3,
        "share": both / total,
        "messages": len(spans[True]),
    }


def join_spans(spans: Sequence[Span]) -> list[Span]:
    """Return the union of spans, sorted."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined


def run_overlap(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        trace = options.trace or Path(folder) / "trace.json"
        mp.spawn(trace_step, args=(folder, str(trace)), nprocs=2)
        return {"soak": "ranks-overlap", **measure_overlap(trace)}


def command(out: Path, data: Path, nproc: int, *arguments: str) -> list[str]:
    program = [
        sys.executable,
        "-m",
        "megatoken",
        "train",
        str(TINY),
        "--out",
        str(out),
        "--nproc",
        str(nproc),
    ]
    return [*program, f"data.path={data}", *arguments]


def run_curves(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = write_data(folder)

        def train(name: str, nproc: int, *arguments: str) -> list[float]:
            arguments = (f"budget.steps={options.steps}", "save.every=0", *arguments)
            subprocess.run(
                command(folder / name, data, nproc, *arguments),
                check=True,
                stdout=subprocess.DEVNULL,
            )
            return [row["loss"] for row in read_metrics(folder / name) if row["kind"] == "train"]

        names = {
            f"{format_count(nproc, 'rank')}, micro-batch {size}": (nproc, size)
            for nproc, size in CURVES.items()
        }
        curves = [
            train(name, nproc, f"machine.micro_batch={size}", f"optim.lr={options.lr}")
            for name, (nproc, size) in names.items()
        ]
        for key in ("lr", "tokens_per_second"):  # the ranks share the cores of one machine
            PANELS.pop(key)
        draw_curves([folder / name for name in names], options.out)
        overrides = "machine.micro_batch=1", "machine.deterministic=true"
        deterministic = [
            train(f"deterministic {nproc}", nproc, *overrides) for nproc in DETERMINISTIC
        ]
    worst = max(
        abs(loss / first - 1)
        for curve in curves
        for loss, first in zip(curve, curves[0], strict=True)
    )
    return {
        "soak": "ranks-curves",
        "steps": options.steps,
        "lr": options.lr,
        "largest_relative_difference": worst,
        "deterministic_same_bits": all(curve == deterministic[0] for curve in deterministic),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["overlap", "curves"])
    parser.add_argument(
        "--trace", type=Path, help="file of the trace, for chrome://tracing or ui.perfetto.dev"
    )
    parser.add_argument("--out", type=Path, default=Path("records/ranks-curves.png"))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument(
        "--lr", type=float, default=1e-3, help="at 1e-2 the last bits grow to 1e-5 within 100 steps"
    )
    options = parser.parse_args()
    calls = {"overlap": run_overlap, "curves": run_curves}
    print(json.dumps(calls[options.what](options)))


if __name__ == "__main__":
    main()
