"""Values of settings, their ranges and conflicts."""

import contextlib
import dataclasses
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatoken.config.fields import Duration, parse_time, parse_value
from megatoken.config.presets import PRESETS
from megatoken.config.schema import FIELDS, Config, build_config, flatten
from megatoken.config.validate import validate


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("20000steps", Duration(20000, "steps")),
        ("250", Duration(250, "steps")),
        ("10e9tok", Duration(10e9, "tok")),
        ("3ep", Duration(3, "ep")),
        ("0.01dur", Duration(0.01, "dur")),
    ],
)
def test_duration_formats(text: str, value: Duration) -> None:
    assert parse_value(FIELDS["save.every"], text) == value
    assert parse_value(FIELDS["save.every"], str(value)) == value


def test_duration_in_steps() -> None:
    sizes = {"batch_tokens": 1000, "epoch_tokens": 50_000, "total_steps": 400}
    assert Duration(7).steps(**sizes) == 7
    assert Duration(12_000, "tok").steps(**sizes) == 12
    assert Duration(2, "ep").steps(**sizes) == 100
    assert Duration(0.25, "dur").steps(**sizes) == 100
    assert Duration(0.0001, "dur").steps(**sizes) == 1  # not rounded away
    assert Duration(0, "dur").steps(**sizes) == 0


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("budget.tokens", "10e9", 10_000_000_000),
        ("budget.tokens", "10B", 10_000_000_000),
        ("budget.tokens", "10e9tok", 10_000_000_000),
        ("budget.steps", "500steps", 500),
        ("budget.batch_tokens", "524_288", 524288),
        ("budget.batch_tokens", "64ktok", 64000),
        ("optim.lr", "6e-4", 6e-4),
        ("optim.lr", "1", 1.0),
        ("machine.compile", "on", "on"),
        ("machine.tf32", "off", False),
        ("machine.micro_batch", "auto", "auto"),
        ("machine.micro_batch", "8", 8),
        ("seed", "9007199254740993", 9007199254740993),
    ],
)
def test_values_are_parsed(key: str, text: str, value: object) -> None:
    parsed = parse_value(FIELDS[key], text)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("model.n_layer", "twelve"),
        ("model.n_layer", "1.5"),
        ("model.n_layer", "-3"),
        ("model.dropout", "1"),
        ("optim.lr", "nan"),
        ("optim.lr", "-1"),
        ("optim.eps", "0"),
        ("optim.schedule", "cosin"),
        ("machine.tf32", "maybe"),
        ("save.every", "5 bananas"),
        ("save.every", "-5steps"),
        ("save.every", "0.5"),
        ("machine.micro_batch", "0"),
        ("budget.tokens", "1e400"),
        ("budget.tokens", "300steps"),
    ],
)
def test_wrong_values_are_refused(key: str, text: str) -> None:
    with pytest.raises(ValueError):
        parse_value(FIELDS[key], text)


@given(st.text(max_size=12))
def test_any_text_parses_or_raises_value_error(text: str) -> None:
    for spec in FIELDS.values():
        with contextlib.suppress(ValueError):
            assert isinstance(parse_value(spec, text), str | int | float | bool | Duration)


UPDATES = {"objective.name": "grpo", "objective.updates": 4}
CHATS = {"objective.name": "sft"}
RAMP = {"budget.batch_start": 32768, "budget.batch_ramp": 4_000_000_000}


def build(values: Mapping[str, object]) -> Config:
    return build_config({"budget.steps": 1, **values})


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"model.n_head": 7}, "model.n_head"),
        ({"model.n_kv_head": 5}, "model.n_kv_head"),
        ({"model.pos_emb": "rotary", "model.d_model": 36}, "model.n_head"),
        ({"model.window_pattern": "SXL"}, "model.window_pattern"),
        ({"model.rope_factor": 8.0, "model.rope_low": 4.0}, "model.rope_low"),
        ({"model.preset": "gpt5"}, "model.preset"),
        ({"budget.batch_tokens": 1500}, "budget.batch_tokens"),
        ({"budget.batch_tokens": 12288, "machine.micro_batch": 5}, "machine.micro_batch"),
        ({"budget.tokens": 5}, "budget.tokens"),
        ({"budget.steps": 0}, "budget.steps"),
        (RAMP | {"budget.batch_ramp": 0}, "budget.batch_start"),
        (RAMP | {"budget.batch_start": 0}, "budget.batch_ramp"),
        (RAMP | {"budget.batch_start": 1000}, "budget.batch_start"),
        (RAMP | {"budget.batch_start": 1 << 20}, "budget.batch_start"),
        (RAMP | {"data.order": "sequential"}, "data.order"),
        ({"optim.warmup": Duration(2, "dur")}, "optim.warmup"),
        ({"optim.schedule": "wsd", "optim.warmup": Duration(0.9, "dur")}, "optim.warmup"),
        ({"optim.schedule": "multi-step", "optim.min_lr_ratio": 0.0}, "optim.min_lr_ratio"),
        ({"machine.device": "tpu"}, "machine.device"),
        ({"machine.device": "cpu", "machine.precision": "fp16"}, "machine.precision"),
        ({"machine.sharding": "zero3", "machine.master_weights": "on"}, "machine.master_weights"),
        (
            {"machine.tensor_parallel": 2, "machine.activation_checkpointing": "gelu"},
            "machine.activation_checkpointing",
        ),
        ({"machine.tensor_parallel": 2, "data.document_mask": True}, "machine.tensor_parallel"),
        ({"machine.attention": "fa2", "data.document_mask": True}, "machine.attention"),
        (CHATS | {"machine.tensor_parallel": 2}, "machine.tensor_parallel"),
        (CHATS | {"data.order": "sequential"}, "data.order"),
        (CHATS | {"model.value_head": True}, "model.value_head"),
        ({"objective.name": "ppo"}, "model.value_head"),
        (UPDATES | {"objective.group": 1}, "objective.group"),
        (UPDATES | {"objective.group": 7}, "objective.group"),
        (UPDATES | {"save.every": Duration(10)}, "save.every"),
        (UPDATES | {"save.every": Duration(0.1, "dur")}, "save.every"),
        (UPDATES | {"evaluate.every": Duration(6), "save.keep_best": True}, "evaluate.every"),
        ({"log.sinks": "wandb,mlflow"}, "log.sinks"),
        ({"save.time_limit": "soon"}, "save.time_limit"),
    ],
)
def test_conflicting_settings_are_reported(values: dict[str, object], key: str) -> None:
    assert [conflict[0] for conflict in validate(build(values))] == [key]


@pytest.mark.parametrize(
    "values",
    [
        {},
        RAMP,
        UPDATES | {"save.every": Duration(8), "evaluate.every": Duration(6)},
        {"objective.updates": 4, "save.every": Duration(6)},
        {"optim.warmup": Duration(0.1, "dur"), "optim.decay": Duration(1, "dur")},
    ],
)
def test_valid_configs_have_no_conflicts(values: dict[str, object]) -> None:
    assert list(validate(build(values))) == []


def test_preset_fills_unset_fields() -> None:
    model = build({"model.preset": "gpt2-355m", "model.n_layer": 3}).model
    assert (model.n_layer, model.d_model, model.n_head, model.vocab_size) == (3, 1024, 16, 50257)
    model = build({"model.preset": "llama3.2-1b", "model.vocab_size": 0}).model
    assert model.resolve(50257).vocab_size == 50257


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_valid_and_round_trip(name: str) -> None:
    config = build({"model.preset": name, "budget.batch_tokens": PRESETS[name].seq_len})
    assert list(validate(config)) == []
    assert config.model.resolve(1) == PRESETS[name]


@pytest.mark.parametrize(
    ("preset", "mlp", "d_model", "d_ff"),
    [
        ("", "gelu", 384, 1536),
        ("", "swiglu", 768, 2048),
        ("gpt2-124m", "gelu", 384, 1536),
        ("llama2-7b", "swiglu", 5120, 13824),
        ("llama3-8b", "swiglu", 5120, 14336),
    ],
)
def test_d_ff_follows_d_model_unless_given(preset: str, mlp: str, d_model: int, d_ff: int) -> None:
    config = build({"model.preset": preset, "model.mlp": mlp, "model.d_model": d_model})
    assert config.model.resolve(1).d_ff == d_ff


def test_total_steps() -> None:
    assert build({}).total_steps(10) == 1
    assert build_config({"budget.tokens": 10_000_000_000}).total_steps(10) == 19073
    epochs = build_config({"budget.epochs": 2.0, "budget.batch_tokens": 1024})
    assert epochs.total_steps(10 * 1024) == 20


@pytest.mark.parametrize(
    ("text", "seconds"), [("", 0), ("90", 90), ("90m", 5400), ("11h30m", 41400), ("2d", 172800)]
)
def test_wall_clock_times(text: str, seconds: float) -> None:
    assert parse_time(text) == seconds


def test_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().seed = 2  # type: ignore[misc]


def test_flatten_is_the_inverse_of_build() -> None:
    config = build({"model.n_layer": 3, "optim.lr": 0.5})
    assert build_config(flatten(config)) == config
