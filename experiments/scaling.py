"""Fit `megatoken scaling`'s law to real runs, and predict one that it has not seen.

    python -m experiments.scaling [--work FOLDER] [--plot scaling.png]

Trains nine runs of the quickstart's model and corpus: width 48, 96 and 192, each on 256K, 512K and
1,024K tokens, with learning rate 0.384 / width, measured on all held-out text. The law is loss = E
+ A / N^a + B / D^b. The run with the most FLOPs is also predicted from the other eight. --work
keeps runs, so that a stopped experiment continues. One thread; a quarter of an hour. Prints one
JSON line.
"""

import argparse
import json
import tempfile
from pathlib import Path

from benchmarks.quickstart_race import prepare_corpus, run

WIDTHS, STEPS = (48, 96, 192), (500, 1000, 2000)  # of 512 tokens
RATE_TIMES_WIDTH = 4e-3 * 96
SETTINGS = [
    "evaluate.every=1dur",
    "evaluate.tokens=200000",
    "save.every=1dur",
    "sample.every=0steps",
]
SETTINGS += ["log.plots=false", "machine.threads=1"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, help="folder to keep (default: a temporary one)")
    parser.add_argument(
        "--plot", type=Path, default=Path("scaling.png"), help="picture of runs and law"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.work or Path(temporary)).resolve()
        prepare_corpus(folder)
        outs = []
        for width in WIDTHS:
            for steps in STEPS:
                outs.append(f"runs/{width}-{steps}")
                sizes = (
                    f"model.d_model={width}",
                    f"optim.lr={RATE_TIMES_WIDTH / width:.3g}",
                    f"budget.steps={steps}",
                    "budget.batch_tokens=512",
                )
                end = run(folder, "train", "quickstart", "--out", outs[-1], *sizes, *SETTINGS)
                print(f"{outs[-1]}: {end['val_loss']:.4f}", flush=True)
        result = run(folder, "scaling", *outs, "--plot", str(options.plot.resolve()))
    print(json.dumps({"soak": "scaling", **result}), flush=True)


if __name__ == "__main__":
    main()
