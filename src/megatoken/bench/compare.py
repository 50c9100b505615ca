"""`bench knob` and `bench peers`: the same training step with each value of a setting, or in other people's GPT-2s.

Every case is a worker process that takes turns with the first, which is the reference.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, Literal, get_args, get_origin

from megatoken.bench.report import show_rows
from megatoken.bench.runner import Worker, measure_workers
from megatoken.bench.spec import LLMC, OURS, WorkerSpec
from megatoken.bench.workload import SPEED, describe_peak, describe_seconds, format_peak
from megatoken.config.fields import parse_value
from megatoken.config.model_config import default_d_ff, validate_model
from megatoken.config.presets import PRESETS
from megatoken.config.schema import FIELDS, MachineConfig
from megatoken.console import Console
from megatoken.errors import ConfigError, PeerError
from megatoken.system.device import Device, open_device, with_peak
from megatoken.system.timing import Timing

# Baselines, and of a checkout the file.
FILES = {
    "transformers": "",
    "nanogpt": "model.py",
    "build-nanogpt": "train_gpt2.py",
    LLMC: "train_gpt2.c",
}
SIZES = (
    "n_layer",
    "n_head",
    "d_model",
    "vocab_size",
    "seq_len",
)  # of a preset that options override
REST = {
    "first_step_seconds": "first step",
    "loss": "loss",
    "chosen": "",
}  # last columns of a worker
# Where, not how; what a process sets once; what splits a model over several.
NOT_TIMED = ("device", "threads", "deterministic", "sharding", "tensor_parallel")


def run_settings(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Compare the values of a machine setting; the losses after equal steps show that only the speed changed.

    Raises ConfigError for an unknown setting or value, PeerError when no value runs.
    """
    setting, values = read_values(options.setting, options.values)
    spec, device = open_step(options, console)
    spec = replace(spec, micro_batch=options.micro_batch or options.batch_seqs)
    specs = [
        replace(apply_setting(spec, setting, value), configuration=text)
        for text, value in values.items()
    ]
    if uneven := [
        each.micro_batch
        for each in specs
        if each.micro_batch and spec.batch_seqs % each.micro_batch
    ]:
        what = f"micro-batch {uneven[0]} does not divide {spec.batch_seqs} sequences"
        raise ConfigError(what, "--batch-seqs", "give a multiple")
    workers = measure_workers(specs, options.repeats, console)
    rows = [{"value": worker.spec.configuration} | worker.describe(device) for worker in workers]
    if all(row["skipped"] for row in rows):
        raise PeerError(
            f"no value ran: {rows[0]['skipped']}", "bench knob", "give a smaller batch or preset"
        )
    for row in rows:
        row["gain"] = (
            rows[0]["seconds"] / row["seconds"] if rows[0]["seconds"] and row["seconds"] else None
        )
        row["batch_tokens"] = spec.batch_tokens
    show_rows({"value": setting, **SPEED, "gain": "gain", **REST}, rows, console)
    return {
        "knob": options.setting,
        **describe_step(options, spec),
        **describe_peak(device),
        "rows": rows,
    }


def run_peers(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Compare ours, as a run is by default, with every baseline, in bf16 also where the device is fast at it, eager and
    compiled. Raises ConfigError for a baseline that is not there, PeerError when ours fails."""
    sources = find_sources(options)
    ours, device = open_step(options, console)
    if LLMC in sources and device.type != "cpu":
        raise ConfigError(
            "llm.c's C trainer computes on a CPU", "--llmc", "leave it out, or add --device cpu"
        )
    precisions = ["fp32", "bf16"] if device.precision == "bf16" else ["fp32"]
    precisions = [options.precision] if options.precision else precisions
    cases = [
        (p, c)
        for p in precisions
        for c in ("eager", "compile")
        if c == "eager" or not options.no_compile
    ]
    specs = [
        replace(
            ours,
            name=name,
            source=source,
            precision=p,
            compile=c == "compile",
            configuration=f"{p} {c}",
        )
        for name, source in sources.items()
        for p, c in (cases if name != LLMC else [("fp32", "C")])
    ]
    workers = measure_workers([ours, *specs], options.repeats, console)
    if workers[0].skipped:
        why = f"our own worker failed: {workers[0].skipped}"
        raise PeerError(why, "bench peers", "give a smaller shape or batch")
    answer = summarize(workers, device)
    heads = {
        "name": "program",
        "configuration": "configuration",
        **SPEED,
        "ratio": "ours is",
        **REST,
    }
    show_rows(heads, answer["rows"], console)
    if answer["ratio"]:
        fastest, spread = " ".join(answer["best_peer"].values()), answer["ratio_spread"]
        console.print(
            f"ours is {answer['ratio']:.3g} times as fast as {fastest}, the fastest baseline; "
            f"round by round {spread['median']:.3g} ({spread['low']:.3g} to {spread['high']:.3g})"
        )
        clean = answer["ratio_undisturbed"] or {"repeats": 0, "median": math.nan}
        console.print(
            f"{clean['repeats']} of {spread['repeats']} rounds undisturbed: {clean['median']:.3g}"
        )
    return {**describe_step(options, ours), **answer}


def describe_step(options: argparse.Namespace, spec: WorkerSpec) -> dict[str, Any]:
    """The work of a step, for a record."""
    sizes = {name: getattr(spec.model_config, name) for name in SIZES}
    return {"preset": options.preset, "batch_seqs": spec.batch_seqs, **sizes}


def open_step(options: argparse.Namespace, console: Console) -> tuple[WorkerSpec, Device]:
    """Our step of the preset with the sizes given as options, and the device; the MLP follows the width."""
    given = {name: value for name in SIZES if (value := getattr(options, name))}
    config = replace(PRESETS[options.preset], **given)
    if "d_model" in given:
        config = replace(config, d_ff=default_d_ff(config.d_model, config.mlp))
    for _, what, fix in validate_model(config):
        raise ConfigError(what, "--n-head", fix)
    device = with_peak(open_device(MachineConfig(device=options.device)))
    spec = WorkerSpec(
        name=OURS,
        model_config=config,
        batch_seqs=options.batch_seqs,
        device=str(device.torch_device),
    )
    console.print(
        f"{config.n_layer} layers, {config.n_head} heads, width {config.d_model}, vocabulary "
        f"{config.padded_vocab_size:,}: {spec.batch_seqs} x {config.seq_len} tokens a step, {format_peak(device)}"
    )
    return spec, device


def read_values(name: str, text: str) -> tuple[str, dict[str, Any]]:
    """(setting, its parsed values as written): those of `text`, or all of a setting that has words for them."""
    key = f"machine.{name.removeprefix('machine.')}"
    setting = key.removeprefix("machine.")
    if key not in FIELDS or setting in NOT_TIMED:
        settings = [k.removeprefix("machine.") for k in FIELDS if k.startswith("machine.")]
        fix = f"give one of {', '.join(each for each in settings if each not in NOT_TIMED)}"
        raise ConfigError(f"no machine setting '{name}' to time", "bench knob", fix)
    field = FIELDS[key]
    known = (
        [str(word) for word in get_args(field.type)] if get_origin(field.type) is Literal else []
    )
    words = [word.strip() for word in text.split(",")] if text else known
    if not words:
        raise ConfigError(
            f"machine.{setting} has no list of values", "--values", "name some, as in 1,2,4"
        )
    try:
        return setting, {word: parse_value(field, word) for word in words}
    except ValueError as error:
        raise ConfigError(
            str(error), "--values", f"see machine.{setting} in `megatoken config`"
        ) from None


def apply_setting(spec: WorkerSpec, setting: str, value: Any) -> WorkerSpec:
    """The spec with one machine setting made; the micro-batch is the spec's own, 0 for a tuned one."""
    if setting == "micro_batch":
        return replace(spec, micro_batch=0 if value == "auto" else value)
    return replace(spec, machine={setting: value})


def find_sources(options: argparse.Namespace) -> dict[str, str]:
    """The baselines asked for, else all that are there, with the file that defines each."""
    paths = {"nanogpt": options.nanogpt, "build-nanogpt": options.build_nanogpt, LLMC: options.llmc}
    there = [
        name for name in FILES if paths.get(name) or (name == "transformers" and find_spec(name))
    ]
    sources: dict[str, str] = {}
    for name in options.only.split(",") if options.only else there:
        if name not in there:
            fix = f"have some of {', '.join(FILES)}: install it, or add --nanogpt, --build-nanogpt or --llmc PATH"
            raise ConfigError(f"there is no '{name}' to measure", "--only", fix)
        path = paths.get(name)
        file = path / FILES[name] if path and path.is_dir() else path
        if file and not file.is_file():
            raise ConfigError(
                f"no such file of {name}", str(file), f"give a checkout or its {FILES[name]}"
            )
        sources[name] = str(file.absolute()) if file else ""
    return sources


def summarize(workers: Sequence[Worker], device: Device) -> dict[str, Any]:
    """Rows, and how ours, the first, compares.

    ratio and ratios: our median rate over the best of a baseline; ratio_spread: over the fastest baseline in the same
    rounds, which is free of what the machine does in the meantime; ratio_undisturbed: the same of the rounds that
    nothing disturbed, None where none are. None without a baseline.
    """
    rows: list[dict[str, Any]] = [
        {"name": worker.spec.name, "configuration": worker.spec.configuration}
        | worker.describe(device)
        for worker in workers
    ]
    rate = rows[0]["tokens_per_second"]["median"]
    for row in rows:
        row["ratio"] = (
            rate / row["tokens_per_second"]["median"] if row["tokens_per_second"] else None
        )
    answer = {
        "rows": rows,
        "ours": rate,
        "peer": None,
        "best_peer": None,
        "ratio": None,
        "ratio_spread": None,
    }
    answer["ratio_undisturbed"] = None
    measured = [
        (row, worker) for row, worker in zip(rows[1:], workers[1:], strict=True) if row["ratio"]
    ]
    ratios: dict[str, float] = {}
    for row, _ in measured:
        ratios[row["name"]] = min(row["ratio"], ratios.get(row["name"], row["ratio"]))
    if measured:
        best, fastest = min(measured, key=lambda pair: float(pair[0]["ratio"]))
        clean = fastest.undisturbed([1 / ratio for ratio in fastest.ratios])
        answer |= {
            "peer": best["tokens_per_second"]["median"],
            "best_peer": {"name": best["name"], "configuration": best["configuration"]},
            "ratio": best["ratio"],
            "ratio_spread": describe_seconds(Timing(tuple(1 / ratio for ratio in fastest.ratios))),
            "ratio_undisturbed": describe_seconds(Timing(clean)) if clean else None,
        }
    return answer | {"ratios": ratios}
