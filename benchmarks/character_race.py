"""Train nanoGPT's CPU example and ours to the same loss.

    python -m benchmarks.character_race --nanogpt CHECKOUT --text FILE

The model is nanoGPT's: 4 layers, 4 heads, width 128, a context of 64 characters of tiny
Shakespeare. nanoGPT trains it as in its README (2,000 steps of 12 x 64 characters), ours with
character_race.yaml, both on the first nine tenths of the text. Full programs run in interleaved
rounds. nanoGPT's loss is its own estimate over random windows of the last tenth; ours covers all
of it. Prints one JSON line.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RECIPE = Path(__file__).with_name("character_race.yaml")
NANOGPT = (
    "config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 --log_interval=100 --block_size=64 "
    "--batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0"
)


def run_nanogpt(checkout: Path, folder: Path) -> tuple[float, float]:
    """Return the seconds and the lowest of nanoGPT's validation loss estimates."""
    start = time.perf_counter()
    command = [sys.executable, "train.py", *NANOGPT.split(), f"--out_dir={folder}"]
    output = subprocess.run(
        command, cwd=checkout, capture_output=True, text=True, check=True
    ).stdout
    seconds = time.perf_counter() - start
    return seconds, min(float(loss) for loss in re.findall(r"val loss ([\d.]+)", output))


def run_ours(data: Path, folder: Path) -> tuple[float, float]:
    """Return the seconds and the final held-out loss."""
    start = time.perf_counter()
    command = [
        "megatoken",
        "train",
        str(RECIPE),
        "--out",
        str(folder),
        "--json",
        f"data.path={data}",
    ]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    output = subprocess.run(
        command, capture_output=True, text=True, check=True, env=environment
    ).stdout
    return time.perf_counter() - start, json.loads(output)["val_loss"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--nanogpt", type=Path, required=True, help="a checkout whose example data is prepared"
    )
    parser.add_argument("--text", type=Path, required=True, help="tiny Shakespeare, one file")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare = [
            "prepare",
            str(options.text),
            "--out",
            str(folder / "data"),
            "--tokenizer",
            "bytes",
        ]
        program = [sys.executable, "-m", "megatoken", *prepare, "--val-fraction", "0.1"]
        subprocess.run(program, check=True, stdout=subprocess.DEVNULL)
        rounds = []
        for number in range(options.rounds):
            nanogpt = run_nanogpt(options.nanogpt, folder / f"nanogpt{number}")
            ours = run_ours(folder / "data", folder / f"ours{number}")
            print(
                f"round {number}: nanoGPT {nanogpt[0]:.1f} s to {nanogpt[1]:.4f}, ours {ours[0]:.1f} s to {ours[1]:.4f}"
            )
            rounds.append({"nanogpt": nanogpt, "ours": ours, "ratio": nanogpt[0] / ours[0]})
    ratio = statistics.median(row["ratio"] for row in rounds)
    print(json.dumps({"ratio": ratio, "unit": "(seconds, loss)", "rounds": rounds}))


if __name__ == "__main__":
    main()
