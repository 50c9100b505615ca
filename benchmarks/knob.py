"""`python -m benchmarks knob`: time the training step with each value of a machine setting.

The first value, in records the default, is timed alone, then in alternation with each other value:
A A B A B A C A C. The
benchmarks against other programs also use `open_step` and `describe_step`.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks.arguments import SIZES, SPEED
from benchmarks.rounds import measure_workers
from megatoken.base.config.fields import parse_value
from megatoken.base.config.model_config import default_d_ff, validate_model
from megatoken.base.config.presets import PRESETS
from megatoken.base.config.schema import FIELDS, MachineConfig
from megatoken.base.console import Console
from megatoken.base.errors import ConfigError, PeerError
from megatoken.base.markdown_table import show_rows
from megatoken.base.system.device import Device, open_device
from megatoken.base.system.metrics_log import Row
from megatoken.plan.tuning.peak import with_peak
from megatoken.study.bench.worker import WorkerSpec
from megatoken.study.bench.workload import describe_peak, format_peak

TRAILING_COLUMNS = {"first_step_seconds": "first step", "loss": "loss", "chosen": ""}
# Settings that belong to the device or the process, or that shard a model over devices.
NOT_TIMED = ("device", "threads", "deterministic", "sharding", "tensor_parallel")


def run_knob(options: argparse.Namespace, console: Console) -> Iterator[Row]:
    """Time the step with each value of a setting; after each, yield the result for the record.

    The result includes the losses: equal ones show that a value changes only the speed. Raises
    ConfigError for an unknown setting or value, and PeerError if no value runs.
    """
    setting, values = read_values(options.setting, options.values)
    spec, device = open_step(options, console)
    spec = replace(spec, micro_batch=options.micro_batch or options.batch_seqs)
    specs = [
        replace(apply_setting(spec, setting, value), configuration=text)
        for text, value in values.items()
    ]
    step = {"knob": options.setting, **describe_step(options, spec), **describe_peak(device)}
    rows: list[Row] = []
    for workers in measure_workers(specs, options.repeats, console):
        rows = [
            {"value": worker.spec.configuration, "micro_batch": worker.spec.micro_batch}
            | worker.describe(device)
            for worker in workers
        ]
        first_seconds = rows[0]["seconds"]
        for row in rows:
            is_measured = first_seconds and row["seconds"]
            row["gain"] = first_seconds / row["seconds"] if is_measured else None
            row["batch_tokens"] = spec.batch_tokens
        yield {**step, "rows": rows}
    if all(row["skipped"] for row in rows):
        what = f"no value ran: {rows[0]['skipped']}"
        raise PeerError(what, "knob", "use a smaller batch or preset")
    show_rows({"value": setting, **SPEED, "gain": "gain", **TRAILING_COLUMNS}, rows, console)


def describe_step(options: argparse.Namespace, spec: WorkerSpec) -> Row:
    """Return the record's entries for the model and the batch of a step."""
    sizes = {name: getattr(spec.model_config, name) for name in SIZES}
    return {"preset": options.preset, "batch_seqs": spec.batch_seqs, **sizes}


def open_step(options: argparse.Namespace, console: Console) -> tuple[WorkerSpec, Device]:
    """Print and return the training step that the options describe, and its device.

    If the options change d_model, d_ff changes in proportion.
    """
    sizes = {name: getattr(options, name) for name in SIZES if getattr(options, name)}
    config = replace(PRESETS[options.preset], **sizes)
    if "d_model" in sizes:
        config = replace(config, d_ff=default_d_ff(config.d_model, config.mlp))
    for _, what, fix in validate_model(config):
        raise ConfigError(what, "--n-head", fix)
    device = with_peak(open_device(MachineConfig(device=options.device)))
    spec = WorkerSpec(
        model_config=config, batch_seqs=options.batch_seqs, device=str(device.torch_device)
    )
    console.print(
        f"{config.n_layer} layers, {config.n_head} heads, width {config.d_model}, "
        f"vocabulary {config.padded_vocab_size:,}: {spec.batch_seqs} x {config.seq_len} tokens "
        f"per step, {format_peak(device)}"
    )
    return spec, device


def read_values(name: str, text: str) -> tuple[str, dict[str, Any]]:
    """Return a setting's name, and {text: value} of the values to compare.

    name: the setting, with or without "machine.". text: values separated by commas; if empty, all
    choices of the setting. Raises ConfigError for an unknown setting or
    value.
    """
    key = f"machine.{name.removeprefix('machine.')}"
    setting = key.removeprefix("machine.")
    if key not in FIELDS or setting in NOT_TIMED:
        settings = [k.removeprefix("machine.") for k in FIELDS if k.startswith("machine.")]
        fix = f"choose from {', '.join(k for k in settings if k not in NOT_TIMED)}"
        raise ConfigError(f"no machine setting '{name}' to compare", "knob", fix)
    field = FIELDS[key]
    values = [each.strip() for each in text.split(",") if each] or [*field.choices]
    if not values:
        raise ConfigError(f"{key} has no named values", "--values", "list some, as in 1,2,4")
    try:
        return setting, {each: parse_value(field, each) for each in values}
    except ValueError as error:
        raise ConfigError(str(error), "--values", f"see {key} in `megatoken config`") from None


def apply_setting(spec: WorkerSpec, setting: str, value: Any) -> WorkerSpec:
    """Return the spec with a machine setting changed to `value`."""
    if setting == "micro_batch":
        return replace(spec, micro_batch=0 if value == "auto" else value)
    return replace(spec, machine={setting: value})
