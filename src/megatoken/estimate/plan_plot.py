"""The picture of `megatoken plan`: speed and hours over the number of GPUs. Needs the plot extra (matplotlib)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatoken.estimate.plan import Plan
from megatoken.plots import load_pyplot, save_figure


def draw_plan(
    name: str, scaled: Sequence[Plan], families: Mapping[str, Sequence[Plan]], target: Path
) -> Path:
    """Draw tokens/s with MFU over GPUs, and hours over GPUs for each model of `families`, both log-log.

    Raises ConfigError without matplotlib or for another ending, StorageError where the file cannot be written.
    """
    pyplot = load_pyplot()
    figure, (speed, hours) = pyplot.subplots(1, 2, figsize=(13, 4.8), layout="constrained")
    _draw_speed(speed, scaled)
    speed.set_title(
        f"{name}: {scaled[0].step.tokens:,} tokens a step" if scaled else f"{name}: does not fit"
    )
    for model, plans in families.items():
        fitting = [plan for plan in plans if plan.fits]
        counts, times = [plan.layout.gpus for plan in fitting], [plan.hours for plan in fitting]
        hours.plot(counts, times, marker="o", markersize=3, label=model)
    hours.set(xlabel="GPUs", ylabel="hours", title="hours to 20 tokens a parameter")
    if families:
        hours.legend(
            fontsize=8, loc="upper left", bbox_to_anchor=(1, 1)
        )  # beside lines that fill the axes
    for axes in (speed, hours):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(lambda count, _: f"{count:g}")
        axes.grid(alpha=0.3, which="both")
    return save_figure(pyplot, figure, target)


def _draw_speed(axes: Any, plans: Sequence[Plan]) -> None:
    counts, rates = [plan.layout.gpus for plan in plans], [plan.tokens_per_second for plan in plans]
    axes.plot(
        counts,
        [count * rates[0] / counts[0] for count in counts],
        "--",
        color="gray",
        label="linear",
    )
    axes.plot(counts, rates, marker="o", label="predicted")
    low, high = (
        [plan.spread[end] * rate for plan, rate in zip(plans, rates, strict=True)] for end in (0, 1)
    )
    axes.fill_between(counts, low, high, alpha=0.2)
    for plan, rate in zip(plans, rates, strict=True):
        label = f"{plan.mfu:.0%}"
        place: dict[str, Any] = {"xytext": (0, -13), "ha": "center"}
        axes.annotate(
            label, (plan.layout.gpus, rate), textcoords="offset points", fontsize=7, **place
        )
    axes.set(xlabel="GPUs", ylabel="tokens a second (at each point: MFU)")
    axes.legend(fontsize=8)
