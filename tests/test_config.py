"""Values, ranges and the rules between fields."""

import contextlib
import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatoken.config import KNOBS, Run, build, find_conflicts, flatten
from megatoken.knobs import Duration, parse_time, parse_value
from megatoken.presets import PRESETS


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
def test_durations_are_written_as_people_say_them(text: str, value: Duration) -> None:
    assert parse_value(KNOBS["save.every"], text) == value
    assert parse_value(KNOBS["save.every"], str(value)) == value


def test_durations_become_steps() -> None:
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
        ("optim.lr", "6e-4", 6e-4),
        ("optim.lr", "1", 1.0),
        ("machine.compile", "on", "on"),
        ("machine.tf32", "off", False),
        ("machine.micro_batch", "auto", "auto"),
        ("machine.micro_batch", "8", 8),
        ("seed", "9007199254740993", 9007199254740993),
    ],
)
def test_values_are_read(key: str, text: str, value: object) -> None:
    found = parse_value(KNOBS[key], text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("key", "text", "said"),
    [
        ("model.n_layer", "twelve", "expected a whole number, got 'twelve'"),
        ("model.n_layer", "1.5", "expected a whole number, got '1.5'"),
        ("model.n_layer", "-3", "must be at least 1, got -3"),
        ("model.dropout", "1", "must be at least 0 and at most 0.99, got 1"),
        ("optim.lr", "nan", "expected a number, got 'nan'"),
        ("optim.lr", "-1", "must be at least 0, got -1"),
        ("optim.eps", "0", "must be above 0, got 0"),
        ("optim.schedule", "cosin", "expected one of cosine, linear, wsd, wsd-sqrt, constant, got 'cosin'"),
        ("machine.tf32", "maybe", "expected true or false, got 'maybe'"),
        ("save.every", "5 bananas", "expected a duration such as 100steps, 10e9tok, 3ep or 0.01dur, got '5 bananas'"),
        ("save.every", "-5steps", "must be at least 0, got -5"),
        ("machine.micro_batch", "0", "must be at least 1, got 0"),
        ("budget.tokens", "1e400", "expected a whole number, got '1e400'"),
    ],
)
def test_wrong_values_are_refused(key: str, text: str, said: str) -> None:
    with pytest.raises(ValueError) as wrong:
        parse_value(KNOBS[key], text)
    assert str(wrong.value) == said


@given(st.text(max_size=12))
def test_no_text_breaks_the_reader(text: str) -> None:
    for knob in KNOBS.values():
        with contextlib.suppress(ValueError):
            assert isinstance(parse_value(knob, text), str | int | float | bool | Duration)


def run_with(**values: object) -> Run:
    return build({"budget.steps": 1, **{key.replace("__", "."): value for key, value in values.items()}})


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
        ({"model__positions": "rotary", "model__d_model": 36}, "model.n_head", "even"),
        ({"model__rope_factor": 8.0, "model__rope_low": 4.0}, "model.rope_low", "1 and 4"),
        ({"machine__device": "tpu"}, "machine.device", "use auto, cpu"),
        ({"machine__device": "cpu", "machine__precision": "fp16"}, "machine.precision", "bf16"),
        ({"optim__warmup": Duration(2, "dur")}, "optim.warmup", "at most 1dur"),
        ({"save__time_limit": "soon"}, "save.time_limit", "90m"),
    ],
)
def test_conflicts_are_found_and_mended(values: dict[str, object], key: str, fix: str) -> None:
    found = list(find_conflicts(run_with(**values)))
    assert [k for k, _, _ in found] == [key]
    assert fix in found[0][2]


def test_a_sound_run_has_no_conflicts() -> None:
    assert list(find_conflicts(run_with())) == []


def test_preset_fills_what_is_not_given() -> None:
    run = run_with(model__preset="gpt2-355m", model__n_layer=3)
    assert (run.model.n_layer, run.model.d_model, run.model.n_head, run.model.vocab_size) == (3, 1024, 16, 50257)


def test_a_preset_of_the_other_family_brings_its_switches() -> None:
    run = run_with(model__preset="llama3.2-1b", model__seq_len=4096)
    shape = run.model.shape(50257)
    assert shape == dataclasses.replace(PRESETS["llama3.2-1b"], seq_len=4096)
    assert run_with(model__preset="llama3.2-1b", model__vocab_size=0).model.shape(50257).vocab_size == 50257


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_sound_and_comes_back(name: str) -> None:
    run = run_with(model__preset=name, budget__batch_tokens=PRESETS[name].seq_len)
    assert list(find_conflicts(run)) == []
    assert run.model.shape(1) == PRESETS[name]


def test_the_width_of_the_mlp_follows_the_model_unless_it_is_given() -> None:
    def d_ff(**values: object) -> int:
        return run_with(**values).model.shape(1).d_ff

    assert d_ff(model__d_model=384) == 1536
    assert d_ff(model__preset="gpt2-124m", model__d_model=384) == 1536
    assert d_ff(model__preset="llama2-7b", model__d_model=5120) == 13824
    assert d_ff(model__preset="llama3-8b", model__d_model=5120) == 14336
    assert d_ff(model__mlp="swiglu", model__d_model=768) == 2048


def test_total_steps() -> None:
    assert run_with().total_steps(10) == 1
    tokens = build({"budget.tokens": 10_000_000_000})
    assert tokens.total_steps(10) == 19073
    assert build({"budget.epochs": 2.0, "budget.batch_tokens": 1024}).total_steps(10 * 1024) == 20


@pytest.mark.parametrize(("text", "seconds"), [("", 0), ("90", 90), ("90m", 5400), ("11h30m", 41400), ("2d", 172800)])
def test_wall_clock_times(text: str, seconds: float) -> None:
    assert parse_time(text) == seconds


def test_a_run_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Run().seed = 2  # type: ignore[misc]


def test_flatten_is_the_inverse_of_build() -> None:
    run = run_with(model__n_layer=3, optim__lr=0.5)
    assert build(flatten(run)) == run
