"""Compare two processes of one thread with one process of one thread, on GPT-2 124M.

    python -m benchmarks.ranks_race

`megatoken train` runs both ways in interleaved rounds on the same global batch, large enough to
amortize the all-reduce. Tokens/s are the median of the steps after the first. A last run of two
processes saves asynchronously, to measure how long its steps stall. Prints one JSON line.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from megatoken.base.system.metrics_log import read_metrics
from megatoken.text.prepare import prepare

SIZES = {
    "124m": ["gpt2-124m", "model.vocab_size=50257", "model.seq_len=512"],
    "tiny": [
        "quickstart",
        "model.n_layer=2",
        "model.d_model=64",
        "model.n_head=2",
        "model.seq_len=64",
    ],
}
SAVES = 3


def write_data(folder: Path) -> Path:
    text = folder / "text.txt"
    text.write_text(
        "".join(f"{n} bottles of beer on the wall, take {n % 7} down\n" for n in range(20_000))
    )
    prepare(str(text), folder / "data", tokenizer="bytes", val_fraction=0.01)
    return folder / "data"


def train(
    out: Path, data: Path, nproc: int, options: argparse.Namespace, *arguments: str
) -> list[dict[str, Any]]:
    """Train and return the rows of metrics.jsonl."""
    seq_len = next(
        int(override.partition("=")[2]) for override in SIZES[options.size] if "seq_len" in override
    )
    command = [sys.executable, "-m", "megatoken", "train", *SIZES[options.size], "--out", str(out)]
    command += [
        "--nproc",
        str(nproc),
        f"data.path={data}",
        "machine.device=cpu",
        "machine.threads=1",
    ]
    command += [
        f"machine.precision={options.precision}",
        "machine.micro_batch=1",
        "machine.gemm_backend=torch",
    ]
    command += [
        "machine.attention=flash",
        "machine.master_weights=off",
        f"budget.batch_tokens={options.seqs * seq_len}",
    ]
    command += ["evaluate.tokens=0", "sample.every=0", "log.plots=false", *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return read_metrics(out)


def rate(rows: list[dict[str, Any]]) -> float:
    return statistics.median(
        row["tokens_per_second"] for row in rows if row["kind"] == "train" and row["step"] > 1
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=list(SIZES), default="124m")
    parser.add_argument("--seqs", type=int, default=16, help="sequences of the global batch")
    parser.add_argument(
        "--steps", type=int, default=4, help="of each run; the first is not counted"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--precision", default="fp32")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = write_data(folder)
        rates: dict[int, list[float]] = {1: [], 2: []}
        for number in range(options.rounds):
            for nproc, measured in rates.items():
                steps = f"budget.steps={options.steps}"
                measured.append(
                    rate(
                        train(
                            folder / f"{nproc}-{number}",
                            data,
                            nproc,
                            options,
                            steps,
                            "save.every=0",
                        )
                    )
                )
                print(f"round {number}: {nproc} processes {measured[-1]:,.1f} tokens/s", flush=True)
        steps = (SAVES + 1) * options.steps
        arguments = [
            f"budget.steps={steps}",
            f"save.every={options.steps}",
            "machine.sharding=zero1",
        ]
        rows = train(folder / "saves", data, 2, options, *arguments)
    saves = [
        row for row in rows if row["kind"] == "save" and row["step"] < steps
    ]  # the save at the end overlaps with no step
    step_seconds = statistics.median(
        row["seconds"] for row in rows if row["kind"] == "train" and row["step"] > 1
    )
    result = {
        "soak": "ranks-race",
        "ratio": statistics.median(two / one for one, two in zip(rates[1], rates[2], strict=True)),
        "tokens_per_second": {"one process": rates[1], "two processes": rates[2]},
        "unit": "tokens/s, one thread a process",
        "size": options.size,
        "batch": f"{options.seqs} sequences in micro-batches of 1",
        "precision": options.precision,
        "save_stall_seconds": max(row["stall_seconds"] for row in saves),
        "save_stall_in_steps": max(row["stall_seconds"] for row in saves) / step_seconds,
        "save_writing_seconds": max(row["seconds"] for row in saves),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
