"""`megatoken report RUN... --out report.html`: runs as one page that opens offline; `--serve` shows them live.

The page is HTML with its style, its script and its numbers inside (report_page/), and asks no other address. Tables are
written here, curves are drawn by the script. A curve has at most MOST_POINTS points: means over equal spans of steps,
and the lowest and highest training loss of each. So a page of any run opens at once.
"""

import html
import json
import math
import warnings
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from megatoken import __version__
from megatoken.cli.runs import PRETRAIN, average_rate, list_differences, read_run
from megatoken.console import Console, format_duration, format_quantity
from megatoken.errors import ConfigError, StorageError
from megatoken.eval.tasks import SCORES
from megatoken.plots import number
from megatoken.redact import redact
from megatoken.system.atomic_write import read_object, replace_file, storage_errors
from megatoken.system.gpus import find_driver
from megatoken.system.metrics_log import read_metrics

PAGE = Path(__file__).parent / "report_page"
MOST_POINTS = 1500
MOST_SAMPLES = 12  # of each run, evenly spread, the last included
LONG = 36  # characters of a cell, above which its lines are broken
CURVES = ("loss", "lr", "grad_norm", "tokens_per_second", "mfu")
ANSWERS = (
    "reward",
    "accuracy",
    "stopped",
    "answer_tokens",
    "kl",
)  # of training on preferences and rewards
# HellaSwag as others published it: acc, acc_norm, acc_token_mean; see docs/evaluation.md for whose count is whose.
PUBLISHED = (
    ("GPT-2 124M, lm-evaluation-harness", 0.2892, 0.3114, None),
    ("GPT-2 124M, by build-nanogpt", None, None, 0.2955),
    ("124M in llm.c, 10B tokens of FineWeb", None, None, 0.310),
    ("124M, 1B tokens of TinyStories", None, None, 0.2631),
    ("124M, 10B tokens of FineWeb-Edu", None, None, 0.3007),
    ("1.5B, 10B tokens", None, None, 0.4122),
    ("GPT-2 1558M, lm-evaluation-harness", 0.4004, 0.5089, None),
    ("GPT-2 1558M, by build-nanogpt", None, None, 0.4893),
)
Row = dict[str, Any]


def report(options: Any) -> dict[str, Any]:
    """Write the page, or serve it until Ctrl-C. Raises DataError for a folder without metrics, StorageError."""
    if options.price is not None and not 0 < options.price < math.inf:
        raise ConfigError(
            f"--price is {options.price:g}",
            "--price",
            "give dollars an hour of one process, such as 1.99",
        )
    if options.serve is None and options.out.suffix.lower() not in ("", ".html", ".htm"):
        fix = f"--out {options.out.with_suffix('.html')}; a browser prints it to PDF"
        raise ConfigError("the report is a page of HTML", str(options.out), fix)
    console: Console = options.console
    page = build_page(options.runs, options.price, options.ladder, warn=console.warn)
    if options.serve is not None:
        serve(options, console)
        return {"served": True}
    if options.out.is_dir():
        raise ConfigError(
            "a folder, not a file", str(options.out), f"--out {options.out / 'report.html'}"
        )
    with storage_errors(options.out, what="cannot write the report", fix="choose --out"):
        options.out.parent.mkdir(parents=True, exist_ok=True)
        replace_file(options.out, page)
    console.print(f"report: {options.out} ({format_quantity(len(page.encode()), 'B')})")
    return {"report": str(options.out), "bytes": len(page.encode())}


def serve(options: Any, console: Console) -> None:
    """Answer each request on this machine with the page as it is now; the page asks again by itself."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # A page of another site that resolves its own name to this machine does not get the answer.
            host = self.headers.get("Host", "").rpartition(":")[0]
            if self.path != "/" or host not in ("127.0.0.1", "localhost"):
                self.send_error(404)
                return
            body = build_page(
                options.runs, options.price, options.ladder, is_live=True, warn=lambda text: None
            ).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Requests are not logged."""

    try:
        server = ThreadingHTTPServer(("127.0.0.1", options.serve), Handler)
    except (OSError, OverflowError) as error:
        raise StorageError(
            f"cannot serve: {getattr(error, 'strerror', 'no such port')}",
            f"port {options.serve}",
            "choose another --serve PORT",
        ) from None
    console.print(f"http://127.0.0.1:{server.server_address[1]}/ until Ctrl-C")
    with server:
        server.serve_forever()


def build_page(
    runs: Sequence[Path],
    price: float | None,
    ladder: Path | None,
    *,
    is_live: bool = False,
    warn: Callable[[str], None] = warnings.warn,
) -> str:
    """The whole page as HTML. warn: as of `read_metrics`. Raises DataError for a folder without metrics."""
    names = name_runs(runs)
    facts = [read_run(run) for run in runs]
    rows = [read_metrics(run, warn) for run in runs]
    curves = [{"name": name, **read_curves(each)} for name, each in zip(names, rows, strict=True)]
    devices = [find_driver(read_object(run / "provenance.json").get("device")) for run in runs]
    sources = dict.fromkeys(gpu.price_source for gpu in devices if gpu and gpu.price)
    note = (
        f"cost of GPU-hours by {' and '.join(sources)}; --price replaces it"
        if sources and price is None
        else ""
    )
    summaries = [summarize(*each, price) for each in zip(names, runs, facts, rows, strict=True)]
    title = ", ".join(names) if len(names) < 4 else f"{len(names)} runs"
    sections = [
        ("Runs", table("Runs", SUMMARY, summaries, note)),
        ("Curves", (PAGE / "curves.html").read_text("utf-8")),
        ("Samples", list_samples(names, rows)),
        ("Evaluation", tabulate_scores(names, rows)),
        ("Speed-ups on this machine", tabulate_ladder(read_object(ladder)) if ladder else ""),
        ("Settings that differ", tabulate_differences(names, runs)),
        ("Events", list_events(names, rows)),
        ("Provenance", list_provenance(names, runs)),
    ]
    body = "\n".join(
        f"<section><h2>{head}</h2>{content}</section>" for head, content in sections if content
    )
    replacements = {
        "TITLE": escape(f"{title} - megatoken {__version__}"),
        "HEAD": escape(title),
        "STYLE": (PAGE / "page.css").read_text("utf-8"),
        "SCRIPT": (PAGE / "page.js").read_text("utf-8"),
        "BODY": body,
        # "</script>" inside a string would end the element.
        "DATA": json.dumps({"live": is_live, "runs": curves}, allow_nan=False).replace(
            "<", "\\u003c"
        ),
    }
    before, *parts = (PAGE / "page.html").read_text("utf-8").split("{{")
    for part in parts:  # in one pass: what is put in is never read as a place to put something
        name, _, after = part.partition("}}")
        before += replacements[name] + after
    return before


def escape(text: Any) -> str:
    """Text of a run as HTML; without secrets."""
    return html.escape(redact(str(text)))


def name_runs(runs: Sequence[Path]) -> list[str]:
    """The folders' names, or their paths where two have one name."""
    names = [run.resolve().name for run in runs]
    return names if len({*names}) == len(names) else [str(run) for run in runs]


def read_curves(rows: Sequence[Row]) -> dict[str, Any]:
    """Points of a run's curves: `train` in at most MOST_POINTS spans of steps, `val` and `eval` as they are."""
    train, val = ([row for row in rows if row["kind"] == kind] for kind in ("train", "val"))
    has = {
        kind: [name for name in ANSWERS if any(name in row for row in of)]
        for kind, of in (("t", train), ("v", val))
    }
    points = columns(train, ("step", "tokens", "elapsed_seconds", *CURVES, *has["t"]))
    bounds = np.linspace(0, len(train), min(len(train), MOST_POINTS) + 1).astype(int)[:-1]
    result: dict[str, Any] = {
        "train": {},
        "val": to_lists(columns(val, ("step", "tokens", "elapsed_seconds", "loss", *has["v"]))),
    }
    if len(train):
        counts = np.diff([*bounds, len(train)])
        with np.errstate(invalid="ignore"):
            result["train"] = to_lists(
                {name: np.add.reduceat(x, bounds) / counts for name, x in points.items()}
            )
            loss = points["loss"]
            result["train"] |= to_lists(
                {"low": np.fmin.reduceat(loss, bounds), "high": np.fmax.reduceat(loss, bounds)}
            )
    scores = [row for row in rows if row["kind"] == "eval"]
    tasks = dict.fromkeys(str(row.get("task")) for row in scores)
    result["tasks"] = {
        task: to_lists(
            columns(
                [r for r in scores if str(r.get("task")) == task],
                ("step", "tokens", "elapsed_seconds", *SCORES),
            )
        )
        for task in tasks
    }
    return result


def columns(rows: Sequence[Row], names: Sequence[str]) -> dict[str, np.ndarray]:
    """The numbers of rows by name; NaN where a row has none."""
    return {name: np.array([number(row.get(name)) for row in rows], dtype=float) for name in names}


def to_lists(values: dict[str, np.ndarray]) -> dict[str, list[float | None]]:
    """Six digits of each value, as JSON has them: no NaN."""
    return {
        name: [float(f"{x:.6g}") if math.isfinite(x) else None for x in array]
        for name, array in values.items()
    }


SUMMARY = (
    "run",
    "state",
    "objective",
    "steps",
    "tokens",
    "loss",
    "validation",
    "reward",
    "bits/byte",
    "tokens/s",
    "MFU",
    "time",
    "FLOPs",
    "cost",
)


def summarize(
    name: str, run: Path, facts: Row, rows: Sequence[Row], price: float | None
) -> tuple[str, ...]:
    """A run's cells of SUMMARY. Time and cost are of training, without pauses between starts; beside them what the
    plan at the run's start expected of the steps so far."""
    train, val = ([row for row in rows if row["kind"] == kind] for kind in ("train", "val"))
    last, best = (
        (train[-1] if train else {}),
        min((number(row.get("loss")) for row in val), default=math.nan),
    )
    provenance = read_object(run / "provenance.json")
    seconds, processes = number(last.get("elapsed_seconds")), number(provenance.get("processes", 1))
    speeds = [number(row.get("tokens_per_second")) for row in train]
    mfus = [number(row.get("mfu")) for row in train]
    peak, mfu = (
        number(provenance.get("peak_flops")),
        np.nanmedian(mfus) if np.isfinite(mfus).any() else math.nan,
    )
    # Of a batch, which is what MFU and speed are measured over; time also holds validations and saves.
    each = [
        mfu / speed
        for mfu, speed in zip(mfus, speeds, strict=True)
        if speed > 0 and math.isfinite(mfu)
    ]
    flops_per_token = float(np.median(each)) * processes * peak if each else math.nan
    steps = f"{facts['step'] or 0:,}" + (
        f" of {facts['total_steps']:,}" if facts["total_steps"] else ""
    )
    gpu = find_driver(provenance.get("device"))
    price = price or (gpu.price if gpu else 0.0)
    plans = [row for row in rows if row["kind"] == "event" and row.get("what") == "planned"]
    planned = (
        number(last.get("tokens")) / number(plans[-1].get("tokens_per_second"))
        if plans
        else math.nan
    )
    cells = [
        steps,
        format_quantity(number(last.get("tokens"))),
        cell(last.get("loss"), ".4f"),
        cell(val[-1].get("loss") if val else None, ".4f")
        + (f", best {best:.4f}" if math.isfinite(best) else ""),
        format_reward(last, val[-1] if val else {}),
        cell(val[-1].get("bits_per_byte") if val else None, ".4f"),
        cell(average_rate(last), ",.0f"),
        cell(float(mfu), ".1%"),
        (format_duration(seconds) if math.isfinite(seconds) else "-")
        + (f" x {processes:.0f}" if processes > 1 else "")
        + (f", planned {format_duration(planned)}" if math.isfinite(planned) else ""),
        cell(flops_per_token * number(last.get("tokens")), ".2e"),
        ", planned ".join(
            f"${x * processes / 3600 * price:,.2f}" for x in (seconds, planned) if math.isfinite(x)
        )
        if price
        else "-",
    ]
    objective = "" if facts["objective"] == PRETRAIN else facts["objective"]
    return (
        name,
        facts["state"] + (f": {facts['message']}" if facts["message"] else ""),
        objective,
        *cells,
    )


def format_reward(train: Row, val: Row) -> str:
    """The last reward, or the share of pairs in order, and that of held-out prompts with its standard error."""
    key = "reward" if "reward" in train else "accuracy"
    if not math.isfinite(number(train.get(key))):
        return "-"
    reward, error = number(val.get(key)), number(val.get("reward_stderr"))
    noise = f" ± {error:.3f}" if math.isfinite(error) else ""
    return f"{train[key]:.3f}" + (
        f", held out {reward:.3f}{noise}" if math.isfinite(reward) else ""
    )


def cell(value: Any, form: str) -> str:
    return format(value, form) if math.isfinite(number(value)) else "-"


def table(name: str, heads: Sequence[str], rows: Sequence[Sequence[Any]], note: str = "") -> str:
    """A table in HTML, nothing without rows; columns without a value are left out, the first is a heading of its row.
    name: for a screen reader."""
    if not rows:
        return ""
    kept = [
        i for i in range(len(heads)) if i == 0 or any(str(row[i]) not in ("", "-") for row in rows)
    ]
    head = "".join(f'<th scope="col">{escape(heads[i])}</th>' for i in kept)
    lines = []
    for row in rows:
        cells = "".join(
            f"<td{' class=long' * (len(str(row[i])) > LONG)}>{escape(row[i])}</td>"
            for i in kept[1:]
        )
        lines.append(f'<tr><th scope="row">{escape(row[0])}</th>{cells}</tr>')
    return frame(name, f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody>", note)


def frame(name: str, content: str, note: str) -> str:
    """A table that scrolls by itself where the window is narrow."""
    caption = f"<caption>{escape(note)}</caption>" if note else ""
    label = f'aria-label="{escape(name)}"'
    return f'<div class="wide" role="region" tabindex="0" {label}><table {label}>{caption}{content}</table></div>'


def list_samples(names: Sequence[str], rows: Sequence[Sequence[Row]]) -> str:
    """Samples over time: the last one open, others to be opened."""
    parts = []
    for name, run_rows in zip(names, rows, strict=True):
        samples = [row for row in run_rows if row["kind"] == "sample" and row.get("text")]
        chosen = sorted(
            {round(i) for i in np.linspace(0, len(samples) - 1, min(len(samples), MOST_SAMPLES))}
        )
        parts += [f"<h3>{escape(name)}</h3>"] if chosen and len(names) > 1 else []
        for index in chosen:
            texts = (
                samples[index]["text"]
                if isinstance(samples[index]["text"], list)
                else [samples[index]["text"]]
            )
            blocks = "".join(f"<pre>{escape(text)}</pre>" for text in texts)
            is_open = " open" if index == len(samples) - 1 else ""
            step = f"step {samples[index]['step']:,}, {format_quantity(number(samples[index]['tokens']))} tokens"
            parts.append(f"<details{is_open}><summary>{escape(step)}</summary>{blocks}</details>")
    return "".join(parts)


def tabulate_scores(names: Sequence[str], rows: Sequence[Sequence[Row]]) -> str:
    """The last scores of every task in percent, with HellaSwag's published ones below."""
    lines = []
    for name, run_rows in zip(names, rows, strict=True):
        last = {str(row.get("task")): row for row in run_rows if row["kind"] == "eval"}
        for task, row in last.items():
            stderr = row["stderr"] if isinstance(row.get("stderr"), dict) else {}
            scores = [format_score(row.get(score), stderr.get(score)) for score in SCORES]
            lines.append((name, task, f"{row['step']:,}", *scores))
    if any(line[1].startswith("hellaswag") for line in lines):
        lines += [
            (f"{name} (published)", "hellaswag", "", *(format_score(x) for x in scores))
            for name, *scores in PUBLISHED
        ]
    return table(
        "Evaluation", ("run", "task", "step", *SCORES), lines, "percent, with standard errors"
    )


def format_score(value: Any, stderr: Any = None) -> str:
    if not math.isfinite(number(value)):
        return "-"
    return f"{100 * value:.2f}" + (
        f" ± {100 * stderr:.2f}" if math.isfinite(number(stderr)) else ""
    )


def tabulate_ladder(record: Row) -> str:
    """The rungs of a record of `bench ladder`, each with a bar as long as its speed."""
    answer = record.get("answer", record)
    rungs = [
        rung
        for rung in answer.get("rungs", [])
        if isinstance(rung, dict) and rung.get("tokens_per_second")
    ]
    if not rungs:
        raise ConfigError(
            "no record of `megatoken bench ladder`", "--ladder", "name its ladder.json"
        )
    rates = [number(rung["tokens_per_second"]) for rung in rungs]
    lines = []
    for rung, rate in zip(rungs, rates, strict=True):
        share = rate / max(rates)
        speed = f"{rate:,.0f} tokens/s, {rate / rates[0]:.2f}x"
        bar = f'<td class="bar"><meter min="0" max="1" value="{share:.4f}">{share:.0%}</meter></td>'
        lines.append(
            f'<tr><th scope="row">{escape(rung.get("name"))}</th>{bar}<td>{escape(speed)}</td></tr>'
        )
    what = f"{answer.get('preset')}, {answer.get('batch_tokens')} tokens a step, {answer.get('device')}"
    return frame("Speed-ups", f"<tbody>{''.join(lines)}</tbody>", what)


def tabulate_differences(names: Sequence[str], runs: Sequence[Path]) -> str:
    differences = list_differences(runs) if len(runs) > 1 else {}
    lines = [(key, *values) for key, values in differences.items()]
    return table("Settings that differ", ("setting", *names), lines)


def list_events(names: Sequence[str], rows: Sequence[Sequence[Row]]) -> str:
    lines = [
        (name, f"{row['step']:,}", row.get("what", ""), row.get("message", ""))
        for name, run_rows in zip(names, rows, strict=True)
        for row in run_rows
        if row["kind"] == "event"
    ]
    return table("Events", ("run", "step", "what", "message"), lines[-200:])


def list_provenance(names: Sequence[str], runs: Sequence[Path]) -> str:
    facts = [read_object(run / "provenance.json") for run in runs]
    keys = dict.fromkeys(key for fact in facts for key in fact)

    def text(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:.4g}"
        return (
            " ".join(map(str, value))
            if isinstance(value, list)
            else ""
            if value is None
            else str(value)
        )

    return table(
        "Provenance",
        ("of", *names),
        [(key, *(text(fact.get(key)) for fact in facts)) for key in keys],
    )
