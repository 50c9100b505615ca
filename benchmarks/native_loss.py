"""Compare the losses of native bf16 kernels with PyTorch's in fp32.

    python -m benchmarks.native_loss

20 steps of GPT-2 124M from the same weights on the same ids, and 200 steps of the quickstart from
several seeds with the held-out loss at the end. Prints one JSON line.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.quickstart_race import prepare_corpus, run
from megatoken.base.config.presets import PRESETS
from megatoken.base.system.metrics_log import read_metrics
from megatoken.study.bench.runner import Worker
from megatoken.study.bench.worker import WorkerSpec

CONFIGURATIONS = {
    "fp32": {
        "precision": "fp32",
        "gemm_backend": "torch",
        "attention": "flash",
        "adamw": "fused",
        "fused": "off",
    },
    "bf16 native": {
        "precision": "bf16",
        "gemm_backend": "native",
        "attention": "native",
        "adamw": "native",
        "fused": "on",
    },
}
PLAIN = {"compile": "off", "master_weights": "auto"}


def train_124m(name: str, steps: int) -> list[float]:
    """Return the loss of every step, trained in a worker process."""
    machine = CONFIGURATIONS[name] | PLAIN
    worker = Worker(
        spec=WorkerSpec(
            model_config=PRESETS["gpt2-124m"],
            batch_seqs=1,
            device="cpu",
            machine=machine,
            micro_batch=1,
        )
    )
    losses = []
    try:
        worker.warm_up()
        while worker.steps < steps and worker.run_round(1):
            assert worker.loss is not None
            losses.append(worker.loss)
    finally:
        worker.close()
    return losses


def train_quickstart(name: str, folder: Path, seed: int, steps: int) -> dict[str, float]:
    """Return the mean loss of the last tenth of steps, and the final held-out loss."""
    assignments = [
        f"machine.{key}={value}" for key, value in (CONFIGURATIONS[name] | PLAIN).items()
    ]
    assignments += [f"budget.steps={steps}", f"seed={seed}", "log.every=1step", "sample.every=0"]
    out = f"{name}-{seed}".replace(" ", "-")
    run(folder, "train", "quickstart", "--out", out, *assignments)
    rows = read_metrics(folder / out)
    losses = [row["loss"] for row in rows if row["kind"] == "train"]
    held_out = [row["loss"] for row in rows if row["kind"] == "val"]
    return {"train": statistics.fmean(losses[-steps // 10 :]), "held_out": held_out[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--quickstart-steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    curves = {name: train_124m(name, options.steps) for name in CONFIGURATIONS}
    last = {name: losses[-1] for name, losses in curves.items()}
    result: dict[str, Any] = {"steps": options.steps, "losses_124m": curves}
    result["difference_124m"] = last["bf16 native"] / last["fp32"] - 1
    print(json.dumps(last), flush=True)
    ends: dict[str, list[dict[str, float]]] = {name: [] for name in CONFIGURATIONS}
    with tempfile.TemporaryDirectory() as temporary:
        prepare_corpus(Path(temporary))
        for seed in range(1337, 1337 + options.seeds):
            for name in CONFIGURATIONS:
                ends[name].append(
                    train_quickstart(name, Path(temporary), seed, options.quickstart_steps)
                )
                print(name, seed, ends[name][-1], flush=True)
    held_out = {name: [end["held_out"] for end in each] for name, each in ends.items()}
    differences = [
        low - high for low, high in zip(held_out["bf16 native"], held_out["fp32"], strict=True)
    ]
    result |= {
        "quickstart_steps": options.quickstart_steps,
        "quickstart": ends,
        "differences": differences,
    }
    result["between_seeds"] = max(held_out["fp32"]) - min(held_out["fp32"])
    print(json.dumps(result))


if __name__ == "__main__":
    main()
