"""bench peers: the same optimizer step in ours and in other people's GPT-2s, each in a process of its own.

In: a shape, a batch, where the peers' files are. Out: tokens/s, first step, peak memory and loss of ours, as a run with
nothing set would have it, and of each peer in fp32 and bf16, eager and compiled. They take turns: one computes, the
others wait for a line, so no allocator, thread pool or compiler reaches another and all see the same machine. As many
live at once as memory has room for; ours takes part in every round. Absent: several devices, accumulation.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from megatoken.bench.spec import OURS, Spec
from megatoken.config import Machine
from megatoken.console import Console
from megatoken.device import Device, open_device
from megatoken.errors import Exit, Fault
from megatoken.hardware import free_memory_bytes, given_environment
from megatoken.model.count import state_bytes
from megatoken.presets import PRESETS, Shape
from megatoken.timing import Timing

PACKAGES = ("transformers", "litgpt")  # peers that are installed
FILES = {"nanogpt": "model.py", "build-nanogpt": "train_gpt2.py"}  # peers that are a file of a checkout
SIZES = ("n_layer", "n_head", "d_model", "vocab_size", "seq_len")  # of a preset that may be given anew
WARMUP_STEPS = 2  # untimed: the first compiles and allocates, the second tells how long a step takes
TURN_SECONDS = 0.5  # a turn of ours is about as long, and everybody's has as many steps
MOST_STEPS = 50  # of a turn
PROCESS_BYTES = 6e8  # Python and torch, without a model
ROW = "{name:<13} {configuration:<13} {rate:>9} {spread:>18} {first:>10} {memory:>9} {loss:>8}"


class Lost(Exception):
    """A contender that cannot go on; the message says why."""


@dataclass(slots=True, kw_only=True)
class Result:
    """What one contender did. laps: seconds of a step in each of its turns; pace: those of ours in the same rounds;
    loss: after `steps` steps."""

    name: str
    configuration: str
    chosen: str = ""
    laps: list[float] = field(default_factory=list)
    pace: list[float] = field(default_factory=list)
    first_step_seconds: float | None = None
    peak_memory_bytes: int | None = None
    loss: float | None = None
    steps: int = 0
    skipped: str = ""


class Contender:
    """A process that trains one contender when asked. Ours sees this environment, a peer the one given to us."""

    def __init__(self, spec: Spec) -> None:
        self.result = Result(name=spec.name, configuration=spec.configuration)
        self._spec = spec
        self._noise = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "megatoken.bench.contender"],  # -P: files here are not modules there
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._noise,
            text=True,
            env=None if spec.name == OURS and spec.prepared else given_environment(),
        )

    def __enter__(self) -> "Contender":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process, whatever it is at; a second time nothing happens."""
        if self._noise.closed:
            return
        self._process.terminate()
        with suppress(BrokenPipeError):
            self._process.communicate()
        self._noise.close()

    def warm_up(self) -> float:
        """Build it and take the untimed steps; return the seconds of the last. Raises Lost."""
        built = self._ask(self._spec.to_line())
        turn = self._ask(f"step {WARMUP_STEPS}")
        self.result.steps = WARMUP_STEPS
        self.result.chosen = built["chosen"]
        self.result.first_step_seconds = built["choosing_seconds"] + turn["seconds"][0]
        return float(turn["seconds"][-1])

    def run_lap(self, steps: int) -> float:
        """Take `steps` timed steps; return the mean seconds of one. Raises Lost.

        Where they are short an untimed one goes before: the others have emptied the caches.
        """
        untimed = int(steps > 1)
        turn = self._ask(f"step {steps + untimed}")
        self.result.steps += steps + untimed
        self.result.laps.append(sum(turn["seconds"][untimed:]) / steps)
        self.result.peak_memory_bytes, self.result.loss = turn["peak_memory_bytes"], turn["loss"]
        return self.result.laps[-1]

    def _ask(self, line: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # it is dead, then: no answer comes
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise Lost(self._find_cause())
        found: dict[str, Any] = json.loads(answer)
        if "failed" in found:
            raise Lost(found["failed"])
        return found

    def _find_cause(self) -> str:
        code = self._process.wait()
        self._noise.seek(0)
        said = self._noise.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(said) if line.strip()), "")
        if code == -9:  # SIGKILL, which Windows does not name
            return "its process was killed (out of memory?)"
        how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return f"its process {how}" + (f": {last}" if last else "")


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Time ours and every peer. Raises Fault(CONFIG) for a shape that cannot be or a peer that is not there,
    Fault(PEER) when ours fails."""
    shape = choose_shape(options)
    only = choose_names(options)
    sources = {name: find_source(name, path) for name, path in _paths(options).items() if path and name in only}
    device = open_device(Machine(device=options.device))
    ours = Spec(name=OURS, shape=shape, batch_seqs=options.batch_seqs, device=str(device.place))
    peers, skipped = list_peers(ours, only, sources, device, options)
    tokens = options.batch_seqs * shape.seq_len
    at_once = count_at_once(shape, tokens, device)
    console.say(
        f"{shape.n_layer} layers, {shape.n_head} heads, width {shape.d_model}, vocabulary {shape.padded_vocab_size:,}: "
        f"{options.batch_seqs} x {shape.seq_len} = {tokens:,} tokens a step on {device.name}; "
        f"ours beside {min(at_once, max(len(peers), 1))} at a time"
    )
    results = [*race(ours, peers, options.repeats, at_once, tokens, console), *skipped]
    for result in skipped:
        console.say(describe_row(result, tokens))
    answer = summarize(results, tokens)
    if answer["ratio"]:
        winner, spread = " ".join(answer["best_peer"].values()), answer["ratio_spread"]
        noise = ": the difference is within the noise" if spread["low"] <= 1 <= spread["high"] else ""
        console.say(
            f"ours is {answer['ratio']:.3g} times as fast as {winner}, the fastest peer; "
            f"round by round {spread['median']:.3g} ({spread['low']:.3g} to {spread['high']:.3g}){noise}"
        )
    sizes = {name: getattr(shape, name) for name in SIZES}
    return {"preset": options.preset, "batch_seqs": options.batch_seqs, **sizes, **answer}


def choose_shape(options: argparse.Namespace) -> Shape:
    """The preset with what was given in its place; the MLP stays 4 times as wide as the model."""
    given = {name: value for name in SIZES if (value := getattr(options, name))}
    shape = replace(PRESETS[options.preset], **given)
    if shape.d_model % shape.n_head:
        what = f"{shape.n_head} heads do not divide a width of {shape.d_model}"
        raise Fault(Exit.CONFIG, what, "--n-head", "give a divisor of --d-model")
    return replace(shape, d_ff=4 * shape.d_model)


def _paths(options: argparse.Namespace) -> dict[str, Path | None]:
    return {"nanogpt": options.nanogpt, "build-nanogpt": options.build_nanogpt}


def choose_names(options: argparse.Namespace) -> list[str]:
    """The peers asked for, all if none was named."""
    known = [*PACKAGES, *FILES]
    only = [name.strip() for name in options.only.split(",")] if options.only else known
    for name in only:
        if name not in known:
            raise Fault(Exit.CONFIG, f"unknown peer '{name}'", "--only", f"choose from {', '.join(known)}")
        if options.only and name in FILES and not _paths(options)[name]:
            raise Fault(Exit.CONFIG, f"no checkout of {name} given", "--only", f"add --{name} PATH")
    return list(dict.fromkeys(only))


def find_source(name: str, path: Path) -> str:
    """The file that defines a peer's model: `path` itself, or what its repository calls it in the folder `path`."""
    file = path / FILES[name] if path.is_dir() else path
    if not file.is_file():
        raise Fault(Exit.CONFIG, f"no such file of {name}", str(file), f"give a checkout or its {FILES[name]}")
    return str(file.absolute())


def list_peers(
    ours: Spec, only: Sequence[str], sources: dict[str, str], device: Device, options: argparse.Namespace
) -> tuple[list[Spec], list[Result]]:
    """The peers to run, each in each of its configurations, and what is skipped with the reason."""
    peers, skipped = [], []
    for name in only:
        reason = ""
        if name in PACKAGES and find_spec(name) is None:
            reason = f"not installed: pip install {name}"
        elif name in FILES and name not in sources:
            reason = f"no checkout given: --{name} PATH"
        if reason:
            skipped.append(Result(name=name, configuration="all", skipped=reason))
            continue
        for precision in ("fp32", "bf16"):
            for compiled in (False, True)[: 1 if options.no_compile else 2]:
                source = sources.get(name, "")
                spec = replace(ours, name=name, precision=precision, compile=compiled, source=source)
                if precision == "bf16" and device.precision != "bf16" and not options.all_configurations:
                    reason = f"{device.name} is not fast at bf16 (--all-configurations runs it)"
                    skipped.append(Result(name=name, configuration=spec.configuration, skipped=reason))
                else:
                    peers.append(spec)
    return peers, skipped


def count_at_once(shape: Shape, tokens: int, device: Device) -> int:
    """Peers that memory has room for beside ours, at least one.

    An estimate for the most wasteful of them: fp32 weights, gradients and moments; four copies of the logits in fp32;
    about 80 bytes of activations for each layer, token and unit of width.
    """
    free = torch.cuda.mem_get_info(device.place)[0] if device.place.type == "cuda" else free_memory_bytes()
    logits, activations = 16 * shape.padded_vocab_size, 80 * shape.n_layer * shape.d_model
    each = state_bytes(shape) * 16 / 12 + tokens * (logits + activations) + PROCESS_BYTES
    return max(1, int(free / each) - 1)


def race(ours: Spec, peers: Sequence[Spec], repeats: int, at_once: int, tokens: int, console: Console) -> list[Result]:
    """Results of ours, which is first, and of every peer, measured in heats of at most `at_once` peers."""
    console.say(ROW.format(name="", configuration="", rate="tokens/s", spread="quartiles",
                                 first="first step", memory="peak GiB", loss="loss"))  # fmt: skip
    heats = [peers[first : first + at_once] for first in range(0, len(peers), at_once)] or [()]
    results: list[Result] = []
    with Contender(ours) as own:
        try:
            steps = min(max(round(TURN_SECONDS / own.warm_up()), 1), MOST_STEPS)
            for number, heat in enumerate(heats):
                found = run_heat(own, heat, repeats, steps, console)
                if number == 0:
                    loss, trained = own.result.loss, own.result.steps  # as long as the peers
                    console.say(f"{describe_row(own.result, tokens)}  {own.result.chosen}")
                for result in found:
                    console.say(describe_row(result, tokens))
                results += found
        except Lost as why:
            raise Fault(
                Exit.PEER, f"our own contender failed: {why}", "bench peers", "give a smaller shape or batch"
            ) from None
    own.result.loss, own.result.steps = loss, trained
    return [own.result, *results]


def run_heat(own: Contender, heat: Sequence[Spec], repeats: int, steps: int, console: Console) -> list[Result]:
    """Results of the peers in a heat, each with the pace of ours in its rounds. Raises Lost when ours is."""
    with ExitStack() as alive:
        peers: list[Contender] = []
        for spec in heat:
            console.step(f"{spec.name} {spec.configuration}: first steps")
            peer = alive.enter_context(Contender(spec))
            peers.append(peer)
            try:
                peer.warm_up()
            except Lost as why:
                peer.result.skipped = str(why)
        for number in range(repeats):
            console.step(f"round {number + 1} of {repeats}")
            pace = own.run_lap(steps)
            for peer in peers:
                if peer.result.skipped:
                    continue
                try:
                    peer.run_lap(steps)
                    peer.result.pace.append(pace)
                except Lost as why:
                    peer.result.skipped = str(why)
    return [peer.result for peer in peers]


def describe_row(result: Result, tokens: int) -> str:
    """A line of the table."""
    if result.skipped:
        return f"{result.name:<13} {result.configuration:<13} skipped: {result.skipped}"
    rate = Timing(tuple(result.laps)).rate(tokens)
    return ROW.format(
        name=result.name,
        configuration=result.configuration,
        rate=f"{rate['median']:,.0f}",
        spread=f"{rate['low']:,.0f} to {rate['high']:,.0f}",
        first=f"{result.first_step_seconds:.1f} s",
        memory=f"{(result.peak_memory_bytes or 0) / 2**30:.2f}",
        loss=f"{result.loss:.4f}",
    )


def summarize(results: Sequence[Result], tokens: int) -> dict[str, Any]:
    """Rows, and how ours, the first, compares. tokens: of a step.

    ratio and ratios: our median rate over the best of a peer; ratio_spread: over the fastest peer, round by round,
    which is free of what the machine does in the meantime. None without a peer.
    """
    rates = [Timing(tuple(r.laps)).rate(tokens) if r.laps and not r.skipped else None for r in results]
    rows = [
        {
            "name": result.name,
            "configuration": result.configuration,
            "tokens_per_second": rate,
            "best": tokens / min(result.laps) if rate else None,
            "first_step_seconds": result.first_step_seconds if rate else None,
            "peak_memory_bytes": result.peak_memory_bytes if rate else None,
            "loss": result.loss if rate else None,
            "steps": result.steps if rate else None,
            "chosen": result.chosen,
            "skipped": result.skipped or None,
        }
        for result, rate in zip(results, rates, strict=True)
    ]
    own = rates[0]
    assert own is not None
    ranked = [(rate["median"], result) for result, rate in zip(results[1:], rates[1:], strict=True) if rate]
    answer: dict[str, Any] = {"rows": rows, "ours": own["median"], "peer": None, "best_peer": None, "ratio": None}
    answer |= {"ratio_spread": None, "ratios": {}}
    if not ranked:
        return answer
    best, winner = max(ranked, key=lambda pair: pair[0])
    rounds = Timing(tuple(theirs / ours for theirs, ours in zip(winner.laps, winner.pace, strict=True)))
    low, high = rounds.quartiles
    names = dict.fromkeys(result.name for _, result in ranked)
    return answer | {
        "peer": best,
        "best_peer": {"name": winner.name, "configuration": winner.configuration},
        "ratio": own["median"] / best,
        "ratio_spread": {"median": rounds.median, "low": low, "high": high, "repeats": len(rounds.seconds)},
        "ratios": {name: own["median"] / max(rate for rate, r in ranked if r.name == name) for name in names},
    }
