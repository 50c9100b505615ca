"""Time the quickstart from several seeds, and measure each on all held-out text.

    python -m benchmarks.quickstart_race

--work keeps results, so that a stopped run continues. Prints one JSON line.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from megatoken.base.system.metrics_log import read_metrics

SEED = 1337  # the recipes' own


def run(folder: Path, *arguments: str) -> Any:
    """Return the JSON result of `megatoken ARGUMENTS`, run in `folder`."""
    command = [sys.executable, "-P", "-m", "megatoken", *arguments, "--json"]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def prepare_corpus(folder: Path) -> None:
    """Prepare the quickstart's corpus in `folder` unless it exists."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "data/python").is_dir():
        run(
            folder,
            "prepare",
            "python",
            "--out",
            "data/python",
            "--tokenizer",
            "bpe:4096",
            "--val-fraction",
            "0.05",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--work", type=Path, help="folder to keep (default: a temporary one)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.work or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        start = time.perf_counter()
        whole = run(folder, "quickstart")
        seconds = time.perf_counter() - start
        seeds: list[dict[str, Any]] = []
        for seed in range(SEED, SEED + options.seeds):
            out = "runs/quickstart" if seed == SEED else f"runs/{seed}"
            run(folder, "train", "quickstart", "--out", out, f"seed={seed}")
            train_seconds = max(row["elapsed_seconds"] for row in read_metrics(folder / out))
            bits = run(folder, "eval", out, "--data", "data/python")["bits_per_byte"]
            seeds.append({"seed": seed, "bits_per_byte": bits, "train_seconds": train_seconds})
            print(f"seed {seed}: {bits:.4f} bits per byte", flush=True)
    result = {
        "wall_seconds_after_installation": seconds,
        "prepare": whole["prepare"],
        "eval": whole["eval"],
    }
    print(
        json.dumps(
            result
            | {
                "compressors": whole["compressors"],
                "samples": whole["sample"]["text"],
                "seeds": seeds,
            }
        )
    )


if __name__ == "__main__":
    main()
