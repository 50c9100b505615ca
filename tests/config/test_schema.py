"""Values, ranges and the rules between fields."""

import contextlib
import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatoken.config.fields import Duration, parse_time, parse_value
from megatoken.config.presets import PRESETS
from megatoken.config.schema import FIELDS, Config, build_config, flatten, validate


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
    found = parse_value(FIELDS[key], text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("key", "text", "output"),
    [
        ("model.n_layer", "twelve", "expected a whole number, got 'twelve'"),
        ("model.n_layer", "1.5", "expected a whole number, got '1.5'"),
        ("model.n_layer", "-3", "must be at least 1, got -3"),
        ("model.dropout", "1", "must be at least 0 and at most 0.99, got 1"),
        ("optim.lr", "nan", "expected a number, got 'nan'"),
        ("optim.lr", "-1", "must be at least 0, got -1"),
        ("optim.eps", "0", "must be above 0, got 0"),
        (
            "optim.schedule",
            "cosin",
            "expected one of cosine, linear, wsd, wsd-sqrt, multi-step, constant, got 'cosin'",
        ),
        ("machine.tf32", "maybe", "expected true or false, got 'maybe'"),
        (
            "save.every",
            "5 bananas",
            "expected a duration such as 100steps, 10e9tok, 3ep or 0.01dur, got '5 bananas'",
        ),
        ("save.every", "-5steps", "must be at least 0, got -5steps"),
        ("machine.micro_batch", "0", "must be at least 1, got 0"),
        ("budget.tokens", "1e400", "expected a whole number, got '1e400'"),
    ],
)
def test_wrong_values_are_refused(key: str, text: str, output: str) -> None:
    with pytest.raises(ValueError) as wrong:
        parse_value(FIELDS[key], text)
    assert str(wrong.value) == output


@given(st.text(max_size=12))
def test_any_text_parses_or_raises_value_error(text: str) -> None:
    for spec in FIELDS.values():
        with contextlib.suppress(ValueError):
            assert isinstance(parse_value(spec, text), str | int | float | bool | Duration)


UPDATES = {"objective__name": "grpo", "objective__updates": 4}


def run_with(**values: object) -> Config:
    return build_config(
        {"budget.steps": 1, **{key.replace("__", "."): value for key, value in values.items()}}
    )


@pytest.mark.parametrize(
    ("values", "key", "fix"),
    [
        ({"model__n_head": 7}, "model.n_head", "nearest that do: 4, 6, 8"),
        ({"budget__batch_tokens": 1500}, "budget.batch_tokens", "nearest that are: 1024, 2048"),
        ({"budget__batch_tokens": 500}, "budget.batch_tokens", "nearest that are: 1024"),
        ({"budget__batch_tokens": 12288, "machine__micro_batch": 5}, "machine.micro_batch", "4, 6"),
        ({"budget__tokens": 5}, "budget.tokens", "set one of"),
        ({"model__preset": "gpt5"}, "model.preset", "gpt2-124m"),
        ({"model__n_kv_head": 5}, "model.n_kv_head", "nearest that divide: 3, 4, 6"),
        ({"model__pos_emb": "rotary", "model__d_model": 36}, "model.n_head", "even"),
        ({"model__rope_factor": 8.0, "model__rope_low": 4.0}, "model.rope_low", "1 and 4"),
        ({"machine__device": "tpu"}, "machine.device", "use auto, cpu"),
        ({"machine__device": "cpu", "machine__precision": "fp16"}, "machine.precision", "bf16"),
        ({"optim__warmup": Duration(2, "dur")}, "optim.warmup", "at most 1dur"),
        ({"save__time_limit": "soon"}, "save.time_limit", "90m"),
        (
            {**UPDATES, "save__every": Duration(10)},
            "save.every",
            "objective.updates: 8steps, 12steps",
        ),
        (
            {**UPDATES, "save__every": Duration(0.1, "dur")},
            "save.every",
            "objective.updates: 4steps",
        ),
        (
            {**UPDATES, "evaluate__every": Duration(6), "save__keep_best": True},
            "evaluate.every",
            "4steps, 8steps",
        ),
    ],
)
def test_conflicting_settings_are_reported_with_a_fix_that_works(
    values: dict[str, object], key: str, fix: str
) -> None:
    found = list(validate(run_with(**values)))
    assert [k for k, _, _ in found] == [key]
    assert fix in found[0][2]


def test_valid_config_has_no_conflicts() -> None:
    assert list(validate(run_with())) == []
    assert (
        list(validate(run_with(**UPDATES, save__every=Duration(8), evaluate__every=Duration(6))))
        == []
    )
    assert list(validate(run_with(objective__updates=4, save__every=Duration(6)))) == []


def test_preset_fills_unset_fields() -> None:
    config = run_with(model__preset="gpt2-355m", model__n_layer=3)
    assert (
        config.model.n_layer,
        config.model.d_model,
        config.model.n_head,
        config.model.vocab_size,
    ) == (3, 1024, 16, 50257)


def test_llama_preset_sets_its_switches() -> None:
    config = run_with(model__preset="llama3.2-1b", model__seq_len=4096)
    model_config = config.model.resolve(50257)
    assert model_config == dataclasses.replace(PRESETS["llama3.2-1b"], seq_len=4096)
    assert (
        run_with(model__preset="llama3.2-1b", model__vocab_size=0).model.resolve(50257).vocab_size
        == 50257
    )


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_valid_and_round_trip(name: str) -> None:
    config = run_with(model__preset=name, budget__batch_tokens=PRESETS[name].seq_len)
    assert list(validate(config)) == []
    assert config.model.resolve(1) == PRESETS[name]


def test_d_ff_follows_d_model_unless_given() -> None:
    def d_ff(**values: object) -> int:
        return run_with(**values).model.resolve(1).d_ff

    assert d_ff(model__d_model=384) == 1536
    assert d_ff(model__preset="gpt2-124m", model__d_model=384) == 1536
    assert d_ff(model__preset="llama2-7b", model__d_model=5120) == 13824
    assert d_ff(model__preset="llama3-8b", model__d_model=5120) == 14336
    assert d_ff(model__mlp="swiglu", model__d_model=768) == 2048


def test_total_steps() -> None:
    assert run_with().total_steps(10) == 1
    tokens = build_config({"budget.tokens": 10_000_000_000})
    assert tokens.total_steps(10) == 19073
    assert (
        build_config({"budget.epochs": 2.0, "budget.batch_tokens": 1024}).total_steps(10 * 1024)
        == 20
    )


@pytest.mark.parametrize(
    ("text", "seconds"), [("", 0), ("90", 90), ("90m", 5400), ("11h30m", 41400), ("2d", 172800)]
)
def test_wall_clock_times(text: str, seconds: float) -> None:
    assert parse_time(text) == seconds


def test_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().seed = 2  # type: ignore[misc]


def test_flatten_is_the_inverse_of_build() -> None:
    config = run_with(model__n_layer=3, optim__lr=0.5)
    assert build_config(flatten(config)) == config
