"""bench ladder: every speed-up on this machine, one switch at a time, from plain PyTorch to what a run would use.

In: a preset and a batch. Out: a row a rung: tokens/s, speed-up, MFU, peak memory, first step and the loss after the
same ids from the same weights, which tells that speed is all that changed; as table, Markdown, picture and record.

A rung is a process of its own and takes turns with the rung it is built on, so its gain is a ratio of the same
minutes whatever the machine does meanwhile; the speed-up over the first rung is the product of those ratios. A switch
that makes the step slower here is shown and left out of the rungs above it. Every rung times the real `train_step`.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatoken.bench.peers import Contender, Lost
from megatoken.bench.spec import OURS, Spec
from megatoken.config import Machine
from megatoken.console import Console, format_quantity
from megatoken.device import Device, open_device, with_peak
from megatoken.errors import Exit, Fault
from megatoken.hardware import cpu_count, find_compiler
from megatoken.model.count import flops_per_token
from megatoken.plot import load_pyplot, save_figure
from megatoken.presets import PRESETS, Shape
from megatoken.timing import Timing

BATCH_TOKENS = {"cpu": 1024, "mps": 4096, "cuda": 65536}
FIRST_SEQS = {"cpu": 1, "mps": 1, "cuda": 8}  # micro-batch of all rungs but the last; explicit attention must fit
TURN_SECONDS = 0.5  # a turn of the first rung is about as long, and every rung's has as many steps
MOST_STEPS = 20
LONGEST_SECONDS = 400.0  # for the rounds of all rungs; there are fewer, but three, where a step takes long
SLOWER = 0.98  # a rung below this share of the one before is left out
PLAIN: dict[str, Any] = {
    "precision": "fp32",
    "tf32": False,
    "compile": "off",
    "mixed": "autocast",
    "linear": "torch",
    "attention": "explicit",
    "adamw": "loop",
    "loss_chunk": 0,
}
HEAD = ("rung", "tokens/s", "quartiles", "gain", "speed-up", "MFU", "peak memory", "first step", "loss", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One switch. machine, fields: what it changes of a contender; missing: why this hardware lacks it, or empty;
    note: what else it changes."""

    name: str
    machine: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    missing: str = ""
    note: str = ""

    def apply(self, spec: Spec) -> Spec:
        """The contender with this switch turned."""
        return replace(spec, machine={**spec.machine, **self.machine}, **self.fields)


@dataclass(slots=True, kw_only=True)
class Result:
    """What a rung did. gain: over the rung it was built on, in the same turns; speedup: over the first rung."""

    name: str
    tokens: int
    processes: int = 1
    laps: list[float] = field(default_factory=list)
    gain: Timing | None = None
    speedup: float | None = None
    mfu: float | None = None
    mfu_causal: float | None = None
    peak_memory_bytes: int | None = None
    first_step_seconds: float | None = None
    loss: float | None = None
    kept: bool = False
    chosen: str = ""
    note: str = ""
    skipped: str = ""


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Climb. Raises Fault(CONFIG) for a batch that is no multiple of the context or an unknown rung."""
    device = with_peak(open_device(Machine(device=options.device)))
    shape = PRESETS[options.preset]
    tokens = options.batch_tokens or max(BATCH_TOKENS[device.place.type], shape.seq_len)
    if tokens % shape.seq_len:
        fix = f"give a multiple of the context, {shape.seq_len}"
        raise Fault(Exit.CONFIG, f"{tokens} tokens are no whole sequences", "--batch-tokens", fix)
    rungs = choose_rungs(list_rungs(device, shape, tokens // shape.seq_len), options.rungs)
    console.say(
        f"{options.preset}: {tokens:,} tokens a step on {device.name}; MFU against "
        f"{format_quantity(device.peak_flops, 'FLOP/s')} ({device.peak_source}, {device.precision})"
    )
    first = Spec(
        name=OURS,
        shape=replace(shape, vocab_multiple=1),
        batch_seqs=tokens // shape.seq_len,
        device=str(device.place),
        machine=PLAIN,
        micro_batch=min(tokens // shape.seq_len, FIRST_SEQS[device.place.type]),
        prepared=False,
    )
    results = []
    for result in climb(first, rungs, options.repeats, console):
        rate = result.tokens / Timing(tuple(result.laps)).median if result.laps else 0.0
        if rate and device.peak_flops:
            # Processes on a CPU share its peak.
            peak = device.peak_flops * (result.processes if device.place.type == "cuda" else 1)
            result.mfu = rate * flops_per_token(shape, causal=False) / peak
            result.mfu_causal = rate * flops_per_token(shape, causal=True) / peak
        results.append(result)
        console.say(" | ".join(cell for cell in describe(result) if cell))
    return publish(results, options, device, console)


def publish(results: list[Result], options: argparse.Namespace, device: Device, console: Console) -> dict[str, Any]:
    """Write the table and the picture; return the answer."""
    table = render(results)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "ladder.md").write_text(table)
    except OSError as wrong:
        raise Fault(Exit.STORAGE, f"cannot write: {wrong.strerror}", str(options.out), "choose --out") from None
    console.say(f"\n{table}\ntable: {options.out / 'ladder.md'}")
    try:
        title = f"{options.preset} on {device.name}"
        console.say(f"picture: {draw(results, title, options.out / 'ladder.png')}")
    except Fault as fault:
        console.say(f"not drawn: {fault}")
    return {
        "preset": options.preset,
        "device": device.name,
        "precision": device.precision,
        "peak_flops": device.peak_flops,
        "peak_source": device.peak_source,
        "batch_tokens": results[0].tokens,
        "speedup": max((r.speedup for r in results if r.kept and r.speedup), default=None),
        "rungs": [summarize(result) for result in results],
    }


def list_rungs(device: Device, shape: Shape, batch_seqs: int) -> list[Rung]:
    """Every rung in order, those that this hardware lacks with the reason."""
    kind = device.place.type
    on_cpu = kind == "cpu"
    ampere = kind == "cuda" and torch.cuda.get_device_capability(device.place) >= (8, 0)
    compiler = "" if not on_cpu or find_compiler() else "no C++ compiler found (install g++)"
    whole = "" if batch_seqs > FIRST_SEQS[kind] else "the batch is one micro-batch already (--batch-tokens)"
    ours = {"linear": "auto", "attention": "auto", "mixed": "auto"} | ({"compile": "off"} if on_cpu else {})
    return [
        Rung(name="plain: fp32, explicit attention, loop AdamW"),
        Rung(name="TF32 products", machine={"tf32": True}, missing="" if ampere else "for NVIDIA GPUs since Ampere"),
        Rung(
            name=f"{device.precision} products" if device.precision != "fp32" else "bf16 products",
            machine={"precision": device.precision},
            missing="" if device.precision != "fp32" else f"{device.name} is fastest in fp32",
        ),
        Rung(name="flash attention", machine={"attention": "flash"}),
        Rung(name="compile", machine={"compile": "on"}, missing=compiler),
        Rung(name="fused AdamW", machine={"adamw": "fused"}),
        Rung(name="padded vocabulary", fields={"shape": shape}),
        Rung(name="fused loss in chunks", machine={"loss_chunk": "auto"}),
        Rung(
            name="kept memory, resting threads",
            fields={"prepared": True},
            missing="" if on_cpu else "for CPUs",
        ),
        Rung(name="our forms, chosen here", machine=ours),
        Rung(name="largest micro-batch", fields={"micro_batch": 0}, missing=whole),
        *list_parallel_rungs(device, batch_seqs),
    ]


def list_parallel_rungs(device: Device, batch_seqs: int) -> list[Rung]:
    """2, 4, 8 .. processes, as many as there are GPUs or cores; each has the batch that one had before."""
    most = torch.cuda.device_count() if device.place.type == "cuda" else cpu_count()
    counts = [1 << power for power in range(1, most.bit_length())] if device.place.type in ("cuda", "cpu") else []
    if not counts:
        unit = "core" if device.place.type == "cpu" else f"{device.place.type} device"
        return [Rung(name="data parallel", missing=f"there is one {unit}")]
    return [
        Rung(
            name=f"data parallel on {count}",
            fields={"nproc": count, "batch_seqs": count * batch_seqs},
            note=f"{count} batches a step, so another loss",
        )
        for count in counts
    ]


def choose_rungs(rungs: list[Rung], numbers: str) -> list[Rung]:
    """The rungs whose numbers, counted from 1, are named; the first always. Empty: all."""
    if not numbers:
        return rungs
    words = [word.strip() for word in numbers.split(",")]
    if not all(word.isdecimal() and 1 <= int(word) <= len(rungs) for word in words):
        known = ", ".join(f"{number} {rung.name}" for number, rung in enumerate(rungs, 1))
        raise Fault(Exit.CONFIG, f"no such rungs: {numbers}", "--rungs", f"give numbers of: {known}")
    return [rung for number, rung in enumerate(rungs, 1) if number == 1 or str(number) in words]


def climb(first: Spec, rungs: list[Rung], repeats: int, console: Console) -> Iterator[Result]:
    """Measure rung by rung, each against the newest that was kept.

    Raises Fault(PEER) when the first cannot run, or the one that others are measured against is lost.
    """
    below: Contender | None = None
    spec, speedup, steps = first, 1.0, 1
    with ExitStack() as alive:
        alive.callback(console.close)
        for rung in rungs:
            trial = rung.apply(spec)
            tokens = trial.batch_seqs * trial.shape.seq_len
            result = Result(name=rung.name, tokens=tokens, processes=trial.nproc, skipped=rung.missing, note=rung.note)
            if rung.missing:
                yield result
                continue
            console.step(f"{rung.name}: first steps")
            above = alive.enter_context(Contender(trial))
            try:
                pace = above.warm_up()
                if below is None:
                    steps = min(max(round(TURN_SECONDS / pace), 1), MOST_STEPS)
                    climbed = sum(not other.missing for other in rungs)
                    repeats = min(repeats, max(3, int(LONGEST_SECONDS / (2 * climbed * steps * pace))))
                ratios = take_rounds(above, below, repeats, steps, partial(say_round, console, rung.name))
            except Lost as why:
                if below is None:
                    raise Fault(Exit.PEER, f"the first rung failed: {why}", "bench ladder", "--batch-tokens") from None
                result.skipped = str(why)
                above.close()
                yield result
                continue
            more = trial.batch_seqs / spec.batch_seqs  # tokens of a step
            fill(result, above, [more * ratio for ratio in ratios], speedup)
            yield result
            leaving = below if result.kept else above
            if result.kept:
                below, spec, speedup = above, trial, result.speedup or speedup
            if leaving is not None:
                leaving.close()


def take_rounds(
    above: Contender, below: Contender | None, repeats: int, steps: int, tell: Callable[[str], None]
) -> list[float]:
    """Time both in turns; return how many times as fast the upper one was in each round, none for the first rung.

    Raises Lost when the upper one is, Fault(PEER) when the lower one is: every rung above would be measured against it.
    """
    ratios = []
    for number in range(repeats):
        tell(f"round {number + 1} of {repeats}")
        own = above.run_lap(steps)
        if below is None:
            continue
        try:
            ratios.append(below.run_lap(steps) / own)
        except Lost as why:
            what = f"the rung that this one is measured against is lost: {why}"
            raise Fault(Exit.PEER, what, "bench ladder", "free some memory and run it again") from None
    return ratios


def say_round(console: Console, name: str, said: str) -> None:
    """Show how far a rung has come."""
    console.step(f"{name}: {said}")


def fill(result: Result, rung: Contender, ratios: list[float], speedup: float) -> None:
    """What a measured rung found; kept if it was not slower than the one it is built on."""
    found = rung.result
    result.laps = list(found.laps)
    result.peak_memory_bytes, result.first_step_seconds = found.peak_memory_bytes, found.first_step_seconds
    result.loss, result.chosen = found.loss, found.chosen
    result.gain = Timing(tuple(ratios)) if ratios else None
    gain = result.gain.median if result.gain else 1.0
    result.speedup = speedup * gain
    result.kept = gain >= SLOWER
    if not result.kept:
        result.note = "slower here: left out of the rungs below"
    elif gain < 1.0:
        result.note = "no gain beyond the noise"


def describe(result: Result) -> tuple[str, ...]:
    """A row of the table."""
    if result.skipped:
        return (result.name, *[""] * (len(HEAD) - 2), f"skipped: {result.skipped}")
    rate = Timing(tuple(result.laps)).rate(result.tokens)
    return (
        result.name,
        f"{rate['median']:,.0f}",
        f"{rate['low']:,.0f} to {rate['high']:,.0f}",
        f"{result.gain.median:.2f}x" if result.gain else "",
        f"{result.speedup:.2f}x",
        "unknown" if result.mfu is None else f"{result.mfu:.1%}",
        f"{(result.peak_memory_bytes or 0) / 2**30:.2f} GiB",
        f"{result.first_step_seconds:.1f} s",
        f"{result.loss:.4f}",
        result.note,
    )


def render(results: list[Result]) -> str:
    """The ladder as a Markdown table."""
    rows = [HEAD, ("---",) * len(HEAD), *map(describe, results)]
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    return f"{table}\nA gain is the ratio to the rung below in the same turns; tokens/s are of a rung's own minutes.\n"


def summarize(result: Result) -> dict[str, Any]:
    """A rung as the record says it; None where it was skipped."""
    timing = Timing(tuple(result.laps)) if result.laps else None
    gain = result.gain
    return {
        "name": result.name,
        "tokens_per_second": result.tokens / timing.median if timing else None,
        "speedup": result.speedup,
        "mfu": result.mfu,
        "mfu_causal": result.mfu_causal,
        "peak_memory_bytes": result.peak_memory_bytes,
        "loss": result.loss,
        "skipped": result.skipped or None,
        "rate": timing.rate(result.tokens) if timing else None,
        "gain": dict(median=gain.median, low=gain.quartiles[0], high=gain.quartiles[1], repeats=len(gain.seconds))
        if gain
        else None,
        "first_step_seconds": result.first_step_seconds,
        "kept": result.kept,
        "chosen": result.chosen,
        "note": result.note,
    }


def draw(results: list[Result], title: str, target: Path) -> Path:
    """Bars a rung: speed-up, MFU, peak memory; pale where a rung was left out. Raises Fault without matplotlib.

    Speed-ups rather than rates: they are ratios of the same minutes, rates are of each rung's own.
    """
    pyplot = load_pyplot()
    rungs = [result for result in results if result.laps][::-1]
    figure, axes = pyplot.subplots(
        1, 3, figsize=(15, 1.5 + 0.5 * len(rungs)), layout="constrained", sharey=True, width_ratios=(3, 2, 2)
    )
    panels: tuple[tuple[str, Callable[[Result], float], str], ...] = (
        ("speed-up over the first rung (tokens/s in its own minutes)", lambda r: r.speedup or 0.0, "{:.2f}x"),
        ("MFU, % of peak", lambda r: 100 * (r.mfu or 0.0), "{:.1f}"),
        ("peak memory, GiB", lambda r: (r.peak_memory_bytes or 0) / 2**30, "{:.2f}"),
    )
    for index, (axis, (name, value, form)) in enumerate(zip(axes, panels, strict=True)):
        widths = [value(rung) for rung in rungs]
        bars = axis.barh(range(len(rungs)), widths, color=f"C{index}")
        for bar, rung, width in zip(bars, rungs, widths, strict=True):
            bar.set_alpha(1.0 if rung.kept else 0.35)
            said = form.format(width)
            if index == 0:
                rate = rung.tokens / Timing(tuple(rung.laps)).median
                said += f"  ({rate:,.0f} tokens/s{'' if rung.kept else ', left out'})"
            axis.annotate(
                said, (width, bar.get_y() + bar.get_height() / 2), (4, 0), textcoords="offset points", va="center"
            )
        room = 1.6 if index == 0 else 1.25  # for what is written beside the longest bar
        axis.set(xlabel=name, xlim=(0, room * max(widths) or 1.0))
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(range(len(rungs)), [rung.name for rung in rungs])
    figure.suptitle(title)
    return save_figure(pyplot, figure, target)
