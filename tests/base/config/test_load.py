"""Load recipes: origins, presets, rendering, and what a resume may change."""

import random
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from megatoken.base.config.load import (
    format_value,
    list_changes,
    list_recipes,
    load_config,
    read_recipe,
    render,
    resolve,
)
from megatoken.base.config.presets import PRESETS
from megatoken.base.config.schema import FIELDS, DataConfig
from megatoken.base.config.setting_names import OTHER_NAMES
from megatoken.base.errors import ConfigError
from megatoken.base.rooms import REGISTERED

RECIPE = """\
model:
  preset: gpt2-124m
  n_layer: 2
data: {path: somewhere}
budget:
  steps: 10
  batch_tokens: 2048
"""


def write(folder: Path, text: str) -> str:
    path = folder / "r.yaml"
    path.write_text(text)
    return str(path)


def test_values_keep_their_origins(tmp_path: Path):
    path = write(tmp_path, RECIPE)
    resolved = resolve(path, ["optim.lr=1e-3", "model.n_layer=3", "budget.tokens=1e6"])
    budget = resolved.config.budget
    assert (resolved.config.model.n_layer, budget.steps, budget.tokens) == (3, 0, 1_000_000)
    origins = {
        "model.n_layer": "command line",
        "model.d_model": "preset gpt2-124m",
        "data.path": f"{path}:4",
        "budget.steps": "default",
        "seed": "default",
    }
    assert origins.items() < resolved.origins.items()
    (tmp_path / "config.yaml").write_text(render(resolved.config, resolved.origins))
    assert resolve(str(tmp_path)).origins == resolved.origins


@pytest.mark.parametrize("recipe", list_recipes())
def test_a_preset_override_replaces_sizes_and_switches(recipe: str):
    batch = ["budget.batch_start=0", "budget.batch_ramp=0", "budget.batch_tokens=2621440"]
    assert {each.key for each in read_recipe(list_recipes()[recipe])} <= FIELDS.keys()
    vocab_size = resolve(recipe).config.model.vocab_size
    for name in random.Random(recipe).sample([*PRESETS], 9):
        preset, resolved = PRESETS[name], resolve(recipe, [f"model.preset={name}", *batch])
        model = resolved.config.model
        excluded = {"vocab_size": 0, "value_head": False}
        architecture = model.resolve(preset.vocab_size).architecture()
        assert architecture | excluded == preset.architecture() | excluded, name
        assert model.vocab_size in (vocab_size, preset.vocab_size)
        assert resolved.origins["model.n_layer"] == f"preset {name}"
    shallow = resolve(recipe, ["model.n_layer=3", "model.preset=gpt2-124m", *batch])
    assert shallow.config.model.n_layer == 3


TEXTS = ['a: b # c\n"d"', "*.npy", "-", "---", "\U0001f600", "a\u2028b\x85\x7f\ufeff\0", "\udc80"]


@pytest.mark.parametrize("null", ["null", "~", ""])
def test_null_is_no_value(tmp_path: Path, null: str):
    text = f"model: {{init: {null}}}\ndata:\n  path: {null}\nsample: {null}\n"
    text += f"budget: {{steps: 1, tokens: {null}}}\nsave: {{mirror: 'null'}}\n"
    config = resolve(write(tmp_path, text)).config
    assert (config.model.init, config.data, config.budget.tokens) == ("", DataConfig(), 0)
    assert config.save.mirror == "null"


@pytest.mark.parametrize("text", [*TEXTS, "#", "", "x" * 300, "?", "Null"])
def test_rendered_config_loads_again(tmp_path: Path, text: str):
    """An origin with several lines is rendered as a comment, too."""
    folder = tmp_path / "two\nlines: \udc80"
    folder.mkdir()
    overrides = [f"data.path={text}", f"sample.prompt={text}", "optim.lr=1e-05", "log.every=3"]
    resolved = resolve(write(folder, RECIPE), overrides)
    rendered = render(resolved.config, resolved.origins)
    assert resolve(write(tmp_path, rendered)).config == resolved.config


@given(st.text(st.characters(codec=None)))
def test_any_text_is_read_back_from_yaml(text: str):
    node = yaml.compose(f"key: {format_value(text)}  # a comment\n")
    assert node.value[0][1].value == text


# Brown et al. 2020, table 2.1: learning rate, and batch in units of 1,024 tokens.
GPT3 = """\
gpt3-125m 6e-4 512
gpt3-350m 3e-4 512
gpt3-760m 2.5e-4 512
gpt3-1.3b 2e-4 1024
gpt3-2.7b 1.6e-4 1024
gpt3-6.7b 1.2e-4 2048
gpt3-13b 1e-4 2048
gpt3-175b 0.6e-4 3072
"""


@pytest.mark.parametrize("row", GPT3.splitlines())
def test_gpt3_recipes_are_the_papers(row: str):
    name, lr, batch = row.split()
    config = resolve(name).config
    optim, budget = config.optim, config.budget
    assert (optim.lr, budget.batch_tokens) == (float(lr), int(batch) * 1024)
    assert (optim.beta1, optim.beta2, optim.eps) == (0.9, 0.95, 1e-8)
    assert (optim.grad_clip, optim.weight_decay, optim.min_lr_ratio) == (1.0, 0.1, 0.1)
    assert (str(optim.warmup), str(optim.decay)) == ("375000000tok", "260000000000tok")
    assert (budget.tokens, budget.batch_start) == (300_000_000_000, 32_768)
    assert 4_000_000_000 <= budget.batch_ramp <= 12_000_000_000
    assert config.model.preset == name


def test_other_names_of_settings_lead_to_ours():
    names = yaml.safe_load(OTHER_NAMES.read_text())
    assert {text.partition(" ")[0] for text in names.values()} <= FIELDS.keys()
    assert not names.keys() & {key.rpartition(".")[2] for key in FIELDS}


@pytest.mark.parametrize(
    "overrides",
    [
        "optim.name=adamw optim.matrix_lr=0.03",
        "optim.schedule=constant optim.decay=0.5dur",
        "objective.name=sft data.document_mask=true",
        "objective.name=dpo objective.group=4",
        "model.window=0 model.window_pattern=SL",
        "model.pos_emb=learned model.rope_theta=1000",
        "evaluate.every=0 evaluate.patience=3",
    ],
)
def test_ignored_overrides_are_refused(overrides: str, tmp_path: Path):
    cause, ignored = overrides.split()
    resolved = resolve("quickstart", [cause])
    with pytest.raises(ConfigError, match=ignored.partition("=")[0]):
        resolve("quickstart", [cause, ignored])
    rendered = render(resolved.config, resolved.origins)
    assert resolve(write(tmp_path, rendered)).config == resolved.config


def changes(old: str, new: str) -> list[tuple[str, str]]:
    """Return the changes between overrides of the same recipe, and what a resume may do."""
    configs = (load_config("quickstart", *overrides.split()) for overrides in (old, new))
    return [(str(change), change.resume) for change in list_changes(*configs)]


def test_conditions_name_settings_and_values():
    for spec in FIELDS.values():
        cause, _, values = spec.only_if.replace("!", "").partition("=")
        if cause:
            choices = FIELDS[cause].choices
            assert not choices or set(values.split("|")) <= set(choices), spec.key


def test_registered_choices_satisfy_every_condition(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(REGISTERED, "optimizer", {"mine": None})
    config = load_config("quickstart", "optim.name=mine", "optim.matrix_lr=0.5")
    assert config.optim.matrix_lr == 0.5


def test_changes_are_listed_with_what_a_resume_may_do():
    overrides = "optim.lr=1e-4 data.path=/moved machine.micro_batch=1 seed=1"
    assert changes("optim.lr=3e-3", overrides) == [
        ("seed: 1337 -> 1", "fatal"),
        ("data.path: data/python -> /moved", "free"),
        ("optim.lr: 0.003 -> 0.0001", "guarded"),
        ("machine.micro_batch: auto -> 1", "free"),
    ]
    # Redacted secrets do not count as a change.
    assert not changes("sample.prompt=https://***@host", "sample.prompt=https://user:word@host")


def test_a_resume_may_leave_out_initial_weights():
    assert not changes("model.init=a", "")
    for old, shown in (("model.init=a", "a"), ("", '""')):
        ((change, _),) = changes(old, "model.init=b")
        assert change == f"model.init: {shown} -> b"
