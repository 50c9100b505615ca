"""Draw the pictures of `megatoken plan`: speed and hours by number of GPUs, and the ladder."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatoken.plan.estimate import Plan
from megatoken.study.plots import open_panels, save_figure


def draw_plan(
    name: str,
    scaled: Sequence[Plan],
    families: Mapping[str, Sequence[Plan]],
    length: str,
    target: Path,
) -> Path:
    """Draw tokens/s, MFU and hours by number of GPUs.

    scaled: plans of the run that fit, one per number of GPUs. families: such plans for each model.
    length: their training length in words. Raises ConfigError and StorageError as `save_figure` does.
    """
    figure, (speed, hours) = open_panels(2, size=(6.5, 4.8))
    title = f"{name}: {scaled[0].step.tokens:,} tokens per step"
    speed.set(title=title, ylabel="tokens/s (at each point: MFU)")
    counts = np.array([plan.layout.gpus for plan in scaled])
    rates = np.array([plan.tokens_per_second for plan in scaled])
    speed.plot(counts, counts * rates[0] / counts[0], "--", color="gray", label="linear")
    speed.plot(counts, rates, marker="o", label="predicted")
    low, high = scaled[0].spread
    speed.fill_between(counts, low * rates, high * rates, alpha=0.2)
    for plan, point in zip(scaled, zip(counts, rates, strict=True), strict=True):
        speed.annotate(f"\n{plan.mfu:.0%}", point, fontsize=7, ha="center", va="top")
    speed.legend(fontsize=8)
    hours.set(ylabel="hours", title=f"hours to train on {length}")
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
    return save_figure(figure, target)


def draw_ladder(title: str, rungs: Sequence[Mapping[str, Any]], target: Path) -> Path:
    """Draw a bar of the tokens/s of each rung, in front of a pale one if it was published."""
    figure, (axis,) = open_panels(size=(9, 1.5 + 0.4 * len(rungs)))
    names = [rung["name"] for rung in rungs]
    rates = [rung["tokens_per_second"] for rung in rungs]
    axis.barh(names, [rung["published"] or math.nan for rung in rungs], color="C1", alpha=0.3)
    axis.bar_label(axis.barh(names, rates, 0.4), fmt="{:,.0f}", padding=4)
    axis.set(title=f"{title}, predicted (pale: published)", xlabel="tokens/s")
    axis.set(xscale="log", xlim=(rates[0] / 5, 4 * max(rates)), axisbelow=True)
    axis.invert_yaxis()
    return save_figure(figure, target)
