"""Settings that differ between two starts of a run: free, guarded or fatal, field by field."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any, get_args

import pytest

from megatoken.base.config.fields import ConfigField, Duration, Resume
from megatoken.base.config.load import list_changes
from megatoken.base.config.schema import FIELDS, Config, build_config, flatten, resume_class
from megatoken.base.errors import ConfigError, DataError
from megatoken.base.rooms import REGISTERED
from megatoken.cli.train import describe_fields
from megatoken.store.run_folder import check_changes
from tests.tiny_run import TEXT, read_column, read_events, train, write_shards

OLD = build_config({"budget.steps": 10, "data.path": "data"})
# Weights, the optimizer's state or the order of the data would not fit.
FATAL = {"seed", "data.tokenizer", "optim.name", "objective.name"}
FATAL |= {f"budget.batch_{name}" for name in ("tokens", "start", "ramp")}
FATAL |= {key for key in FIELDS if key.startswith("model.")} - {"model.preset", "model.dropout"}
GUARDED = {key for key in FIELDS if key.startswith(("optim.", "budget.", "objective."))} - FATAL
GUARDED |= {"model.dropout", "data.path", "data.order", "data.document_mask"}


def another(spec: ConfigField, value: Any) -> Any:
    """Return a value of the field's type that is not `value`."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, Duration):
        return Duration(value.value + 1, "steps")
    if isinstance(value, int | float):
        return value + 1
    return next((choice for choice in spec.choices if choice != value), "another")


def with_value(config: Config, key: str, value: Any) -> Config:
    """Return a copy with one value changed, without checking conflicts."""
    return build_config(flatten(config) | {key: value})


def test_every_field_has_the_class_that_fits_it():
    expected = {"fatal": FATAL, "guarded": GUARDED, "free": FIELDS.keys() - FATAL - GUARDED}
    assert expected.keys() == {*get_args(Resume)}
    for resume, keys in expected.items():
        assert {key for key in FIELDS if resume_class(key) == resume} == keys
    help_text = describe_fields()
    assert all(f" {key}=" in help_text for key in FIELDS)


@pytest.mark.long
@pytest.mark.fault(43)
def test_a_change_is_accepted_allowed_or_refused_by_its_class(tmp_path: Path):
    for key, old in flatten(OLD).items():
        (change,) = list_changes(OLD, with_value(OLD, key, another(FIELDS[key], old)))
        assert change.key == key
        # Another dataset is refused when it is opened.
        resume = "free" if key in ("data.path", "model.preset") else resume_class(key)
        for allow, refused in ((False, resume != "free"), (True, resume == "fatal")):
            with pytest.raises(ConfigError) if refused else nullcontext() as error:
                check_changes([change], tmp_path, allow_changes=allow)
            if refused:
                assert str(change) in str(error.value)
                assert ("--allow-changes" in str(error.value)) == (resume == "guarded")


@pytest.mark.parametrize(("key", "resume"), [("weight_decay", "fatal"), ("lr", "guarded")])
def test_numbers_of_a_registered_optimizer_come_from_its_checkpoint(
    monkeypatch: pytest.MonkeyPatch, key: str, resume: str
):
    monkeypatch.setitem(REGISTERED, "optimizer", {"mine": None})
    old = with_value(OLD, "optim.name", "mine")
    (change,) = list_changes(old, with_value(old, f"optim.{key}", 0.5))
    assert change.resume == resume


@pytest.mark.fault(43)
def test_allowed_changes_take_effect_and_are_logged(data: str, tmp_path: Path):
    run = tmp_path / "run"
    short = "budget.steps=4 optim.lr=6e-4 evaluate.every=0"
    longer = f"{short} budget.steps=6 optim.lr=0 log.every=2"
    other = f"{longer} {write_shards(tmp_path / 'data', TEXT[1:] * 300)}"
    train(run, data, short)
    with pytest.raises(ConfigError):
        train(run, data, longer)
    assert train(run, data, longer, allow_changes=True).steps == 6
    changes = [
        (4, "optim.lr", "0.0006", "0.0"),
        (4, "budget.steps", "4", "6"),
        (4, "log.every", "1steps", "2steps"),
    ]
    keys = ("step", "key", "old", "new")
    assert [tuple(e[key] for key in keys) for e in read_events(run, "setting changed")] == changes
    rates = read_column(run, "lr")
    assert rates[4] > 0 == rates[6]
    assert train(run, data, longer).steps == 6  # they are the run's settings now
    # Other data of the same tokenizer.
    with pytest.raises(DataError):
        train(run, other)
    assert train(run, other, "budget.steps=7", allow_changes=True).steps == 7
    changed = [event["key"] for event in read_events(run, "setting changed")]
    assert changed[3:] == ["data.path", "budget.steps", "dataset"]
    with pytest.raises(ConfigError):
        train(run, other, "budget.steps=7 data.tokenizer=gpt2", allow_changes=True)
