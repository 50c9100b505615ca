"""Draw the README's picture: a run's loss over minutes, and its samples at three moments.

python -m experiments.readme_picture RUN --out records/quickstart.png
"""

import argparse
import textwrap
from pathlib import Path

from megatoken.base.pictures import load_pyplot, save_figure
from megatoken.base.system.metrics_log import read_metrics

LINES, COLUMNS = 7, 62  # of a sample that are shown


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = read_metrics(options.run)
    train, val, samples = (
        [row for row in rows if row["kind"] == kind] for kind in ("train", "val", "sample")
    )
    pyplot = load_pyplot()
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(12, 5), layout="constrained", gridspec_kw={"width_ratios": [1, 1.15]}
    )
    left.plot(
        [row["elapsed_seconds"] / 60 for row in train],
        [row["loss"] for row in train],
        lw=0.7,
        alpha=0.5,
    )
    x, y = [row["elapsed_seconds"] / 60 for row in val], [row["loss"] for row in val]
    left.plot(x, y, "o-", color="C1", ms=5, label="validation")
    left.annotate(
        f"{y[-1]:.2f}", (x[-1], y[-1]), xytext=(0, 10), textcoords="offset points", ha="right"
    )
    left.set(xlabel="minutes on two CPU cores", ylabel="loss (nats per token)")
    left.legend()
    left.grid(alpha=0.25)
    right.axis("off")
    chosen = [samples[0], samples[len(samples) // 2], samples[-1]] if len(samples) > 2 else samples
    for index, row in enumerate(chosen):
        lines = [
            wrapped
            for line in row["text"][0].splitlines()
            for wrapped in textwrap.wrap(
                line, COLUMNS, drop_whitespace=False, replace_whitespace=False
            )
            or [""]
        ][:LINES]
        top = 1 - index / len(chosen)
        head = f"step {row['step']:,}"
        right.text(0, top, head, va="top", weight="bold", transform=right.transAxes)
        right.text(
            0,
            top - 0.05,
            "\n".join(lines),
            va="top",
            family="monospace",
            size=8.5,
            transform=right.transAxes,
        )
    save_figure(figure, options.out)


if __name__ == "__main__":
    main()
