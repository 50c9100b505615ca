"""bench knob: one machine setting, every value of it: what it gains and what it costs, by the real training step.

In: the setting's name, a preset, a batch. Out: a row a value: tokens/s, gain over the first, MFU, peak memory, first
step (compiling and choosing included) and the loss after the same steps, which tells that only speed changed. Every
value is a process of its own; as many as memory has room for take turns. Everything else is as a run with nothing set.
"""

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args, get_origin

from megatoken.bench.batch import describe_speed, format_speed
from megatoken.bench.peers import SIZES, Contender, Lost, choose_shape, count_at_once
from megatoken.bench.report import show_table
from megatoken.bench.spec import OURS, Spec
from megatoken.config import KNOBS, Machine
from megatoken.console import Console, format_quantity
from megatoken.device import Device, open_device, with_peak
from megatoken.errors import Exit, Fault
from megatoken.knobs import parse_value
from megatoken.presets import Shape
from megatoken.timing import Timing

TURN_SECONDS = 0.5  # a turn of the first value is about as long, and every value's has as many steps
MOST_STEPS = 20
NOT_TIMED = ("device", "threads", "deterministic")  # where, not how; what a process sets once


@dataclass(slots=True, kw_only=True)
class Trial:
    """A value and what came of it."""

    value: str
    contender: Contender | None = None
    skipped: str = ""


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure. Raises Fault(CONFIG) for an unknown setting or value, Fault(PEER) when no value runs."""
    values = choose_values(options.knob, options.values)
    shape = choose_shape(options)
    device = with_peak(open_device(Machine(device=options.device)))
    spec = Spec(
        name=OURS,
        shape=shape,
        batch_seqs=options.batch_seqs,
        device=str(device.place),
        micro_batch=options.micro_batch or options.batch_seqs,
    )
    tried = [value for _, value in values if value != "auto"] if options.knob == "micro_batch" else []
    for option, size in [("--micro-batch", spec.micro_batch), *(("--values", size) for size in tried)]:
        if spec.batch_seqs % size:
            what = f"micro-batch {size} does not divide {spec.batch_seqs} sequences"
            raise Fault(Exit.CONFIG, what, option, "give a divisor of --batch-seqs")
    tokens = spec.batch_seqs * shape.seq_len
    at_once = 1 + count_at_once(shape, spec.micro_batch * shape.seq_len, device)
    console.say(
        f"machine.{options.knob}, {shape.n_layer} layers, width {shape.d_model}: {spec.batch_seqs} x {shape.seq_len} = "
        f"{tokens:,} tokens a step, {device.precision} on {device.name}; MFU against "
        f"{format_quantity(device.peak_flops, 'FLOP/s')} ({device.peak_source}); {min(at_once, len(values))} at a time"
    )
    rows: list[dict[str, Any]] = []
    for first in range(0, len(values), at_once):
        specs = {text: set_knob(spec, options.knob, value) for text, value in values[first : first + at_once]}
        rows += [describe(trial, shape, device, tokens) for trial in race(specs, options.repeats, console)]
    paces = [row["seconds"] for row in rows if row["seconds"]]
    if not paces:
        raise Fault(Exit.PEER, f"no value ran: {rows[0]['skipped']}", "bench knob", "give a smaller batch or preset")
    for row in rows:
        row["gain"] = rows[0]["seconds"] / row["seconds"] if rows[0]["seconds"] and row["seconds"] else None
    show(options.knob, rows, console)
    return {
        "knob": options.knob,
        "preset": options.preset,
        **{name: getattr(shape, name) for name in SIZES},
        "batch_seqs": spec.batch_seqs,
        "precision": device.precision,
        "peak_flops": device.peak_flops,
        "peak_source": device.peak_source,
        "rows": rows,
    }


def choose_values(name: str, asked: str) -> list[tuple[str, Any]]:
    """(as written, as the setting has it) of those asked for, all of a setting that has words for them."""
    key = f"machine.{name}"
    if key not in KNOBS or name in NOT_TIMED:
        all_of_them = [k.removeprefix("machine.") for k in KNOBS if k.startswith("machine.")]
        fix = f"give one of {', '.join(name for name in all_of_them if name not in NOT_TIMED)}"
        raise Fault(Exit.CONFIG, f"no machine setting '{name}' to time", "bench knob", fix)
    kind = KNOBS[key].type
    known = [str(word) for word in get_args(kind)] if get_origin(kind) is Literal else []
    words = [word.strip() for word in asked.split(",")] if asked else known
    if not words:
        raise Fault(Exit.CONFIG, f"machine.{name} has no list of values", "--values", "name some, as in 1,2,4")
    try:
        return [(word, parse_value(KNOBS[key], word)) for word in dict.fromkeys(words)]
    except ValueError as wrong:
        raise Fault(Exit.CONFIG, str(wrong), "--values", f"see machine.{name} in `megatoken config`") from None


def set_knob(spec: Spec, name: str, value: Any) -> Spec:
    """The contender with one setting made; the micro-batch is the spec's own, 0 for one that is chosen."""
    if name == "micro_batch":
        return replace(spec, micro_batch=0 if value == "auto" else value)
    return replace(spec, machine={name: value})


def race(specs: dict[str, Spec], repeats: int, console: Console) -> Sequence[Trial]:
    """Every value's contender after `repeats` turns of each; those that failed say why."""
    trials = [Trial(value=value) for value in specs]
    steps = 0
    with ExitStack() as alive:
        alive.callback(console.close)
        for trial in trials:
            console.step(f"{trial.value}: first steps")
            trial.contender = alive.enter_context(Contender(specs[trial.value]))
            try:
                pace = trial.contender.warm_up()
                steps = steps or min(max(round(TURN_SECONDS / pace), 1), MOST_STEPS)
            except Lost as why:
                trial.skipped = str(why)
        for number in range(repeats):
            console.step(f"round {number + 1} of {repeats}")
            for trial in trials:
                if not trial.skipped:
                    try:
                        trial.contender.run_lap(steps)  # type: ignore[union-attr]  # all have one by now
                    except Lost as why:
                        trial.skipped = str(why)
    return trials


def describe(trial: Trial, shape: Shape, device: Device, tokens: int) -> dict[str, Any]:
    """A row as the record says it; numbers are None where the value did not run."""
    row: dict[str, Any] = {"value": trial.value, "skipped": trial.skipped or None, "batch_tokens": tokens}
    names = ("tokens_per_second", "mfu", "mfu_causal", "seconds", "peak_memory_bytes", "first_step_seconds", "loss")
    row |= dict.fromkeys(names)
    if trial.skipped or trial.contender is None:
        return row
    found = trial.contender.result
    timing = Timing(tuple(found.laps))
    return {
        **row,
        **describe_speed(timing, shape, device, tokens),
        "seconds": timing.median,
        "peak_memory_bytes": found.peak_memory_bytes,
        "first_step_seconds": found.first_step_seconds,
        "loss": found.loss,
        "steps": found.steps,
        "chosen": found.chosen,
    }


def show(name: str, rows: list[dict[str, Any]], console: Console) -> None:
    """The rows as a Markdown table."""
    heads = (name, "tokens/s", "low to high", "MFU", "MFU causal", "peak memory", "gain", "first step", "loss", "")
    cells = []
    for row in rows:
        if row["skipped"]:
            cells.append((row["value"], *[""] * 8, f"skipped: {row['skipped']}"))
            continue
        gain = f"{row['gain']:.2f}x" if row["gain"] else ""
        rest = (gain, f"{row['first_step_seconds']:.1f} s", f"{row['loss']:.4f}", row["chosen"])
        cells.append((row["value"], *format_speed(row)[1:], *rest))
    show_table(heads, cells, console)
