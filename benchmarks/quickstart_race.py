"""Time the quickstart, and compare its recipe with AdamW's.

    python -m benchmarks.quickstart_race

Both train on the quickstart's corpus from several seeds, and are measured on all held-out text.
--work keeps results, so that a stopped race continues. Prints one JSON line.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

OPTIMIZERS = {"adamw": ["optim.name=adamw"], "now": []}
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
        race: dict[str, list[dict[str, Any]]] = {name: [] for name in OPTIMIZERS}
        for seed in range(SEED, SEED + options.seeds):
            for name, arguments in OPTIMIZERS.items():
                out = "runs/quickstart" if (name, seed) == ("now", SEED) else f"runs/{name}-{seed}"
                run(folder, "train", "quickstart", "--out", out, f"seed={seed}", *arguments)
                rows = [
                    json.loads(row)
                    for row in (folder / out / "metrics.jsonl").read_text().splitlines()
                ]
                train_seconds = max(row["elapsed_seconds"] for row in rows)
                bits = run(folder, "eval", out, "--data", "data/python")["bits_per_byte"]
                sample = run(folder, "sample", out, "def", "--tokens", "100")["text"][0]
                race[name].append(
                    {"bits_per_byte": bits, "train_seconds": train_seconds, "sample": sample}
                )
                print(f"{name}, seed {seed}: {bits:.4f} bits per byte", flush=True)
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
                "race": race,
            }
        )
    )


if __name__ == "__main__":
    main()
