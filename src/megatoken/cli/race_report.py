"""What a race has shown: tokens, FLOPs and time to a loss, with spread and p-values; a table, a picture, a record."""

import math
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatoken.bench.report import save_picture, show_rows, write_record
from megatoken.bench.workload import describe_seconds
from megatoken.cli.scaling_fit import read_model
from megatoken.config.schema import MachineConfig
from megatoken.console import Console
from megatoken.errors import ConfigError
from megatoken.estimate.paired_test import compute_p_value
from megatoken.model.flops import count_parameters, flops_per_token
from megatoken.plots import choose_time_unit, format_tick, save_figure
from megatoken.system.atomic_write import read_object
from megatoken.system.device import open_device
from megatoken.system.metrics_log import STATUS, read_metrics
from megatoken.system.timing import Timing
from megatoken.train.run_folder import CHECKPOINTS

PICTURE, RECORD = "race.png", "race"
UNITS = {"loss": "nats per token", "bits_per_byte": "bits per byte"}
SLOW = 10  # times the median of a token's seconds: a first step, which compiles or allocates, counts as the median
TEST = "two-sided t-test of the differences by seed (tokens, time: of their logarithms)"
COLUMNS = {
    **{
        "contender": "contender",
        "reached": "reached",
        "tokens": "tokens",
        "flops": "FLOPs",
        "seconds": "time",
    },
    **{
        "tokens_ratio": "fewer tokens",
        "tokens_p": "p",
        "seconds_ratio": "less time",
        "seconds_p": "p",
    },
    **{"final_loss": "final loss", "loss_p": "p"},
}


@dataclass(frozen=True, slots=True)
class Curve:
    """The validations of a run: tokens trained on before each, seconds of those steps, the loss.

    It ends with an infinite loss where losses that are not finite ended the run.
    """

    tokens: np.ndarray
    seconds: np.ndarray
    losses: np.ndarray

    def find_crossing(self, target: float) -> float | None:
        """The tokens at which the loss first is the target, on a line between the validations around it."""
        reached = np.flatnonzero(self.losses <= target)
        if not len(reached):
            return None
        after = int(reached[0])
        if after == 0 or not math.isfinite(self.losses[after - 1]):
            return float(self.tokens[after])
        return float(
            np.interp(
                -target, -self.losses[after - 1 : after + 1], self.tokens[after - 1 : after + 1]
            )
        )


def read_curve(run: Path, metric: str, warn: Callable[[str], None]) -> Curve:
    """The validations of a run in `metric`. warn and what is raised: as of `read_metrics`."""
    rows = read_metrics(run, warn)
    steps = np.array(
        [(row["tokens"], row["seconds"]) for row in rows if row["kind"] == "train"], float
    ).reshape(-1, 2)
    tokens = np.concatenate([[0.0], steps[:, 0]])
    each = np.diff(tokens)
    pace = steps[:, 1] / each
    usual = np.median(pace) if len(pace) else 0.0
    clock = np.concatenate([[0.0], np.cumsum(np.where(pace > SLOW * usual, usual, pace) * each)])
    val = [row for row in rows if row["kind"] == "val"]
    at, losses = (np.array([row[key] for row in val], float) for key in ("tokens", metric))
    if read_object(run / STATUS).get("state") != "done":
        at, losses = np.append(at, tokens[-1]), np.append(losses, math.inf)
    return Curve(at, np.interp(at, tokens, clock), np.where(np.isfinite(losses), losses, math.inf))


def report(
    options: Namespace,
    labels: Sequence[str],
    metric: str,
    folders: Mapping[int, Mapping[str, Path]],
) -> dict[str, Any]:
    """Print, draw and record what the finished runs show. folders: of each seed, the run of each contender.

    Raises ConfigError for a target that is above a first loss, or infinite.
    """
    console: Console = options.console
    target = options.target_loss
    answer: dict[str, Any] = {
        "metric": metric,
        "unit": UNITS[metric],
        "test": TEST,
        "seeds": [*folders],
    }
    answer |= {
        "target": target or f"the final loss of {labels[0]} with the same seed",
        "contenders": [],
    }
    if not folders:
        return answer
    curves = {
        label: [read_curve(runs[label], metric, console.warn) for runs in folders.values()]
        for label in labels
    }
    targets = [target or float(curve.losses[-1]) for curve in curves[labels[0]]]
    if math.inf in targets:
        what = f"a run of {labels[0]} ended by losses that are not finite, so it sets no target"
        raise ConfigError(what, str(options.out), "give --target-loss")
    if target and target >= (
        first := min(curve.losses[0] for each in curves.values() for curve in each)
    ):
        raise ConfigError(
            f"a run begins with {first:.4f}", "--target-loss", f"give a loss below, not {target:g}"
        )
    rows = [
        describe(label, curves[label], targets, [runs[label] for runs in folders.values()])
        for label in labels
    ]
    for row in rows:
        compare(row, rows[0])
    answer["contenders"] = rows
    show(rows, answer, console)
    save_picture(
        lambda pyplot, path: draw_race(pyplot, path, curves, targets, metric),
        options.out / PICTURE,
        console,
    )
    device = open_device(MachineConfig())
    command = ["megatoken", *options.words]
    console.print(f"record: {write_record(options.out, RECORD, answer, device.name, command)}")
    return answer


def describe(
    label: str, curves: Sequence[Curve], targets: Sequence[float], folders: Sequence[Path]
) -> dict[str, Any]:
    """The row of a contender: `runs` by seed, and the figures of those that reached their target."""
    saved = [folder for folder in folders if (folder / CHECKPOINTS).is_dir()]
    model, _ = read_model((saved or folders)[0])
    per_token = flops_per_token(model, causal=True)
    runs: list[dict[str, Any]] = []
    for curve, target in zip(curves, targets, strict=True):
        tokens = curve.find_crossing(target)
        flops = seconds = None
        if tokens is not None:
            flops, seconds = (
                tokens * per_token,
                float(np.interp(tokens, curve.tokens, curve.seconds)),
            )
        runs.append({"target": target, "tokens": tokens, "flops": flops, "seconds": seconds})
        final = None if math.isinf(curve.losses[-1]) else float(curve.losses[-1])
        runs[-1] |= {"final_loss": final, "lowest_loss": float(curve.losses.min())}
        runs[-1] |= {
            "trained_tokens": int(curve.tokens[-1]),
            "trained_seconds": float(curve.seconds[-1]),
        }
    row: dict[str, Any] = {
        "contender": label,
        "parameters": count_parameters(model),
        "flops_per_token": per_token,
    }
    row["reached"] = sum(each["tokens"] is not None for each in runs)
    for key in ("tokens", "flops", "seconds", "final_loss"):
        row[key] = figure([each[key] for each in runs if each[key] is not None])
    return row | {"runs": runs}


def figure(values: Sequence[float]) -> dict[str, Any] | None:
    """Median, quartiles (of fewer than four values the extremes) and their number; None of none."""
    return describe_seconds(Timing(tuple(values))) if values else None


def compare(row: dict[str, Any], first: dict[str, Any]) -> None:
    """Add to a row the ratios of the first contender's tokens and time to its own, and p-values of the differences.

    Ratios are of the seeds with which both reached the target; a p-value needs all of them, and two at least.
    """
    if row is first:
        return
    pairs = list(zip(first["runs"], row["runs"], strict=True))
    for key in ("tokens", "seconds"):
        ratios = [a[key] / b[key] for a, b in pairs if a[key] and b[key]]
        row[f"{key}_ratio"] = figure(ratios)
        row[f"{key}_p"] = (
            compute_p_value([math.log(ratio) for ratio in ratios])
            if len(ratios) == len(pairs)
            else None
        )
    ends = [(a["final_loss"], b["final_loss"]) for a, b in pairs]
    row["loss_p"] = (
        None if any(None in both for both in ends) else compute_p_value([a - b for a, b in ends])
    )


def show(rows: Sequence[dict[str, Any]], answer: dict[str, Any], console: Console) -> None:
    """Print the table, then who missed the target, and what p is."""
    seeds, unit = answer["seeds"], answer["unit"]
    shown = []
    for row in rows:
        cells = {key: row.get(key) for key in COLUMNS} | {
            "reached": f"{row['reached']} of {len(seeds)}"
        }
        cells |= {
            key: f"{row[key]:.2g}"
            for key in COLUMNS
            if key.endswith("_p") and row.get(key) is not None
        }
        cells["final_loss"] = row["final_loss"] and "{median:.4f} ({low:.4f} to {high:.4f})".format(
            **row["final_loss"]
        )
        for key in ("tokens_ratio", "seconds_ratio"):
            cells[key] = row.get(key) and "{median:.2f}x ({low:.2f} to {high:.2f})".format(
                **row[key]
            )
        shown.append(cells)
    target = answer["target"]
    console.print(
        f"\ntarget: {f'{target:g}' if isinstance(target, float) else target}, {unit} of held-out text"
    )
    show_rows(COLUMNS, shown, console)
    for row in rows:
        missed = [
            (seed, run)
            for seed, run in zip(seeds, row["runs"], strict=True)
            if run["tokens"] is None
        ]
        for seed, run in missed:
            console.print(
                f"{row['contender']}, seed {seed}: {run['target']:.4f} not reached, lowest {run['lowest_loss']:.4f}"
            )
    if len(seeds) < 2:
        console.print("no p-value: it takes two seeds or more")
    else:
        console.print(
            f"p: {TEST} from the first contender's; ratios and p of each comparison alone"
        )


def draw_race(
    pyplot: Any,
    path: Path,
    curves: Mapping[str, Sequence[Curve]],
    targets: Sequence[float],
    metric: str,
) -> Path:
    """The validation losses over tokens and over the time of training steps, a colour for each contender."""
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), sharey=True, layout="constrained")
    every = [curve for each in curves.values() for curve in each]
    divisor, unit = choose_time_unit(max(curve.seconds[-1] for curve in every))
    for axis, key, scale in ((axes[0], "tokens", 1), (axes[1], "seconds", divisor)):
        for index, (label, each) in enumerate(curves.items()):
            for number, curve in enumerate(each):
                style = ("-", "--", ":", "-.")[index // 10 % 4]  # there are ten colours
                line = {"color": f"C{index % 10}", "ls": style, "lw": 1.2, "alpha": 0.7}
                line["label"] = None if number else label
                axis.plot(
                    getattr(curve, key) / scale,
                    np.where(np.isfinite(curve.losses), curve.losses, np.nan),
                    **line,
                )
        for target in set(targets):
            axis.axhline(target, color="k", ls="--", lw=0.8)
        axis.xaxis.set_major_formatter(lambda value, _: format_tick(value))
        axis.set(
            xlabel="training tokens" if key == "tokens" else f"time of steps ({unit})",
            xlim=(0, None),
        )
        axis.grid(alpha=0.25)
    # The fall of the first tenth would leave no room for the rest.
    ends = [curve.losses[np.isfinite(curve.losses)][len(curve.losses) // 10 :] for curve in every]
    low, high = (
        min((x.min() for x in ends if len(x)), default=0),
        max((x.max() for x in ends if len(x)), default=1),
    )
    axes[0].set(ylabel=f"validation loss ({UNITS[metric]})", ylim=(low - 0.05 * (high - low), high))
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=2, frameon=False
    )
    return save_figure(pyplot, figure, path)
