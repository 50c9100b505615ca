"""The first experiments of the published GPT-2 journeys, on tiny Shakespeare, at full 124M. Ends in one JSON line.

    python tests/soak/journey_soak.py --text tinyshakespeare.txt

1. 338,025 tokens exactly. 2. From scratch the loss starts at 10.9 +/- 0.15. 3. One batch of 4 x 32 tokens is overfitted
to below 2.5 in 50 AdamW steps at 3e-4 (published: about 2.3). 4. 50 steps over windows of B=4, T=32 end near 6.7.
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np

from megatoken.console import Console
from megatoken.data.prepare import prepare
from megatoken.data.tokenizer import load_tokenizer
from megatoken.pretrain import pretrain
from megatoken.recipe import resolve
from megatoken.train.journal import read_metrics

FIFTY_STEPS = ["model.seq_len=32", "budget.batch_tokens=128", "budget.steps=50", "sample.every=0", "log.plots=false"]


def train(out: Path, *overrides: str) -> list[float]:
    """Training losses of the shakespeare recipe in 50 small steps."""
    pretrain(resolve("shakespeare", [*FIFTY_STEPS, *overrides]), out, Console(to_stderr=True))
    return [row["loss"] for row in read_metrics(out) if row["kind"] == "train"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="tiny Shakespeare, 1,115,394 characters")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = prepare(str(options.text), folder / "data", tokenizer="gpt2", val_fraction=0.0)
        ids = load_tokenizer("gpt2").encode(options.text.read_text(encoding="utf-8"))
        (folder / "one").mkdir()
        np.save(folder / "one" / "train_0.npy", ids[: 4 * 32 + 1].astype(np.uint16))
        one = train(folder / "overfit", f"data.path={folder / 'one'}", "evaluate.every=0", "save.every=0")
        many = train(folder / "windows", f"data.path={folder / 'data'}", "evaluate.every=0", "save.every=0")
    answer = {
        "soak": "journey",
        "tokens": made.tokens,
        "first_loss": one[0],
        "overfit_loss": one[-1],
        "windows_first_loss": many[0],
        "windows_last_loss": many[-1],
        "windows_mean_of_last_5": float(np.mean(many[-5:])),
    }
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
