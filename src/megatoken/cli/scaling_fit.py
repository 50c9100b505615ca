"""`megatoken scaling RUN...`: the law that the losses of finished runs follow, and what it says of larger ones."""

import math
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatoken.bench.report import save_picture, show_rows
from megatoken.checkpoint.commit import list_steps, step_folder
from megatoken.checkpoint.manifest import decode_model_config, read_manifest
from megatoken.config.model_config import ModelConfig
from megatoken.console import Console, format_quantity
from megatoken.errors import ConfigError, DataError
from megatoken.estimate.scaling_law import INTERVAL, Law, choose_terms, fit_law, interval, resample
from megatoken.model.flops import count_matmul_parameters
from megatoken.plots import check_picture, save_figure
from megatoken.system.atomic_write import read_object
from megatoken.system.metrics_log import STATUS, read_metrics

FAR = 100  # times the largest run's FLOPs: beyond it a law says little
FAR_OFF = 0.02  # share of the loss: runs of neighbouring sizes differ by little more
MOST_FLOPS = 1e32  # beyond any machine
DEFAULT_BUDGETS = (10, 100)  # times the largest run's FLOPs
CURVE_POINTS = 100


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """One run: N of its model, its training tokens, its last validation loss in nats, and whose tokens they are."""

    folder: Path
    parameters: int
    tokens: int
    loss: float
    tokenizer: str
    dataset: str

    @property
    def flops(self) -> float:
        return 6.0 * self.parameters * self.tokens


def read_run(folder: Path, warn: Callable[[str], None]) -> FinishedRun:
    """A finished run. warn: as of `read_metrics`.

    Raises DataError for one that is not, or has no validation loss or checkpoint at its end.
    """
    rows = [row for row in read_metrics(folder, warn) if row["kind"] in ("train", "val")]
    last = max((row["step"] for row in rows), default=0)
    if (state := read_object(folder / STATUS).get("state", "unknown")) != "done":
        raise DataError(
            f"the run is not finished: {state} at step {last:,}",
            str(folder),
            "finish it, or leave it out",
        )
    losses = [row["loss"] for row in rows if row["kind"] == "val" and row["step"] == last]
    if not losses or not isinstance(losses[-1], float) or not 0 < losses[-1] < math.inf:
        fix = "leave it out, or train with held-out text and evaluate.tokens"
        raise DataError(f"no validation loss at its last step, {last:,}", str(folder), fix)
    model, meta = read_model(folder)
    parameters = count_matmul_parameters(model)
    identity = (str(meta.get("tokenizer")), str(meta.get("dataset")))
    return FinishedRun(
        folder, parameters, max(row["tokens"] for row in rows), losses[-1], *identity
    )


def read_model(folder: Path) -> tuple[ModelConfig, Mapping[str, Any]]:
    """The architecture of a run, and all that the manifest of its newest checkpoint tells. Raises DataError without."""
    if not (steps := list_steps(folder / "checkpoints")):
        raise DataError(
            "it has no checkpoint, which names the sizes of its model", str(folder), "leave it out"
        )
    newest = step_folder(folder / "checkpoints", steps[-1])
    meta = read_manifest(newest).meta
    return decode_model_config(meta.get("shape"), newest), meta


def scaling(options: Namespace) -> dict[str, Any]:
    """Fit, print and draw the law of some runs.

    Raises DataError for runs that fix no law, ConfigError for a budget that is none.
    """
    for flops in options.flops:
        if not 0 < flops <= MOST_FLOPS:
            raise ConfigError(
                f"a budget of {flops:g} FLOPs", "--flops", "give a number above 0, such as 1e18"
            )
    if options.plot:
        check_picture(options.plot)
    console: Console = options.console
    runs = sorted(
        (read_run(folder, console.warn) for folder in dict.fromkeys(options.runs)),
        key=lambda run: run.flops,
    )
    check_comparable(runs, console)
    law, laws = fit_runs(runs)
    answer = {"runs": show_runs(law, runs, console), **show_law(law, laws, console)}
    answer["held_out"] = hold_out_largest(runs, console)
    budgets = options.flops or [times * runs[-1].flops for times in DEFAULT_BUDGETS]
    answer["budgets"] = [extrapolate(flops, law, laws, runs[-1], console) for flops in budgets]
    if options.plot:
        save_picture(
            lambda pyplot, path: draw_law(pyplot, path, law, laws, runs, max(budgets)),
            options.plot,
            console,
        )
    return answer


def to_arrays(runs: Sequence[FinishedRun]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """N, D and losses, one of each a run."""
    columns = ([getattr(run, name) for run in runs] for name in ("parameters", "tokens", "loss"))
    parameters, tokens, losses = (np.array(column, dtype=float) for column in columns)
    return parameters, tokens, losses


def fit_runs(runs: Sequence[FinishedRun]) -> tuple[Law, list[Law]]:
    """The law of the runs, and those of resampled losses. Raises DataError for runs that fix none."""
    parameters, tokens, losses = to_arrays(runs)
    law = fit_law(choose_terms(parameters, tokens), parameters, tokens, losses)
    return law, resample(law, parameters, tokens, losses)


def show_runs(law: Law, runs: Sequence[FinishedRun], console: Console) -> list[dict[str, Any]]:
    """Print each run's loss beside the law's; the rows of --json."""
    rows: list[dict[str, Any]] = []
    parameters, tokens, _ = to_arrays(runs)
    for run, fitted in zip(runs, law.loss(parameters, tokens), strict=True):
        sizes = {"run": run.folder.name, "N": run.parameters, "D": run.tokens, "flops": run.flops}
        rows.append(
            {
                **sizes,
                "loss": run.loss,
                "law": float(fitted),
                "error_share": float(fitted / run.loss - 1),
            }
        )
    heads = {
        "run": "run",
        "N": "N",
        "D": "D",
        "flops": "6 N D",
        "loss": "loss",
        "law": "law",
        "error_share": "error",
    }
    shown = [
        {**row, **{name: format_quantity(row[name]) for name in ("N", "D", "flops")}}
        for row in rows
    ]
    show_rows(heads, [{**row, "law": f"{row['law']:.4f}"} for row in shown], console)
    return rows


def show_law(law: Law, laws: list[Law], console: Console) -> dict[str, Any]:
    """Print the formula and the ranges of its numbers; its part of --json."""
    names = law.terms.names
    fits = {"E": describe(law.floor, [other.floor for other in laws])}
    for index, name in enumerate(names):
        fits[f"exponent of {name}"] = describe(
            law.exponents[index], [other.exponents[index] for other in laws]
        )
    parts = zip(law.factors, names, law.exponents, strict=True)
    formula = f"loss = {law.floor:.4f} + " + " + ".join(
        f"{f:.4g} / {name}^{e:.3f}" for f, name, e in parts
    )
    console.print(
        f"\n{formula}\nN: weights in matrix products, D: tokens, C: 6 N D; in brackets 80% of {len(laws)} resamples"
    )
    console.table([(name, format_range(fit)) for name, fit in fits.items()])
    return {"terms": list(names), "formula": formula, "factors": list(law.factors), "fits": fits}


def check_comparable(runs: list[FinishedRun], console: Console) -> None:
    """Raise DataError for losses of different tokenizers; warn of different data."""
    for run in runs[1:]:
        if run.tokenizer != runs[0].tokenizer:
            what = f"losses of different tokenizers cannot be compared: {runs[0].folder} and {run.folder}"
            raise DataError(what, fix="give runs of one tokenizer")
        if run.dataset != runs[0].dataset:
            console.warn(
                f"{run.folder} was trained on other data than {runs[0].folder}: is the held-out text the same?"
            )


def describe(value: float, resampled: list[float]) -> dict[str, float]:
    low, high = interval(resampled)
    return {"value": value, "low": low, "high": high}


def format_range(fit: dict[str, float]) -> str:
    return f"{fit['value']:.4f} ({fit['low']:.4f} to {fit['high']:.4f})"


def hold_out_largest(runs: list[FinishedRun], console: Console) -> dict[str, float] | None:
    """What the law of the other runs says of the largest one; None where they are too few for a law."""
    largest, others = runs[-1], runs[:-1]
    parameters, tokens, losses = to_arrays(others)
    try:
        law = fit_law(choose_terms(parameters, tokens), parameters, tokens, losses)
    except DataError:
        console.print("check    too few runs to leave out the largest and predict it")
        return None
    predicted = float(law.loss(largest.parameters, largest.tokens))
    error = predicted / largest.loss - 1
    console.print(
        f"check    without {largest.folder.name} the law says {predicted:.4f} of it: {error:+.2%}"
    )
    if abs(error) > FAR_OFF:
        console.warn(
            "the check is far off: what the law says of larger runs is a guess; more runs of other sizes help"
        )
    return {"predicted": predicted, "loss": largest.loss, "error_share": error}


def spend(law: Law, flops: Any, largest: FinishedRun) -> tuple[Any, Any]:
    """N and D that these FLOPs buy: the best split where the law has both, else as the largest run.

    A law of D keeps its model, one of N its tokens, one of C their proportion. flops: a number or an array.
    """
    if law.terms.names == ("N", "D"):
        return law.best_split(flops)
    grow = flops / largest.flops
    by_n, by_d = {"N": (1.0, 0.0), "D": (0.0, 1.0), "C": (0.5, 0.5)}[law.terms.names[0]]
    return largest.parameters * grow**by_n, largest.tokens * grow**by_d


def extrapolate(
    flops: float, law: Law, laws: list[Law], largest: FinishedRun, console: Console
) -> dict[str, Any]:
    """The lowest loss that this many FLOPs buy by the law, and with which model and tokens."""
    parameters, tokens = spend(law, flops, largest)
    answer: dict[str, Any] = {"flops": flops, "N": parameters, "D": tokens}
    if not math.isfinite(parameters):
        console.print(
            f"{flops:.1e} FLOPs: the loss falls with N or with D alone here, so no split of them is the best"
        )
        return answer
    others = [spend(other, flops, largest) for other in laws]
    answer["N_low"], answer["N_high"] = interval([n for n, _ in others])
    answer["loss"] = describe(
        float(law.loss(parameters, tokens)),
        [float(other.loss(n, d)) for other, (n, d) in zip(laws, others, strict=True)],
    )
    low, high = (format_quantity(answer[name]) for name in ("N_low", "N_high"))
    model = format_quantity(parameters) + (f" ({low} to {high})" if low != high else "")
    times = flops / largest.flops
    far = f"; {times:,.0f} times the largest run: a guess" if times > FAR else ""
    split = f"N {model}, D {format_quantity(tokens)}, {tokens / parameters:.3g} tokens a parameter"
    console.print(f"{flops:.1e} FLOPs: loss {format_range(answer['loss'])} with {split}{far}")
    return answer


def draw_law(
    pyplot: Any, path: Path, law: Law, laws: list[Law], runs: list[FinishedRun], flops: float
) -> Path:
    """The runs over FLOPs, a colour and a curve of the law for each model size, and the lowest loss by the law."""
    figure, axis = pyplot.subplots(figsize=(8, 5), layout="constrained")
    sizes = sorted({run.parameters for run in runs})
    for index, size in enumerate(sizes):
        same = [run for run in runs if run.parameters == size]
        colour = pyplot.colormaps["viridis"](index / max(len(sizes) - 1, 1) * 0.85)
        axis.plot(
            [r.flops for r in same],
            [r.loss for r in same],
            "o",
            color=colour,
            label=f"N {format_quantity(size)}",
        )
        if law.terms.names == ("N", "D"):
            tokens = np.geomspace(
                min(r.tokens for r in same) / 2, max(r.tokens for r in same) * 10, CURVE_POINTS
            )
            axis.plot(6 * size * tokens, law.loss(size, tokens), color=colour, lw=1)
    x = np.geomspace(runs[0].flops, flops, CURVE_POINTS)
    bands = [other.loss(*spend(other, x, runs[-1])) for other in (law, *laws)]
    axis.plot(x, bands[0], "k--", lw=1, label="lowest loss by the law")
    low, high = np.nanquantile(bands[1:], INTERVAL, axis=0)
    axis.fill_between(x, low, high, color="k", alpha=0.12, lw=0, label="80% of resamples")
    axis.set(
        xscale="log", xlabel="training FLOPs (6 N D)", ylabel="validation loss (nats per token)"
    )
    axis.grid(alpha=0.25)
    axis.legend()
    return save_figure(pyplot, figure, path)
