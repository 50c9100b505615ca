"""Fit a scaling law to finished runs, check it on the largest one, and extrapolate."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatoken.base.config.model_config import ModelConfig
from megatoken.base.console import Console, format_quantity
from megatoken.base.errors import ConfigError, DataError
from megatoken.base.pictures import check_picture, draw, line, panel
from megatoken.base.system.atomic_write import read_object
from megatoken.base.system.metrics_log import STATUS, Row, find_last_rows
from megatoken.model.flops import count_matmul_parameters
from megatoken.plan.loss_law import Law
from megatoken.store.commit import list_steps, step_folder
from megatoken.store.manifest import decode_model_config, read_manifest
from megatoken.study.scaling_law import INTERVAL, choose_terms, fit_law, interval, resample

MAX_GROWTH = 100  # warn about extrapolations beyond this multiple of the largest run's FLOPs
LARGE_ERROR = 0.02  # warn if the largest run's loss is predicted with a larger relative error
DEFAULT_BUDGETS = (10, 100)  # multiples of the largest run's FLOPs
CURVE_POINTS = 100


@dataclass(frozen=True)
class FinishedRun:
    """A run's size, tokens and loss, to which the law is fitted.

    parameters: N, the weights used in matmuls. tokens: D, the training tokens. loss: the last
    validation loss in nats. tokenizer, dataset: fingerprints of the data.
    """

    folder: Path
    parameters: int
    tokens: int
    loss: float
    tokenizer: str
    dataset: str

    @property
    def flops(self) -> float:
        return 6.0 * self.parameters * self.tokens


def read_run(folder: Path) -> FinishedRun:
    """Read a finished run.

    Raises DataError unless it is done and has a checkpoint and a validation loss at its last step.
    """
    state = read_object(folder / STATUS).get("state")
    if state != "done":
        raise DataError(f"the run is not finished: {state}" if state else "not a run", folder)
    rows = find_last_rows(folder, ("train", "val"))
    val = rows.get("val", {})
    loss = val.get("loss")
    if val.get("step") != rows.get("train", {}).get("step") or not isinstance(loss, float):
        raise DataError("no validation loss at the last step", folder)
    model, meta = read_model(folder)
    n = count_matmul_parameters(model)
    return FinishedRun(folder, n, val["tokens"], loss, meta["tokenizer"], meta["dataset"])


def read_model(folder: Path) -> tuple[ModelConfig, Mapping[str, Any]]:
    """Return the architecture of a run, and `meta` of its newest checkpoint's manifest.

    Raises DataError without a checkpoint.
    """
    steps = list_steps(folder / "checkpoints")
    if not steps:
        raise DataError("no checkpoint with the sizes of the model", folder)
    newest = step_folder(folder / "checkpoints", steps[-1])
    meta = read_manifest(newest).meta
    return decode_model_config(meta, newest), meta


def fit_scaling(
    folders: Sequence[Path], budgets: Sequence[float], plot: Path | None, console: Console
) -> Row:
    """Fit a scaling law to runs, print and draw it, and return what --json prints.

    Raises DataError if the runs do not determine a law, and ConfigError for an impossible budget.

    budgets: FLOPs for which to extrapolate.
    """
    if not all(0 < flops < math.inf for flops in budgets):
        raise ConfigError("a budget is not a positive number", "--flops")
    if plot:
        check_picture(plot)
    folders = [path for path in dict.fromkeys(folders) if not path.is_file()]  # logs of `sweep`
    runs = sorted(map(read_run, folders), key=lambda run: run.flops)
    largest = runs[-1]
    for run in runs:
        if run.tokenizer != largest.tokenizer:
            raise DataError(f"{run.folder} and {largest.folder} have different tokenizers")
        if run.dataset != largest.dataset:
            console.warn(f"{run.folder} and {largest.folder} were trained on different data")
    law = fit_runs(runs)
    laws = resample(law, *to_arrays(runs))
    budgets = budgets or [times * largest.flops for times in DEFAULT_BUDGETS]
    data = {
        "runs": show_runs(law, runs, console),
        **show_law(law, laws, console),
        "held_out": hold_out_largest(runs, console),
        "budgets": [extrapolate(flops, law, laws, largest, console) for flops in budgets],
    }
    if plot:
        console.print(f"picture: {draw_law(plot, law, laws, runs, max(budgets))}")
    return data


def to_arrays(runs: Sequence[FinishedRun]) -> np.ndarray:
    """Return N, D and losses, each with one value per run."""
    return np.array([(run.parameters, run.tokens, run.loss) for run in runs], float).T


def fit_runs(runs: Sequence[FinishedRun]) -> Law:
    """Fit a law to runs. Raises DataError if they do not determine one."""
    parameters, tokens, losses = to_arrays(runs)
    return fit_law(choose_terms(parameters, tokens), parameters, tokens, losses)


def show_runs(law: Law, runs: Sequence[FinishedRun], console: Console) -> list[Row]:
    """Print each run's loss next to the loss that the law predicts; return the rows."""
    rows = []
    cells: list[tuple[str, ...]] = [("run", "N", "D", "6 N D", "loss", "law", "error")]
    for run in runs:
        fitted = float(law.loss(run.parameters, run.tokens))
        row: Row = {
            "run": run.folder.name,
            "N": run.parameters,
            "D": run.tokens,
            "flops": run.flops,
            "loss": run.loss,
            "law": fitted,
            "error_share": fitted / run.loss - 1,
        }
        rows.append(row)
        sizes = [format_quantity(row[key]) for key in ("N", "D", "flops")]
        cells.append(
            (row["run"], *sizes, f"{run.loss:.4f}", f"{fitted:.4f}", f"{row['error_share']:+.2%}")
        )
    console.table(cells, left=1)
    return rows


def show_law(law: Law, laws: Sequence[Law], console: Console) -> Row:
    """Print the law's formula and confidence intervals of its coefficients; return them.

    laws: laws fitted to bootstrap resamples.
    """
    names = law.terms
    fits = {"E": describe(law.floor, [other.floor for other in laws])}
    formula = f"loss = {law.floor:.4f}"
    for index, name in enumerate(names):
        exponents = [other.exponents[index] for other in laws]
        fits[f"exponent of {name}"] = describe(law.exponents[index], exponents)
        formula += f" + {law.factors[index]:.4g} / {name}^{law.exponents[index]:.3f}"
    console.print(formula)
    console.print(
        f"N: weights in products, D: tokens, C: 6 N D; in brackets 80% of {len(laws)} resamples"
    )
    console.table([(name, format_range(fit)) for name, fit in fits.items()])
    return {"terms": list(names), "formula": formula, "factors": list(law.factors), "fits": fits}


def describe(value: float, resamples: Sequence[float]) -> dict[str, float]:
    """Return a value and its confidence interval, from its values in bootstrap resamples."""
    low, high = interval(resamples)
    return {"value": value, "low": low, "high": high}


def format_range(fit: Mapping[str, float]) -> str:
    """Format a value and its interval, as returned by `describe`."""
    return "{value:.4f} ({low:.4f} to {high:.4f})".format(**fit)


def hold_out_largest(runs: Sequence[FinishedRun], console: Console) -> dict[str, float] | None:
    """Predict the largest run's loss from a law fitted to the other runs.

    Prints and returns the prediction, or returns None if there are too few other runs.
    """
    largest = runs[-1]
    try:
        law = fit_runs(runs[:-1])
    except DataError:
        console.print("check: too few runs to predict the largest from the others")
        return None
    predicted = float(law.loss(largest.parameters, largest.tokens))
    error = predicted / largest.loss - 1
    console.print(
        f"check: {largest.folder.name} predicted from the others: {predicted:.4f}, {error:+.2%}"
    )
    if abs(error) > LARGE_ERROR:
        console.warn("the check is far off: add runs of other sizes")
    return {"predicted": predicted, "loss": largest.loss, "error_share": error}


def spend(law: Law, flops: Any, largest: FinishedRun) -> tuple[Any, Any]:
    """Return N and D on which to spend `flops`, a number or an array.

    If the law depends on N and D separately, the split has the lowest loss. If it depends on only
    one of them, the other stays as in the largest run. If it depends only on their product, they
    keep the ratio of the largest run.
    """
    if law.terms == ("N", "D"):
        return law.best_split(flops)
    growth = flops / largest.flops
    n_power = {"N": 1.0, "D": 0.0, "C": 0.5}[law.terms[0]]
    return largest.parameters * growth**n_power, largest.tokens * growth ** (1 - n_power)


def extrapolate(
    flops: float, law: Law, laws: Sequence[Law], largest: FinishedRun, console: Console
) -> Row:
    """Print and return the lowest loss for a budget of FLOPs, with its model size and tokens."""
    n, d = spend(law, flops, largest)
    data: Row = {"flops": flops, "N": n, "D": d}
    if not math.isfinite(n):
        console.print(f"{flops:.1e} FLOPs: the loss falls with N or D alone, so no split is best")
        return data
    splits = [spend(other, flops, largest) for other in laws]
    losses = [float(other.loss(*split)) for other, split in zip(laws, splits, strict=True)]
    data["N_low"], data["N_high"] = interval([split[0] for split in splits])
    data["loss"] = describe(float(law.loss(n, d)), losses)
    low, middle, high = (format_quantity(data[key]) for key in ("N_low", "N", "N_high"))
    split = (
        f"N {middle} ({low} to {high}), D {format_quantity(d)}, {d / n:.3g} tokens per parameter"
    )
    console.print(f"{flops:.1e} FLOPs: loss {format_range(data['loss'])} with {split}")
    if flops > MAX_GROWTH * largest.flops:
        console.warn(f"{flops:.1e} FLOPs are more than {MAX_GROWTH} times the largest run")
    return data


def draw_law(
    path: Path, law: Law, laws: Sequence[Law], runs: Sequence[FinishedRun], flops: float
) -> Path:
    """Plot the runs' losses against FLOPs, a curve per model size, and the law's lowest loss.

    Returns the path of the picture.
    """
    lines = []
    for index, size in enumerate(sorted({run.parameters for run in runs})):
        same = [run for run in runs if run.parameters == size]
        color = f"C{index % 10}"
        x = [run.flops for run in same]
        label = f"N {format_quantity(size)}"
        lines.append(line(x, [run.loss for run in same], label, fmt="o", color=color))
        if law.terms == ("N", "D"):
            tokens = np.geomspace(same[0].tokens / 2, same[-1].tokens * 10, CURVE_POINTS)
            lines.append(line(6 * size * tokens, law.loss(size, tokens), lw=1, color=color))
    budgets = np.geomspace(runs[0].flops, flops, CURVE_POINTS)
    lowest, *others = [each.loss(*spend(each, budgets, runs[-1])) for each in (law, *laws)]
    band = np.nanquantile(others, INTERVAL, axis=0)
    label = "lowest loss by the law (80% of resamples)"
    lines.append(line(budgets, lowest, label, band=band, fmt="k--", lw=1))
    ylabel = "validation loss (nats per token)"
    shown = panel(*lines, xscale="log", xlabel="training FLOPs (6 N D)", ylabel=ylabel)
    return draw([[shown]], path, width=8, heights=(5,))
