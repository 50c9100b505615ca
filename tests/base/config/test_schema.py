"""Values of settings, their ranges and conflicts."""

import contextlib
import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatoken.base.config.fields import SETTINGS, Duration, parse_time, parse_value
from megatoken.base.config.load import format_value
from megatoken.base.config.presets import PRESETS
from megatoken.base.config.schema import FIELDS, SECTIONS, Config, build_config
from megatoken.base.config.validate import validate


def test_each_field_has_a_row_in_the_table_of_settings():
    core = {item.name: item.type for item in dataclasses.fields(Config)}
    sections = [
        *SECTIONS.items(),
        *((name, core[name]) for name in core.keys() - {"seed", "sections"}),
    ]
    keys = {
        f"{name}.{item.name}" for name, section in sections for item in dataclasses.fields(section)
    }
    assert SETTINGS.keys() == FIELDS.keys() == {"seed", *keys} - {"model.vocab_multiple"}


def test_duration_in_steps():
    sizes = {"batch_tokens": 1000, "epoch_tokens": 50_000, "total_steps": 400}
    counts = {"7": 7, "12000tok": 12, "2ep": 100, "0.25dur": 100, "0dur": 0}
    counts["0.0001dur"] = 1  # not rounded away
    for text, count in counts.items():
        assert parse_value(FIELDS["save.every"], text).steps(**sizes) == count


VALUES = {
    "save.every=20000steps": Duration(20000, "steps"),
    "save.every=250": Duration(250, "steps"),
    "save.every=10e9tok": Duration(10e9, "tok"),
    "save.every=3ep": Duration(3, "ep"),
    "save.every=0.01dur": Duration(0.01, "dur"),
    "budget.tokens=10e9": 10_000_000_000,
    "budget.tokens=10B": 10_000_000_000,
    "budget.tokens=10e9tok": 10_000_000_000,
    "budget.steps=500steps": 500,
    "budget.batch_tokens=524_288": 524288,
    "budget.batch_tokens=64ktok": 64000,
    "optim.lr=6e-4": 6e-4,
    "optim.lr=1": 1.0,
    "machine.compile=on": "on",
    "machine.tf32=off": False,
    "machine.micro_batch=auto": "auto",
    "machine.micro_batch=8": 8,
    "seed=9007199254740993": 9007199254740993,
}


@pytest.mark.parametrize(("assignment", "value"), VALUES.items())
def test_values_are_parsed(assignment: str, value: object):
    key, text = assignment.split("=")
    for written in (text, format_value(value)):
        parsed = parse_value(FIELDS[key], written)
        assert (parsed, type(parsed)) == (value, type(value))


@given(st.text(max_size=12))
def test_any_text_parses_or_raises_value_error(text: str):
    for spec in FIELDS.values():
        with contextlib.suppress(ValueError):
            assert isinstance(parse_value(spec, text), str | int | float | bool | Duration)


UPDATES = "objective.name=grpo objective.updates=4 "
RAMP = "budget.batch_start=32768 budget.batch_ramp=4000000000 "


def read(assignments: str) -> Config:
    pairs = (assignment.split("=") for assignment in assignments.split())
    values = {key: parse_value(FIELDS[key], text) for key, text in pairs}
    return build_config({"budget.steps": 1} | values)


CONFLICTS = f"""\
model.n_head:          model.n_head=7
model.n_kv_head:       model.n_kv_head=5
model.n_head:          model.pos_emb=rotary model.d_model=36
model.window_pattern:  model.window_pattern=SXL
model.rope_low:        model.rope_factor=8 model.rope_low=4
model.preset:          model.preset=gpt5
budget.batch_tokens:   budget.batch_tokens=1500
machine.micro_batch:   budget.batch_tokens=12288 machine.micro_batch=5
budget.tokens:         budget.tokens=5
budget.steps:          budget.steps=0
budget.batch_start:    {RAMP} budget.batch_ramp=0
budget.batch_ramp:     {RAMP} budget.batch_start=0
budget.batch_start:    {RAMP} budget.batch_start=1000
budget.batch_start:    {RAMP} budget.batch_start=1048576
data.order:            {RAMP} data.order=sequential
optim.warmup:          optim.warmup=2dur
optim.warmup:          optim.schedule=wsd optim.warmup=0.9dur
optim.min_lr_ratio:    optim.schedule=multi-step optim.min_lr_ratio=0
machine.device:        machine.device=tpu
machine.precision:     machine.device=cpu machine.precision=fp16
machine.master_weights: machine.sharding=zero3 machine.master_weights=on
machine.activation_checkpointing: machine.tensor_parallel=2 machine.activation_checkpointing=gelu
machine.fp8:           machine.tensor_parallel=2 machine.fp8=head
machine.tensor_parallel: machine.tensor_parallel=2 data.document_mask=true
machine.attention:     machine.attention=fa2 data.document_mask=true
machine.tensor_parallel: objective.name=sft machine.tensor_parallel=2
data.order:            objective.name=sft data.order=sequential
model.value_head:      objective.name=sft model.value_head=true
model.value_head:      objective.name=ppo
objective.group:       {UPDATES} objective.group=1
objective.group:       {UPDATES} objective.group=7
save.every:            {UPDATES} save.every=10
save.every:            {UPDATES} save.every=0.1dur
evaluate.every:        {UPDATES} evaluate.every=6 save.keep_best=true
log.sinks:             log.sinks=wandb,comet
log.alert:             log.alert=https://hooks.slack.com/services/x
save.time_limit:       save.time_limit=soon
none:                  seed=1
none:                  {RAMP}
none:                  {UPDATES} save.every=8 evaluate.every=6
none:                  objective.updates=4 save.every=6
none:                  optim.warmup=0.1dur optim.decay=1dur
"""


@pytest.mark.parametrize("row", CONFLICTS.splitlines())
def test_conflicting_settings_are_reported(row: str):
    key, assignments = row.split(": ")
    conflicts = [key for key, *_ in validate(read(assignments))]
    assert conflicts == ([] if key == "none" else [key])


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_valid_and_round_trip(name: str):
    config = read(f"model.preset={name} budget.batch_tokens={PRESETS[name].seq_len}")
    assert not [*validate(config)]
    assert config.model.resolve(1) == PRESETS[name]


@pytest.mark.parametrize(
    ("assignments", "d_ff"),
    [
        ("model.mlp=gelu model.d_model=384", 1536),
        ("model.mlp=swiglu model.d_model=768", 2048),
        ("model.preset=gpt2-124m model.mlp=gelu model.d_model=384", 1536),
        ("model.preset=llama2-7b model.mlp=swiglu model.d_model=5120", 13824),
        ("model.preset=llama3-8b model.mlp=swiglu model.d_model=5120", 14336),
    ],
)
def test_d_ff_follows_d_model_unless_given(assignments: str, d_ff: int):
    assert read(assignments).model.resolve(1).d_ff == d_ff


def test_total_steps():
    assert read("").total_steps(10) == 1
    assert build_config({"budget.tokens": 10_000_000_000}).total_steps(10) == 19073
    epochs = build_config({"budget.epochs": 2.0, "budget.batch_tokens": 1024})
    assert epochs.total_steps(10 * 1024) == 20


def test_wall_clock_times():
    times = {"": 0, "90": 90, "90m": 5400, "11h30m": 41400, "2d": 172800}
    assert {text: parse_time(text) for text in times} == times
