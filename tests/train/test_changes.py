"""Settings that differ between two starts of a run: free, guarded or fatal, field by field."""

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from megatoken.checkpoint.commit import commit
from megatoken.cli.train import describe_fields
from megatoken.config.fields import ConfigField, Duration
from megatoken.config.load import list_changes, render, resolve
from megatoken.config.schema import FIELDS, Config, Resume, build_config, flatten, resume_class
from megatoken.console import Console
from megatoken.errors import ConfigError, DataError, ExitCode
from megatoken.system.metrics_log import read_metrics
from megatoken.train.run_folder import check_folder
from megatoken.train.train import Trainer

OLD = build_config({"budget.steps": 10, "data.path": "data"})
# Weights, the optimizer's state or the order of the data would not fit.
FATAL = {
    "seed",
    "data.tokenizer",
    "optim.name",
    "budget.batch_tokens",
    "budget.batch_start",
    "budget.batch_ramp",
}
FATAL |= {key for key in FIELDS if key.startswith("model.")} - {"model.preset", "model.dropout"}
FATAL.add("objective.name")
GUARDED = {key for key in FIELDS if key.startswith(("optim.", "budget.", "objective."))} - FATAL
GUARDED |= {"model.dropout", "data.path", "data.order", "data.document_mask"}
RECIPE = """\
model: {n_layer: 1, n_head: 2, d_model: 16, seq_len: 16}
data: {path: DATA, tokenizer: bytes}
budget: {steps: 4, batch_tokens: 64}
machine: {device: cpu, precision: fp32, micro_batch: 4, threads: 1}
evaluate: {every: 0}
log: {plots: false}
"""


def another(spec: ConfigField, value: Any) -> Any:
    """A value of the field's type that is not `value`."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, Duration):
        return Duration(value.value + 1, "steps")
    if isinstance(value, int | float):
        return value + 1
    return next((choice for choice in spec.choices if choice != value), "another")


def with_value(config: Config, key: str, value: Any) -> Config:
    """A copy with one value changed, whatever the rules between fields say."""
    section, _, name = key.rpartition(".")
    if not section:
        return dataclasses.replace(config, **{name: value})
    return dataclasses.replace(
        config, **{section: dataclasses.replace(getattr(config, section), **{name: value})}
    )


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one checkpoint of OLD."""
    out = tmp_path_factory.mktemp("run")
    text = render(OLD, dict.fromkeys(FIELDS, "default"))
    commit(out / "checkpoints", 5, {"config.yaml": lambda path: path.write_text(text)}, meta={})
    return out


def test_every_field_has_the_class_that_fits_it() -> None:
    classes: Mapping[str, Resume] = {key: resume_class(key) for key in FIELDS}
    assert set(classes.values()) == set(get_args(Resume))
    assert {key for key in classes if classes[key] == "fatal"} == FATAL
    assert {key for key in classes if classes[key] == "guarded"} == GUARDED
    help_text = describe_fields()
    assert all(f" {key}=" in help_text for key in classes)
    assert "  optim.lr=0.0006              guarded peak learning rate" in help_text


@pytest.mark.fault(43)
@pytest.mark.parametrize("key", FIELDS)
def test_a_change_is_accepted_allowed_or_refused_by_its_class(run_folder: Path, key: str) -> None:
    old = flatten(OLD)[key]
    new = with_value(OLD, key, another(FIELDS[key], old))
    (change,) = list_changes(OLD, new)
    assert change.key == key
    assert change.old != change.new
    by_content = key in (
        "data.path",
        "model.preset",
    )  # another dataset is refused when it is opened
    resume = "free" if by_content else resume_class(key)
    for allow, refused in ((False, resume != "free"), (True, resume == "fatal")):
        if not refused:
            assert check_folder(run_folder, new, allow_changes=allow) == [change]
            continue
        with pytest.raises(ConfigError) as error:
            check_folder(run_folder, new, allow_changes=allow)
        assert f"this run has other settings: {change} — {run_folder} — " in str(error.value)
        assert ("--allow-changes" in str(error.value)) == (resume == "guarded")
        assert ("cannot change in a run" in str(error.value)) == (resume == "fatal")


def test_numbers_of_a_registered_optimizer_come_from_its_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("megatoken.config.fields._REGISTERED", {"optim.name": ["mine"]})
    old = with_value(OLD, "optim.name", "mine")
    assert [c.resume for c in list_changes(old, with_value(old, "optim.weight_decay", 0.5))] == [
        "fatal"
    ]
    assert [c.resume for c in list_changes(old, with_value(old, "optim.lr", 0.5))] == ["guarded"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A recipe and a finished run of 4 steps."""
    folder = tmp_path_factory.mktemp("finished")
    write_data(folder, 0)
    recipe = folder / "tiny.yaml"
    recipe.write_text(RECIPE.replace("DATA", str(folder / "*.npy")))
    assert train(recipe, folder / "run") == 4
    return recipe, folder / "run"


def write_data(folder: Path, shift: int) -> None:
    text = b"to be or not to be, that is the question. " * 20
    ids = np.roll(np.frombuffer(text, dtype=np.uint8).astype(np.uint16), shift)
    np.save(folder / "train_0.npy", ids)


def train(recipe: Path, out: Path, *overrides: str, allow: bool = False) -> int:
    resolved = resolve(str(recipe), overrides)
    return Trainer(resolved, out, console=Console(to_stderr=True), allow_changes=allow).fit().steps


def changes_logged(out: Path) -> list[tuple[int, str, str, str]]:
    events = [row for row in read_metrics(out) if row["kind"] == "event"]
    return [
        (e["step"], e["key"], e["old"], e["new"]) for e in events if e["what"] == "setting changed"
    ]


@pytest.mark.fault(43)
def test_allowed_changes_take_effect_and_are_logged(
    finished: tuple[Path, Path], tmp_path: Path, one_thread: None
) -> None:
    recipe, run = finished
    out = tmp_path / "run"
    shutil.copytree(run, out)
    longer = ("budget.steps=6", "optim.lr=0", "log.every=2")
    with pytest.raises(
        ConfigError, match=r"optim.lr: 0.0006 -> 0.0; budget.steps: 4 -> 6 — .* --allow-changes"
    ):
        train(recipe, out, *longer)
    assert changes_logged(out) == []
    assert train(recipe, out, *longer, allow=True) == 6
    expected = [
        ("optim.lr", "0.0006", "0.0"),
        ("budget.steps", "4", "6"),
        ("log.every", "1steps", "2steps"),
    ]
    assert changes_logged(out) == [(4, *change) for change in expected]
    rates = {row["step"]: row["lr"] for row in read_metrics(out) if row["kind"] == "train"}
    assert rates[4] > 0
    assert rates[6] == 0
    assert train(recipe, out, *longer) == 6  # they are the run's settings now
    assert len(changes_logged(out)) == 3


@pytest.mark.fault(43)
def test_other_data_of_the_same_tokenizer_may_be_allowed(
    finished: tuple[Path, Path], tmp_path: Path, one_thread: None
) -> None:
    recipe, run = finished
    out = tmp_path / "run"
    shutil.copytree(run, out)
    (tmp_path / "data").mkdir()
    write_data(tmp_path / "data", 1)
    other = ("budget.steps=5", f"data.path={tmp_path}/data")
    with pytest.raises(DataError, match=r"was trained on dataset .* --allow-changes"):
        train(recipe, out, other[1])
    assert train(recipe, out, *other, allow=True) == 5
    assert [change[1] for change in changes_logged(out)] == ["data.path", "budget.steps", "dataset"]
    with pytest.raises(
        ConfigError, match=r"data.tokenizer: bytes -> gpt2 .* cannot change"
    ) as error:
        train(recipe, out, *other, "data.tokenizer=gpt2", allow=True)
    assert error.value.code == ExitCode.CONFIG
