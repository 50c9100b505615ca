"""Report a race: the tokens, FLOPs and time to reach a loss for each contender, with p-values."""

import math
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatoken.base.config.schema import MachineConfig
from megatoken.base.console import Console
from megatoken.base.errors import ConfigError, Warn
from megatoken.base.markdown_table import format_cell
from megatoken.base.pictures import draw, format_tick, line, line_style, panel
from megatoken.base.system.atomic_write import read_object
from megatoken.base.system.device import open_device
from megatoken.base.system.metrics_log import STATUS, Row, of_kind, read_metrics
from megatoken.base.system.timing import Timing
from megatoken.model.flops import count_parameters, flops_per_token
from megatoken.store.run_folder import CHECKPOINTS
from megatoken.study.bench.report import save_picture, write_record
from megatoken.study.bench.workload import describe_seconds
from megatoken.study.paired_test import compute_p_value
from megatoken.study.plots import choose_time_unit
from megatoken.study.scaling_fit import read_model

UNITS = {"loss": "nats per token", "bits_per_byte": "bits per byte"}
SLOW = 10  # a step this many times slower than the median (compilation) counts as the median
TEST = "two-sided t-test of the differences by seed (tokens, time: of their logarithms)"
COLUMNS = {  # heading and unit of a row's values
    "tokens": ("tokens", "tokens"),
    "flops": ("FLOPs", "flops"),
    "seconds": ("time", "seconds"),
    "tokens_ratio": ("fewer tokens", "ratio"),
    "tokens_p": ("p", "p"),
    "seconds_ratio": ("less time", "ratio"),
    "seconds_p": ("p", "p"),
    "final_loss": ("final loss", "loss"),
    "loss_p": ("p", "p"),
}


@dataclass(frozen=True)
class Curve:
    """The validations of a run, as three sequences with an entry per validation.

    tokens, seconds: training tokens, and seconds of training steps, before the validation.
    losses: losses of the validations. The last one is infinite if the run failed because its loss
    was not finite.
    """

    tokens: np.ndarray
    seconds: np.ndarray
    losses: np.ndarray

    def find_crossing(self, target: float) -> float | None:
        """Return the training tokens at which the loss first reaches `target`, or None.

        They are interpolated linearly between validations.
        """
        below = np.flatnonzero(self.losses <= target)
        if not len(below):
            return None
        end = int(below[0])
        if end == 0 or not math.isfinite(self.losses[end - 1]):
            return float(self.tokens[end])
        span = slice(end - 1, end + 1)
        return float(np.interp(-target, -self.losses[span], self.tokens[span]))


def read_pace(rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray]:
    """Return (tokens, pace) of a run's n steps.

    tokens: (n + 1,) training tokens before each step and at the end. pace: (n,) seconds per token.
    """
    train = of_kind(rows, "train")
    tokens = np.array([0.0, *(row["tokens"] for row in train)])
    return tokens, np.array([row["seconds"] for row in train]) / np.diff(tokens)


def read_curve(run: Path, metric: str, warn: Warn) -> Curve:
    """Read the validations of a run in `metric`, which is `loss` or `bits_per_byte`.

    warn: as in `read_metrics`.
    """
    rows = read_metrics(run, warn)
    val = of_kind(rows, "val")
    tokens, pace = read_pace(rows)
    median = np.median(pace) if len(pace) else 0.0
    pace = np.where(pace > SLOW * median, median, pace)
    seconds = np.concatenate([[0.0], np.cumsum(pace * np.diff(tokens))])
    val_tokens = [row["tokens"] for row in val]
    losses = [row[metric] if math.isfinite(row[metric]) else math.inf for row in val]
    if read_object(run / STATUS).get("state") != "done":
        val_tokens.append(tokens[-1])
        losses.append(math.inf)
    return Curve(
        np.array(val_tokens, float), np.interp(val_tokens, tokens, seconds), np.array(losses)
    )


def report(
    options: Namespace,
    metric: str,
    seeds: Sequence[int],
    folders: Mapping[str, Sequence[Path]],
    console: Console,
) -> Row:
    """Compare the finished runs; print, draw and record the result.

    Raises ConfigError if the target is not finite.

    folders: for each contender, its run folders in the order of `seeds`.
    """
    first, *_ = folders
    data: Row = {
        "metric": metric,
        "unit": UNITS[metric],
        "test": TEST,
        "seeds": seeds,
        "target": options.target_loss or f"the final loss of {first} with the same seed",
        "contenders": [],
    }
    if not seeds:
        return data
    curves = {
        label: [read_curve(run, metric, console.warn) for run in runs]
        for label, runs in folders.items()
    }
    targets = [options.target_loss or float(curve.losses[-1]) for curve in curves[first]]
    if math.inf in targets:
        raise ConfigError(f"{first} diverged, so it sets no target", fix="give --target-loss")
    for label, runs in folders.items():
        row = describe(label, curves[label], targets, runs)
        data["contenders"].append(row)
        if label != first:
            compare(row, data["contenders"][0])
    show(data, console)
    picture = partial(draw_race, curves, targets, metric)
    save_picture(picture, options.out / "race.png", console)
    device = open_device(MachineConfig()).name
    record = write_record(options.out, "race", data, device, ["megatoken", *options.arguments])
    console.print(f"record: {record}")
    return data


def describe(
    label: str, curves: Sequence[Curve], targets: Sequence[float], folders: Sequence[Path]
) -> Row:
    """Return the row of a contender: its `runs`, and statistics of those that reached the target.

    curves, targets, folders: an entry per run.
    """
    saved_runs = [folder for folder in folders if (folder / CHECKPOINTS).is_dir()]
    model, _ = read_model((saved_runs or folders)[0])
    per_token = flops_per_token(model, causal=True)
    pairs = zip(curves, targets, strict=True)
    runs = [describe_run(curve, target, per_token) for curve, target in pairs]
    row: Row = {
        "contender": label,
        "parameters": count_parameters(model),
        "flops_per_token": per_token,
        "reached": sum(run["tokens"] is not None for run in runs),
        "runs": runs,
    }
    for key in ("tokens", "flops", "seconds", "final_loss"):
        row[key] = summarize([run[key] for run in runs if run[key] is not None])
    return row


def describe_run(curve: Curve, target: float, per_token: int) -> Row:
    """Return the tokens, FLOPs and seconds that a run took to reach its target, and its losses.

    The first three are None if it did not reach the target. per_token: FLOPs per token.
    """
    final_loss = float(curve.losses[-1])
    tokens = curve.find_crossing(target)
    return {
        "target": target,
        "tokens": tokens,
        "flops": tokens and tokens * per_token,
        "seconds": tokens and float(np.interp(tokens, curve.tokens, curve.seconds)),
        "final_loss": final_loss if math.isfinite(final_loss) else None,
        "lowest_loss": float(curve.losses.min()),
        "trained_tokens": int(curve.tokens[-1]),
        "trained_seconds": float(curve.seconds[-1]),
    }


def summarize(values: Sequence[float]) -> Row | None:
    """Return the median, quartiles and number of values; None for no values.

    With fewer than four values, the minimum and maximum replace the quartiles.
    """
    return describe_seconds(Timing(tuple(values))) if values else None


def compare(row: Row, first: Row) -> None:
    """Add to a contender's row how its tokens and time compare with those of the first contender.

    A ratio is the first contender's value divided by this one's, for a seed with which both reached
    the target. A p-value is added only if both reached it with all seeds.
    """
    pairs = list(zip(first["runs"], row["runs"], strict=True))
    for key in ("tokens", "seconds"):
        ratios = [a[key] / b[key] for a, b in pairs if a[key] and b[key]]
        is_complete = len(ratios) == len(pairs)
        row[f"{key}_ratio"] = summarize(ratios)
        row[f"{key}_p"] = compute_p_value(np.log(ratios).tolist()) if is_complete else None
    losses = [(a["final_loss"], b["final_loss"]) for a, b in pairs]
    has_all = not any(None in pair for pair in losses)
    row["loss_p"] = compute_p_value([a - b for a, b in losses]) if has_all else None


def show(data: Row, console: Console) -> None:
    """Print the table of contenders, and the runs that did not reach the target."""
    console.print(f"target: {data['target']}, {data['unit']} of held-out text")
    cells = [("contender", "reached", *(heading for heading, _ in COLUMNS.values()))]
    for row in data["contenders"]:
        values = [format_cell(unit, row.get(key)) for key, (_, unit) in COLUMNS.items()]
        cells.append((row["contender"], f"{row['reached']} of {len(row['runs'])}", *values))
    console.table(cells)
    for row in data["contenders"]:
        for seed, run in zip(data["seeds"], row["runs"], strict=True):
            if run["tokens"] is None:
                lowest = f"{run['target']:.4f} not reached, lowest {run['lowest_loss']:.4f}"
                console.print(f"{row['contender']}, seed {seed}: {lowest}")
    console.print(f"p: {TEST}")


def draw_race(
    curves: Mapping[str, Sequence[Curve]], targets: Sequence[float], metric: str, path: Path
) -> Path:
    """Plot validation losses against tokens and against training time, a color per contender.

    Returns the path of the picture.
    """
    ylabel = f"validation loss ({UNITS[metric]})"
    all_curves = [(index, c) for index, runs in enumerate(curves.values()) for c in runs]
    longest = max(curve.seconds[-1] for _, curve in all_curves)
    divisor, unit = choose_time_unit(longest)
    # The limits ignore the first tenth of a run, whose steep fall would leave no room for the rest.
    ends = np.concatenate([curve.losses[len(curve.losses) // 10 :] for _, curve in all_curves])
    ends = ends[np.isfinite(ends)]
    axes: dict[str, Any] = {"xlim": (0, None), "ylim": (0.98 * ends.min(), ends.max())}
    most = max(curve.tokens[-1] for _, curve in all_curves)
    panels = []
    for key, scale, right, label in (
        ("tokens", 1, most, "training tokens"),
        ("seconds", divisor, longest, f"training time ({unit})"),
    ):
        lines = [
            line(getattr(curve, key) / scale, curve.losses, lw=1.2, alpha=0.7, **line_style(index))
            for index, curve in all_curves
        ]
        lines += [
            line([0, right / scale], [target] * 2, color="k", ls="--", lw=0.8)
            for target in set(targets)
        ]
        panels.append(panel(*lines, xlabel=label, formats=(format_tick,), ylabel=ylabel, **axes))
    names = [
        " ".join([Path(recipe).stem, *settings]) for recipe, *settings in map(str.split, curves)
    ]
    return draw([panels], path, key=names)
