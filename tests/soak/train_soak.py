"""Training with stop signals; for kills see kill_soak.py. Prints one JSON line at the end.

    python -m tests.soak.train_soak --stops 9

After every stop the same command is started again; the finished run is compared with an undisturbed one: weights,
optimizer state, losses and samples, bit for bit.
"""

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from megatoken.checkpoint.commit import list_steps
from tests.train.test_pretrain import RECIPE, fingerprint


def write_recipe(folder: Path) -> Path:
    """A recipe that runs long enough to be stopped: 60 steps, a save of about 3 MB every 5."""
    text = b"to be or not to be, that is the question. " * 2000
    np.save(folder / "train_0.npy", np.frombuffer(text, dtype=np.uint8).astype(np.uint16))
    np.save(folder / "val_0.npy", np.frombuffer(text[:1000], dtype=np.uint8).astype(np.uint16))
    recipe = RECIPE.replace("DATA", str(folder / "*.npy")).replace("d_model: 32", "d_model: 128")
    recipe = recipe.replace("steps: 40", "steps: 60").replace("every: 7steps", "every: 5steps")
    path = folder / "tiny.yaml"
    path.write_text(recipe)
    return path


def start(recipe: Path, out: Path) -> "subprocess.Popen[bytes]":
    words = [sys.executable, "-m", "megatoken", "train", str(recipe), "--out", str(out)]
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def finish(recipe: Path, out: Path) -> None:
    code = start(recipe, out).wait()
    assert code == 0, f"the last start of {out} ended with {code}"


def is_training(out: Path) -> bool:
    return (out / "metrics.jsonl").exists() and '"train"' in (out / "metrics.jsonl").read_text()


def send_signal(
    process: "subprocess.Popen[bytes]",
    when: Callable[[], bool],
    delay: float,
    number: signal.Signals,
) -> bool:
    """Send a signal after `when` holds and a delay; return whether the process was still alive."""
    while process.poll() is None and not when():
        time.sleep(0.0005)
    time.sleep(delay)
    if process.poll() is not None:
        return False
    process.send_signal(number)
    process.wait()
    return True


def stop_at_random(
    recipe: Path, clean: dict[str, Any], folder: Path, stops: int, rng: random.Random
) -> dict[str, int]:
    """SIGTERM, SIGINT and SIGUSR1 at random moments: every finished step is saved, and the result is the same."""
    counts = {"stops": 0, "no_step_lost": 0, "bit_identical": 0}
    for index in range(stops):
        out = folder / f"stopped-{index}"
        process = start(recipe, out)
        number = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)[index % 3]
        if send_signal(process, lambda out=out: is_training(out), rng.uniform(0, 0.8), number):
            counts["stops"] += 1
            done = max(r["step"] for r in fingerprint(out)["rows"] if r["kind"] == "train")
            saved = list_steps(out / "checkpoints")[-1]
            counts["no_step_lost"] += process.returncode in (75, 0) and saved == done
        finish(recipe, out)
        run = fingerprint(out)
        counts["bit_identical"] += (run["tensors"], without_saves(run)) == (
            clean["tensors"],
            without_saves(clean),
        )
        shutil.rmtree(out)
    return counts


def without_saves(run: dict[str, Any]) -> list[object]:
    """Rows except those of saves: a stop adds one."""
    return [row for row in run["rows"] if row["kind"] != "save"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stops", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = write_recipe(folder)
        finish(recipe, folder / "clean")
        clean = fingerprint(folder / "clean")
        answer = {
            "soak": "train",
            "stop": stop_at_random(recipe, clean, folder, options.stops, rng),
        }
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
