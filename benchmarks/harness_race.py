"""Compare lm-evaluation-harness with ours on HellaSwag: equal choices, and the speed of each.

    python -m benchmarks.harness_race --data hellaswag_val.jsonl --text FILE --harness PYTHON

Models: random weights (4 layers of width 256, and GPT-2 124M on the first --limit examples), and a
small one trained on TEXT for two minutes, each exported to a Hugging Face folder that both read.
Both run as full programs in interleaved rounds; loading is not timed. The harness chooses its
batch size first. Ours is timed with two scores, and with acc_token_mean, which has other prompts.
Prints one JSON line.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from megatoken.base.config.model_config import ModelConfig
from megatoken.base.config.presets import PRESETS
from megatoken.convert.hf.export import write_hf
from megatoken.model.gpt import GPT
from megatoken.text.tokenizer import load_tokenizer

SIDE = Path(__file__).with_name("harness_side.py")
BATCH_SIZES = (1, 8, 32)
TRIAL_EXAMPLES = 20
SMALL = ModelConfig(n_layer=4, n_head=4, d_model=256, d_ff=1024, vocab_size=50257, seq_len=1024)
TRAINED = [
    "model.seq_len=512", "budget.batch_tokens=4096", "budget.steps=150", "evaluate.every=0", "sample.every=0",
    "log.plots=false", "save.every=0",
]  # fmt: skip


def run_ours(folder: Path, data: Path, limit: int, *arguments: str) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "megatoken",
        "eval",
        str(folder),
        "--tasks",
        "hellaswag",
        "--data",
        str(data),
    ]
    output = run([*command, "--limit", str(limit), "--examples", "--json", *arguments])
    metrics: dict[str, Any] = json.loads(output.splitlines()[-1])["tasks"]["hellaswag"]
    return metrics


def run_harness(
    python: str, folder: Path, data: Path, limit: int, batch_size: int
) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(
        run([python, str(SIDE), str(folder), str(data), str(limit), str(batch_size)]).splitlines()[
            -1
        ]
    )
    return result


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr[-3000:]}")
    return done.stdout


def write_random(model_config: ModelConfig, folder: Path) -> Path:
    model = GPT(model_config)
    folder.mkdir()
    write_hf(folder, model.eval(), load_tokenizer("gpt2"), "fp32")
    return folder


def write_trained(text: Path, folder: Path) -> Path:
    ours = [sys.executable, "-m", "megatoken"]
    run([*ours, "prepare", str(text), "--out", f"{folder}-data", "--tokenizer", "bpe:4096"])
    run(
        [
            *ours,
            "train",
            "quickstart",
            "--out",
            f"{folder}-run",
            f"data.path={folder}-data",
            *TRAINED,
        ]
    )
    run([*ours, "export", f"{folder}-run", "--out", str(folder)])
    return folder


def race(python: str, folder: Path, data: Path, limit: int, rounds: int) -> dict[str, Any]:
    """Return the choices that agree, examples per second of each, and ratios by round."""
    trials = {
        size: run_harness(python, folder, data, TRIAL_EXAMPLES, size)["seconds"]
        for size in BATCH_SIZES
    }
    batch_size = min(trials, key=lambda size: trials[size])
    turns = []
    for number in range(rounds):
        theirs = run_harness(python, folder, data, limit, batch_size)
        ours = run_ours(folder, data, limit, "--no-token-mean")
        three = run_ours(folder, data, limit)
        n = len(theirs["pred"])
        agree = {
            score: sum(a == b[score] for a, b in zip(theirs[score], three["examples"], strict=True))
            for score in ("pred", "pred_norm")
        }
        turns.append([n / result["seconds"] for result in (theirs, ours, three)])
        print(f"{folder.name}, round {number}: {agree} of {n}; examples/s {turns[-1]}", flush=True)
    harness, two, three_rates = zip(*turns, strict=True)
    return {
        "n": n,
        "agree": agree,
        "scores": {score: three[score] for score in ("acc", "acc_norm", "acc_token_mean")},
        "harness_batch_size": batch_size,
        "examples_per_second": {
            "harness": statistics.median(harness),
            "acc, acc_norm": statistics.median(two),
            "acc, acc_norm, acc_token_mean": statistics.median(three_rates),
        },
        "times_as_fast": {
            "acc, acc_norm": statistics.median(b / a for a, b, _ in turns),
            "acc, acc_norm, acc_token_mean": statistics.median(c / a for a, _, c in turns),
        },
        "turns": turns,
        "lm_eval": theirs["version"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="examples of HellaSwag, .jsonl")
    parser.add_argument(
        "--text", type=Path, help="text to train a small model on; without it none is trained"
    )
    parser.add_argument(
        "--harness", default=sys.executable, help="a Python that has lm_eval (default this one)"
    )
    parser.add_argument(
        "--limit",
        type=int,
        default=60,
        help="examples for GPT-2 124M (default 60); 0: leave it out",
    )
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    data = options.data.resolve()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        models = [(write_random(SMALL, root / "random-4x256"), 0)]
        if options.text:
            models.append((write_trained(options.text.resolve(), root / "trained-4x256"), 0))
        if options.limit:
            models.append(
                (write_random(PRESETS["gpt2-124m"], root / "random-gpt2-124m"), options.limit)
            )
        races = {
            folder.name: race(options.harness, folder, data, limit, options.rounds)
            for folder, limit in models
        }
    print(json.dumps({"races": races}))


if __name__ == "__main__":
    main()
