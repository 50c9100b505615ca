"""Train gpt2-124m as a user does: train, kill, resume, sample; measure each.

    python -m benchmarks.journey --device cuda

Kills a run halfway between two checkpoints, resumes it, and compares the losses of the steps that
ran twice. On a GPU they may differ, because it adds some sums in any order. Needs no installation:
PYTHONPATH=src. Prints a JSON line after each stage; the last one is complete.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from megatoken.base.system.metrics_log import read_metrics
from megatoken.data.shard_format import MANIFEST_NAME
from megatoken.store.commit import list_steps

PROMPT = "def read_lines(path):\n"
TOKENS = 128
POLL_SECONDS = 0.1
FIRST_STEPS = 5  # after the start, not counted in the speed


def megatoken(*arguments: str) -> list[str]:
    """Return the command that runs `megatoken ARGUMENTS` with this interpreter."""
    return [sys.executable, "-m", "megatoken", *arguments]


def prepare_python(folder: Path) -> Path:
    """Prepare the standard library with a BPE of 4,096 tokens, unless that is done."""
    if not (folder / MANIFEST_NAME).exists():
        run_json("prepare", "python", "--out", str(folder), "--tokenizer", "bpe:4096")
    return folder


def run_json(*arguments: str) -> tuple[dict[str, Any], float]:
    """Run a command with --json; return its result and its seconds."""
    start = time.perf_counter()
    done = subprocess.run([*megatoken(*arguments), "--json"], check=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout.splitlines()[-1]), time.perf_counter() - start


def read_losses(run: Path) -> dict[int, float]:
    """Return the losses of the logged training steps."""
    if not (run / "metrics.jsonl").exists():
        return {}
    return {row["step"]: row["loss"] for row in read_metrics(run) if row["kind"] == "train"}


def train_until(command: list[str], run: Path, step: int) -> float:
    """Train until `step` is logged, then kill the process. Return the seconds to the first row."""
    start = time.perf_counter()
    first = 0.0
    process = subprocess.Popen(command, stdout=sys.stderr)
    while process.poll() is None:
        losses = read_losses(run)
        if losses and not first:
            first = time.perf_counter() - start
        if max(losses, default=0) >= step:
            process.kill()
            process.wait()
            return first
        time.sleep(POLL_SECONDS)
    raise SystemExit(f"training ended with code {process.returncode} before step {step}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, help="dataset folder (default: the standard library, 4,096 BPE)"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-seqs", type=int, default=128)
    parser.add_argument("settings", nargs="*", metavar="section.field=value")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / "run"
        data = options.data or prepare_python(Path(name) / "data")
        interval = options.steps // 4
        recipe = ["gpt2-124m", f"data.path={data}", "model.vocab_size=50257"]
        recipe += [f"budget.steps={options.steps}"]
        recipe += [f"budget.batch_tokens={options.batch_seqs * 1024}", *options.settings]
        recipe += [f"machine.device={options.device}", "log.every=1", "log.plots=false"]
        recipe += ["optim.warmup=0.1dur"]
        recipe += [f"save.every={interval}steps", f"evaluate.every={interval}steps"]
        command = megatoken("train", *recipe, "--out", str(run))
        first_seconds = train_until(command, run, 2 * interval + interval // 2)
        before = read_losses(run)
        steady = [row for row in read_metrics(run) if row["kind"] == "train"][FIRST_STEPS:]
        result: dict[str, Any] = {
            "steps": options.steps,
            "first_loss": before[1],
            "first_row_seconds": first_seconds,
            "tokens_per_second": median(row["tokens_per_second"] for row in steady),
        }
        print(json.dumps(result), flush=True)
        last_saved = max(list_steps(run / "checkpoints"))
        resumed, resumed_seconds = run_json("train", *recipe, "--out", str(run))
        rows = [row for row in read_metrics(run) if row["kind"] == "train"]
        after = {row["step"]: row["loss"] for row in rows}
        again = [step for step in before if step > last_saved]
        steady = [row for row in rows if row["step"] > 2 * interval + FIRST_STEPS]
        result |= {
            "loss": resumed["loss"],
            "val_loss": resumed["val_loss"],
            "resumed_seconds": resumed_seconds,
            "repeated_steps": len(again),
            "largest_difference": max(abs(before[step] - after[step]) for step in again),
            "tokens_per_second": median(row["tokens_per_second"] for row in steady),
        }
        print(json.dumps(result), flush=True)
        sample, sample_seconds = run_json(
            "sample", str(run), PROMPT, "--device", options.device, "--tokens", str(TOKENS)
        )
        machine = json.loads((run / "machine.json").read_text())
    result |= {
        "sample_seconds": sample_seconds,
        "sample": sample["text"][0],
        "kernels": machine["forms"]["kernels"],
        "errors": machine["forms"]["errors"],
        "micro_batch": machine["micro_batch"],
        "tuning": machine["tokens_per_second"],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
