"""Draw the picture of `megatoken plan`: speed and hours by number of GPUs."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from megatoken.estimate.plan import Plan
from megatoken.plots import load_pyplot, open_panels, save_figure


def draw_plan(
    name: str, scaled: Sequence[Plan], families: Mapping[str, Sequence[Plan]], target: Path
) -> Path:
    """Draw tokens/s and MFU by number of GPUs, and hours by number of GPUs for each model.

    scaled: plans of the run, one per number of GPUs. families: such plans for each model. Raises
    ConfigError and StorageError as `save_figure` does.
    """
    pyplot = load_pyplot()
    figure, (speed, hours) = open_panels(pyplot, 2, size=(6.5, 4.8))
    speed.set(title=f"{name}: does not fit", ylabel="tokens a second (at each point: MFU)")
    if scaled:
        speed.set_title(f"{name}: {scaled[0].step.tokens:,} tokens a step")
        gpus = [plan.layout.gpus for plan in scaled]
        rates = [plan.tokens_per_second for plan in scaled]
        linear = [count * rates[0] / gpus[0] for count in gpus]
        speed.plot(gpus, linear, "--", color="gray", label="linear")
        speed.plot(gpus, rates, marker="o", label="predicted")
        low, high = zip(*(plan.spread for plan in scaled), strict=True)
        speed.fill_between(gpus, np.multiply(low, rates), np.multiply(high, rates), alpha=0.2)
        for plan, count, rate in zip(scaled, gpus, rates, strict=True):
            speed.annotate(f"\n{plan.mfu:.0%}", (count, rate), fontsize=7, ha="center", va="top")
        speed.legend(fontsize=8)
    hours.set(ylabel="hours", title="hours to 20 tokens a parameter")
    for model, plans in families.items():
        fitting = [plan for plan in plans if plan.fits]
        gpus = [plan.layout.gpus for plan in fitting]
        hours.plot(gpus, [plan.hours for plan in fitting], marker="o", markersize=3, label=model)
    if families:
        hours.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    for axes in (speed, hours):
        axes.set(xlabel="GPUs", yscale="log")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
    return save_figure(pyplot, figure, target)
