"""Build the page of `megatoken report` from runs and its template (report_page/).

The page contains its style, script and data, and loads nothing else. The script draws the curves,
which have at most MAX_POINTS points each.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from megatoken import __version__
from megatoken.base.console import format_duration, format_quantity
from megatoken.base.errors import ConfigError, Warn
from megatoken.base.pictures import number
from megatoken.base.published import LADDER, shorten_source
from megatoken.base.published import SCORES as PUBLISHED
from megatoken.base.redact import redact
from megatoken.base.system.atomic_write import read_object
from megatoken.base.system.gpus import Gpu, find_driver
from megatoken.base.system.machine import read_load
from megatoken.base.system.metrics_log import METRICS, Row, of_kind, read_metrics
from megatoken.inference.tasks import SCORES
from megatoken.store.run_state import average_rate, list_differences, read_run

MAX_POINTS = 1500
MAX_SAMPLES = 12  # per run, evenly spread
MAX_EVENTS = 200
PRETRAIN = "pretrain"  # the objective that is not shown
MAX_SHOWN = 8  # runs on a live page at first, which have different colors
AXES = ("step", "tokens", "elapsed_seconds")
CURVES = ("loss", "lr", "grad_norm", "tokens_per_second", "mfu")
REWARDS = ("reward", "accuracy", "stopped", "answer_tokens", "kl")


@dataclass(frozen=True)
class RunData:
    """The data of a run, read from its folder."""

    name: str
    folder: Path
    status: Row  # as `megatoken runs --json` prints it
    rows: list[Row]
    curves: Row
    provenance: Row

    def of_kind(self, kind: str) -> list[Row]:
        """Return the rows of metrics.jsonl that have this kind."""
        return of_kind(self.rows, kind)

    @property
    def gpu(self) -> Gpu | None:
        """The GPU that the run used; None if it is not in the price list."""
        return find_driver(self.provenance.get("device"))


@dataclass(frozen=True)
class Table:
    """A table on the page. A float in a row is drawn as a bar, with full length for 1.0.

    pale: number of rows at the end that are drawn pale, because they are published figures.
    """

    name: str
    heads: Sequence[str]
    rows: Sequence[Sequence[Any]]
    note: str = ""
    pale: int = 0


def build_page(
    runs: Sequence[Path],
    price: float | None,
    ladder: Path | None,
    warn: Warn = warnings.warn,
    hidden: Sequence[str] | None = (),
    *,
    is_live: bool = False,
) -> str:
    """Return the page as HTML.

    Raises DataError for a folder without metrics, and ConfigError if `ladder` is not a record of
    `bench ladder`.

    price: dollars per hour of one process; None to use the price list.
    ladder: a record written by `bench ladder`, or None.
    warn: as in `read_metrics`.
    hidden: names of runs to leave out; None for all but the MAX_SHOWN that changed last.
    is_live: whether the page shows this machine's load, and fetches itself to follow the runs.
    """
    names = _name_runs(runs)
    if hidden is None:
        hidden = sorted(names, key=lambda name: _stamp(names[name]))[:-MAX_SHOWN]
    data = [_read_run(name, run, warn) for name, run in names.items() if name not in hidden]
    tables = [
        _tabulate_scores(data),
        *([_tabulate_ladder(read_object(ladder))] if ladder else []),
        _tabulate_differences(data),
        _tabulate_events(data),
        _tabulate_provenance(data),
    ]
    return _load_template().render(
        version=__version__,
        shown=[run.name for run in data],
        summary=_summarize(data, price),
        samples={run.name: _choose_samples(run) for run in data if run.of_kind("sample")},
        load=Table("Machine", (), read_load() if is_live else ()),
        tables=tables,
        data={"live": is_live, "names": [*names], "runs": [run.curves for run in data]},
    )


def _read_run(name: str, run: Path, warn: Warn) -> RunData:
    rows, curves = _read_log(run, _stamp(run), warn)
    provenance = read_object(run / "provenance.json")
    return RunData(name, run, read_run(run), rows, curves | {"name": name}, provenance)


def _stamp(run: Path) -> tuple[int, int]:
    """Return a value that changes with the run's log: its time and size."""
    with suppress(OSError):
        status = (run / METRICS).stat()
        return status.st_mtime_ns, status.st_size
    return 0, 0


@lru_cache(maxsize=2 * MAX_SHOWN)
def _read_log(run: Path, stamp: tuple[int, int], warn: Warn) -> tuple[list[Row], Row]:
    """Return the rows and the curves of a run. stamp: as returned by `_stamp`."""
    rows = read_metrics(run, warn)
    return rows, read_curves(rows)


def read_curves(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the points of a run's curves under the keys `train`, `val` and `tasks`.

    Training rows are averaged over at most MAX_POINTS groups of consecutive rows; `low` and `high`
    hold the lowest and highest loss of each group.
    """
    val = of_kind(rows, "val")
    scores: dict[str, list[Row]] = {}
    for row in of_kind(rows, "eval"):
        scores.setdefault(str(row.get("task")), []).append(row)
    return {
        "train": _average(_columns(of_kind(rows, "train"), (*AXES, *CURVES, *REWARDS))),
        "val": _to_lists(_columns(val, (*AXES, "loss", *REWARDS))),
        "tasks": {task: _to_lists(_columns(of, (*AXES, *SCORES))) for task, of in scores.items()},
    }


@cache
def _load_template() -> jinja2.Template:
    folder = Path(__file__).parent / "report_page"
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) else redact(str(value)),
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}
    return environment.get_template("page.html")


def _name_runs(runs: Sequence[Path]) -> dict[str, Path]:
    """Return the run folders by their names, or by their paths if two have the same name."""
    names = {run.resolve().name: run for run in runs}
    return names if len(names) == len(runs) else {str(run): run for run in runs}


def _columns(rows: Sequence[Row], names: Sequence[str]) -> dict[str, np.ndarray]:
    """Return for each name an array of its values in all rows, with NaN where a row has none.

    Names in REWARDS that no row has are left out.
    """
    found = [name for name in names if name not in REWARDS or any(name in row for row in rows)]
    return {name: np.array([number(row.get(name)) for row in rows], dtype=float) for name in found}


def _average(points: dict[str, np.ndarray]) -> dict[str, list[float | None]]:
    """Average points over groups of equal size, with the lowest and highest loss of each group."""
    loss = points["loss"]
    if not len(loss):
        return {}
    starts = np.linspace(0, len(loss), min(len(loss), MAX_POINTS) + 1).astype(int)[:-1]
    lengths = np.diff([*starts, len(loss)])
    with np.errstate(invalid="ignore"):
        means = {name: np.add.reduceat(x, starts) / lengths for name, x in points.items()}
        means["low"] = np.fmin.reduceat(loss, starts)
        means["high"] = np.fmax.reduceat(loss, starts)
    return _to_lists(means)


def _to_lists(values: dict[str, np.ndarray]) -> dict[str, list[float | None]]:
    """Convert arrays to lists, rounded to six significant digits, with None for NaN."""
    return {
        name: [float(f"{x:.6g}") if math.isfinite(x) else None for x in array]
        for name, array in values.items()
    }


def _summarize(runs: Sequence[RunData], price: float | None) -> Table:
    """Return the table with a row per run, without columns that are empty for all runs.

    price: as in `build_page`.
    """
    rows = [_summarize_run(run, price) for run in runs]
    heads = [
        head for head in next(iter(rows), {}) if any(row[head] not in ("", "-") for row in rows)
    ]
    sources = sorted({run.gpu.price_source for run in runs if run.gpu and run.gpu.price})
    note = f"cost by {' and '.join(sources)}" if sources and price is None else ""
    return Table("Runs", heads, [[row[head] for head in heads] for row in rows], note)


def _summarize_run(run: RunData, price: float | None) -> dict[str, str]:
    """Return the cells of a run by column. Time and cost exclude pauses between its starts."""
    status = run.status
    train = run.of_kind("train")
    last = train[-1] if train else {}
    val = run.of_kind("val")
    last_val = val[-1] if val else {}
    tokens = number(last.get("tokens"))
    seconds = number(last.get("elapsed_seconds"))
    planned = math.nan
    for row in run.of_kind("event"):
        if row.get("what") == "planned":
            planned = tokens / number(row.get("tokens_per_second"))
    processes = number(run.provenance.get("processes", 1))
    mfu = _median(train, lambda row: number(row.get("mfu")))
    # Both cover only the steps; elapsed_seconds also includes validation and saves.
    mfu_per_rate = _median(train, lambda row: number(row["mfu"]) / row["tokens_per_second"])
    flops = mfu_per_rate * processes * number(run.provenance.get("peak_flops")) * tokens
    price = price or (run.gpu.price if run.gpu else 0.0)
    best = min((number(row.get("loss")) for row in val), default=math.nan)
    return {
        "run": run.name,
        "state": _join(status["state"], status["message"], ": "),
        "objective": status["objective"] if status["objective"] != PRETRAIN else "",
        "tags": status["tags"],
        "steps": _join(f"{status['step'] or 0:,}", _cell(status["total_steps"], ",", ""), " of "),
        "tokens": format_quantity(tokens) if tokens > 0 else "-",
        "loss": _cell(last.get("loss"), ".4f"),
        "validation": _join(_cell(last_val.get("loss"), ".4f"), _cell(best, ".4f", ""), ", best "),
        "reward": _format_reward(last, last_val),
        "bits/byte": _cell(last_val.get("bits_per_byte"), ".4f"),
        "tokens/s": _cell(average_rate(last), ",.0f"),
        "MFU": _cell(mfu, ".1%"),
        "time": _join(
            _format_time(seconds) + (f" x {processes:.0f}" if processes > 1 else ""),
            _format_time(planned, ""),
            ", planned ",
        ),
        "FLOPs": _cell(flops, ".2e"),
        "cost": _join(
            _format_cost(seconds * processes, price),
            "" if math.isnan(planned) else _format_cost(planned * processes, price),
            ", planned ",
        ),
    }


def _median(rows: Sequence[Row], value: Callable[[Row], float]) -> float:
    """Return the median of `value` over rows, ignoring NaN; NaN if no row has a value."""
    values = [value(row) for row in rows if number(row.get("mfu")) > 0]
    return float(np.median(values)) if values else math.nan


def _join(first: str, second: str, separator: str) -> str:
    return f"{first}{separator}{second}" if second else first


def _cell(value: Any, spec: str, missing: str = "-") -> str:
    return format(value, spec) if math.isfinite(number(value)) else missing


def _format_time(seconds: float, missing: str = "-") -> str:
    return format_duration(seconds) if math.isfinite(seconds) else missing


def _format_cost(process_seconds: float, price: float) -> str:
    return f"${process_seconds / 3600 * price:,.2f}" if process_seconds * price > 0 else "-"


def _format_reward(train: Row, val: Row) -> str:
    """Format the last reward or accuracy in training, and the held-out one with standard error."""
    key = "reward" if "reward" in train else "accuracy"
    held_out = _join(
        _cell(val.get(key), ".3f", ""), _cell(val.get("reward_stderr"), ".3f", ""), " ± "
    )
    return _join(_cell(train.get(key), ".3f"), held_out, ", held out ")


def _choose_samples(run: RunData) -> list[tuple[str, list[str]]]:
    """Return (label, texts) of at most MAX_SAMPLES of the run's samples, including the last one."""
    samples = run.of_kind("sample")
    indices = np.linspace(0, len(samples) - 1, min(len(samples), MAX_SAMPLES)).round()
    return [
        (
            f"step {samples[i]['step']:,}, {format_quantity(samples[i]['tokens'])} tokens",
            samples[i]["text"],
        )
        for i in indices.astype(int)
    ]


def _tabulate_scores(runs: Sequence[RunData]) -> Table:
    """Return a table of the runs' last scores on each task, and published scores on HellaSwag."""
    rows = []
    for run in runs:
        loss = _cell(run.status["val_loss"], ".4f")
        for task, last in {str(row.get("task")): row for row in run.of_kind("eval")}.items():
            stderr = last.get("stderr", {})
            scores = [_format_score(last.get(score), stderr.get(score)) for score in SCORES]
            rows.append((run.name, task, f"{last['step']:,}", loss, *scores))
    published = PUBLISHED if any(row[1].startswith("hellaswag") for row in rows) else []
    for known in published:
        scores = [_format_score(getattr(known, score)) for score in SCORES]
        rows.append((known.title, "hellaswag", "", _cell(known.val_loss, "g"), *scores))
    heads = ("run", "task", "step", "validation", *SCORES)
    note = "validation loss in nats per token, scores in percent with standard error"
    return Table("Evaluation", heads, rows, note, len(published))


def _format_score(value: Any, stderr: Any = None) -> str:
    score = _cell(100 * number(value), ".2f")
    return _join(score, _cell(100 * number(stderr), ".2f", ""), " ± ")


def _tabulate_ladder(record: Row) -> Table:
    """Return the table of a `bench ladder` record. Raises ConfigError for another file."""
    result = record.get("answer", record)
    rungs = [rung for rung in result.get("rungs", []) if rung["tokens_per_second"]]
    if not rungs:
        raise ConfigError("no record of `megatoken bench ladder`", "--ladder")
    rows = [(rung["name"], rung["tokens_per_second"], f"{rung['speedup']:.2f}x") for rung in rungs]
    note = f"{result['preset']}, {result['batch_tokens']} tokens per step, {result['device']}"
    published = LADDER if result["preset"] == "gpt2-124m" else []
    for rung in published:
        where = f"{rung.gpus} x {rung.device}, published: {shorten_source(rung.source)}"
        rows.append((rung.name, rung.rate, where))
    rates = np.array([rate for _, rate, _ in rows])
    if published:
        note += "; bars: logarithm of tokens/s"
        rates = np.log(2 * rates / min(rates))
    cells = [
        (name, bar, f"{rate:,.0f} tokens/s, {more}")
        for (name, rate, more), bar in zip(rows, rates / max(rates), strict=True)
    ]
    return Table("Speed-ups", (), cells, note, len(published))


def _tabulate_differences(runs: Sequence[RunData]) -> Table:
    differences = list_differences([run.folder for run in runs]) if len(runs) > 1 else {}
    rows = [(key, *values) for key, values in differences.items()]
    return Table("Settings that differ", ("setting", *(run.name for run in runs)), rows)


def _tabulate_events(runs: Sequence[RunData]) -> Table:
    rows = [
        (run.name, f"{row['step']:,}", row.get("what", ""), row.get("message", ""))
        for run in runs
        for row in run.of_kind("event")
    ]
    return Table("Events", ("run", "step", "what", "message"), rows[-MAX_EVENTS:])


def _tabulate_provenance(runs: Sequence[RunData]) -> Table:
    keys = dict.fromkeys(key for run in runs for key in run.provenance)
    rows = [(key, *(_format_value(run.provenance.get(key)) for run in runs)) for key in keys]
    return Table("Provenance", ("of", *(run.name for run in runs)), rows)


def _format_value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return " ".join(map(str, value))
    return "" if value is None else str(value)
