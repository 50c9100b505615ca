"""Repeat the first experiments of published GPT-2 reproductions on tiny Shakespeare.

    python -m experiments.journey --text tinyshakespeare.txt

The text has 338,025 tokens. GPT-2 124M starts at a loss of 10.9 +/- 0.15. One batch of 4 x 32
tokens is overfitted to below 2.5 in 50 AdamW steps at 3e-4 (published: about 2.3). 50 steps of
four windows over the first 200 windows of 32 tokens end near 6.7 (published: 6.80, in the text's
order; shuffled here). Prints one JSON line.
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np

from megatoken.config.load import resolve
from megatoken.console import Console
from megatoken.data.prepare import prepare
from megatoken.data.tokenizer import load_tokenizer
from megatoken.system.metrics_log import read_metrics
from megatoken.train.train import Trainer

FIFTY_STEPS = [
    "model.seq_len=32",
    "budget.batch_tokens=128",
    "budget.steps=50",
    "sample.every=0",
    "log.plots=false",
]


def cut(folder: Path, ids: np.ndarray, *, windows: int) -> Path:
    """Write a dataset of the text's first windows of 32 tokens."""
    folder.mkdir()
    np.save(folder / "train_0.npy", ids[: windows * 32 + 1].astype(np.uint16))
    return folder


def train(out: Path, data: Path) -> list[float]:
    """Return the losses of 50 small steps of the shakespeare recipe."""
    overrides = [*FIFTY_STEPS, f"data.path={data}", "save.every=0"]
    Trainer(resolve("shakespeare", overrides), out, console=Console(to_stderr=True)).fit()
    return [row["loss"] for row in read_metrics(out) if row["kind"] == "train"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--text", type=Path, required=True, help="tiny Shakespeare, 1,115,394 characters"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepared = prepare(str(options.text), folder / "data", tokenizer="gpt2")
        ids = load_tokenizer("gpt2").encode(options.text.read_text(encoding="utf-8"))
        one = train(folder / "overfit", cut(folder / "one", ids, windows=4))
        many = train(folder / "windows", cut(folder / "many", ids, windows=200))
    answer = {
        "soak": "journey",
        "tokens": prepared.tokens,
        "first_loss": one[0],
        "overfit_loss": one[-1],
        "windows_first_loss": many[0],
        "windows_last_loss": many[-1],
        "windows_mean_of_last_5": float(np.mean(many[-5:])),
    }
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
