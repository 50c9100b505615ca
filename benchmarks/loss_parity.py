"""Compare the losses of fast and exact training.

    python -m benchmarks.loss_parity --device cuda --steps 200

Trains gpt2-124m on real text (the standard library, or --data) three times: with the device's
defaults, in fp32 without TF32, and with defaults from another seed, which shows the noise.
Needs no installation: PYTHONPATH=src. Prints one JSON line: mean losses of the last steps, and the
distances of the curves.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.journey import prepare_python

LAST = 20  # steps whose losses are averaged
SMALL = ["model.n_layer=2", "model.n_head=2", "model.d_model=64", "model.seq_len=64"]
EXACT = ["machine.precision=fp32", "machine.tf32=false", "machine.fused=off", "machine.compile=off"]


def megatoken(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "megatoken", *arguments], check=True, stdout=sys.stderr)


def read_losses(run: Path) -> list[float]:
    """Return the training loss of every step."""
    rows = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if row["kind"] == "train"]


def compare(one: list[float], other: list[float]) -> dict[str, float]:
    """Return two relative distances of curves: the largest of a step, and of the last means."""
    steps = [abs(a - b) / b for a, b in zip(one, other, strict=True)]
    ends = [statistics.fmean(losses[-LAST:]) for losses in (one, other)]
    return {"largest": max(steps), "end": abs(ends[0] - ends[1]) / ends[1]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-tokens", type=int, default=65536)
    parser.add_argument(
        "--data", type=Path, help="dataset folder (default: the standard library, 4,096 BPE)"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="a model of two layers in place of gpt2-124m"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = options.data or prepare_python(folder / "data")
        model = ["model.vocab_size=50257", *(SMALL if options.tiny else [])]
        common = [*model, f"data.path={data}", f"budget.batch_tokens={options.batch_tokens}", "log.plots=false",
                  f"budget.tokens={options.steps * options.batch_tokens}", f"machine.device={options.device}",
                  "evaluate.tokens=0", "sample.every=0", "save.every=0", "optim.warmup=0.1dur"]  # fmt: skip
        runs = {"exact": EXACT, "default": [], "other seed": ["seed=7"]}
        losses = {}
        for name, overrides in runs.items():
            megatoken("train", "gpt2-124m", "--out", str(folder / name), *common, *overrides)
            losses[name] = read_losses(folder / name)
    ends = {name: statistics.fmean(curve[-LAST:]) for name, curve in losses.items()}
    apart = compare(losses["default"], losses["exact"])
    noise = compare(losses["other seed"], losses["default"])
    print(
        json.dumps(
            {
                "steps": options.steps,
                "end_loss": ends,
                "default_to_exact": apart,
                "seed_to_seed": noise,
            }
        )
    )


if __name__ == "__main__":
    main()
