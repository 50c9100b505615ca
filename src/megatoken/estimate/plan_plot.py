"""Draw the picture of `megatoken plan`: speed and hours by number of GPUs. Needs matplotlib (the plot extra)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatoken.estimate.plan import Plan
from megatoken.plots import load_pyplot, save_figure


def draw_plan(
    name: str, scaled: Sequence[Plan], families: Mapping[str, Sequence[Plan]], target: Path
) -> Path:
    """Draw tokens/s with MFU by GPUs, and hours by GPUs for each model of `families`, log-log.

    Raises ConfigError without matplotlib or for an unknown suffix, StorageError if the file cannot be written.
    """
    pyplot = load_pyplot()
    figure, (speed, hours) = pyplot.subplots(1, 2, figsize=(13, 4.8), layout="constrained")
    speed.set_title(f"{name}: does not fit")
    if scaled:
        _draw_speed(speed, scaled)
        speed.set_title(f"{name}: {scaled[0].step.tokens:,} tokens a step")
    for model, plans in families.items():
        fitting = [plan for plan in plans if plan.fits]
        gpus = [plan.layout.gpus for plan in fitting]
        hours.plot(gpus, [plan.hours for plan in fitting], marker="o", markersize=3, label=model)
    hours.set(xlabel="GPUs", ylabel="hours", title="hours to 20 tokens a parameter")
    if families:
        hours.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    for axes in (speed, hours):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(lambda count, _: f"{count:g}")
        axes.grid(alpha=0.3, which="both")
    return save_figure(pyplot, figure, target)


def _draw_speed(axes: Any, plans: Sequence[Plan]) -> None:
    gpus = [plan.layout.gpus for plan in plans]
    rates = [plan.tokens_per_second for plan in plans]
    linear = [count * rates[0] / gpus[0] for count in gpus]
    axes.plot(gpus, linear, "--", color="gray", label="linear")
    axes.plot(gpus, rates, marker="o", label="predicted")
    low = [plan.spread[0] * plan.tokens_per_second for plan in plans]
    high = [plan.spread[1] * plan.tokens_per_second for plan in plans]
    axes.fill_between(gpus, low, high, alpha=0.2)
    for plan in plans:
        axes.annotate(
            f"{plan.mfu:.0%}",
            (plan.layout.gpus, plan.tokens_per_second),
            xytext=(0, -13),
            textcoords="offset points",
            ha="center",
            fontsize=7,
        )
    axes.set(xlabel="GPUs", ylabel="tokens a second (at each point: MFU)")
    axes.legend(fontsize=8)
