"""Draw the pictures of `megatoken plan`: speed and hours by number of GPUs, and the ladder."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatoken.base.pictures import draw, format_tick, line, panel
from megatoken.plan.estimate import Plan


def draw_plan(
    name: str,
    scaled: Sequence[Plan],
    families: Mapping[str, Sequence[Plan]],
    length: str,
    target: Path,
) -> Path:
    """Draw tokens/s, MFU and hours by number of GPUs.

    scaled: plans of the run that fit, one per number of GPUs. families: such plans for each model.
    length: their training length as text. Raises ConfigError and StorageError as `save_figure`
    does.
    """
    counts = np.array([plan.layout.gpus for plan in scaled])
    rates = np.array([plan.tokens_per_second for plan in scaled])
    low, high = scaled[0].spread
    axes: dict[str, Any] = {
        "xlabel": "GPUs",
        "xscale": "log",
        "yscale": "log",
        "xticks": counts,
        "formats": ("{x:g}", format_tick),
    }
    speed = panel(
        line(counts, counts * rates[0] / counts[0], "linear", fmt="--", color="gray"),
        line(counts, rates, "predicted", fmt="o-", band=(low * rates, high * rates)),
        title="tokens/s",
        **axes,
    )
    percent: dict[str, Any] = {
        "yscale": "linear",
        "ylim": (0, None),
        "formats": ("{x:g}", "{x:.0%}"),
    }
    mfu = panel(
        line(counts, [plan.mfu for plan in scaled], fmt="o-"), title="MFU", **axes | percent
    )
    lines = []
    for model, plans in families.items():
        fitting = [plan for plan in plans if plan.fits]
        gpus = [plan.layout.gpus for plan in fitting]
        lines.append(line(gpus, [plan.hours for plan in fitting], model, fmt="o-", markersize=3))
    title = f"hours to train on {length}"
    hours = panel(*lines, title=title, **axes)
    about = f"{name}: {scaled[0].step.tokens:,} tokens per step"
    return draw([[speed, mfu, hours]], target, width=4.5, heights=(4,), title=about)


def draw_ladder(title: str, rungs: Sequence[Mapping[str, Any]], target: Path) -> Path:
    """Draw the tokens/s of each rung, predicted and published."""
    rates = [rung["tokens_per_second"] for rung in rungs]
    published = [rung["published"] or math.nan for rung in rungs]
    notes = [f"{rate:,.0f}" for rate in rates]
    rows = range(len(rungs))
    shown = panel(
        line(published, rows, "published", fmt="o", color="C1", alpha=0.5, markersize=10),
        line(rates, rows, "predicted", fmt="o", color="C0", notes=notes, note_position="right"),
        names=[rung["name"] for rung in rungs],
        title=title,
        xlabel="tokens/s",
        xscale="log",
        xlim=(rates[0] / 2, 4 * max(rates)),
    )
    return draw([[shown]], target, width=9, heights=(1.5 + 0.4 * len(rungs),))
