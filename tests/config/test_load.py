"""Load recipes: origins, presets, rendering, and what a resume may change."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from megatoken.config.load import (
    format_value,
    list_changes,
    list_recipes,
    load_config,
    render,
    resolve,
)
from megatoken.config.presets import PRESETS
from megatoken.config.schema import FIELDS, DataConfig
from megatoken.config.words import WORDS
from megatoken.errors import ConfigError

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
    assert resolved.config.model.n_layer == 3
    assert (resolved.config.budget.steps, resolved.config.budget.tokens) == (0, 1_000_000)
    origins = {
        "model.n_layer": "command line",
        "model.d_model": "preset gpt2-124m",
        "data.path": f"{path}:4",
        "budget.steps": "default",
        "seed": "default",
    }
    assert {key: resolved.origins[key] for key in origins} == origins
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(render(resolved.config, resolved.origins))
    assert resolve(str(run)).origins == resolved.origins


@pytest.mark.parametrize("recipe", list_recipes())
def test_a_preset_override_replaces_sizes_and_switches(recipe: str):
    batch = ["budget.batch_start=0", "budget.batch_ramp=0", "budget.batch_tokens=2621440"]
    vocab_size = resolve(recipe).config.model.vocab_size
    for name, preset in PRESETS.items():
        resolved = resolve(recipe, [f"model.preset={name}", *batch])
        model = resolved.config.model
        excluded = {"vocab_size": 0, "value_head": False}
        architecture = model.resolve(preset.vocab_size).architecture()
        assert architecture | excluded == preset.architecture() | excluded, name
        assert model.vocab_size in (vocab_size, preset.vocab_size)
        assert resolved.origins["model.n_layer"] == f"preset {name}"
    shallow = resolve(recipe, ["model.n_layer=3", "model.preset=gpt2-124m", *batch])
    assert shallow.config.model.n_layer == 3


@pytest.mark.parametrize("null", ["null", "~", ""])
def test_null_is_no_value(tmp_path: Path, null: str):
    text = f"model: {{init: {null}}}\ndata:\n  path: {null}\nsample: {null}\n"
    text += f"budget: {{steps: 1, tokens: {null}}}\nsave: {{mirror: 'null'}}\n"
    config = resolve(write(tmp_path, text)).config
    assert (config.model.init, config.data, config.budget.tokens) == ("", DataConfig(), 0)
    assert config.save.mirror == "null"


@pytest.mark.parametrize(
    "text",
    [
        'a: b # c\n"d"',
        "*.npy",
        "-",
        "---",
        "\U0001f600",
        "a\u2028b\x85\x7f\ufeff\0",
        "\udc80",
        "#",
        "",
        "x" * 300,
        "?",
        "Null",
    ],
)
def test_rendered_config_loads_again(tmp_path: Path, text: str):
    words = [f"data.path={text}", f"sample.prompt={text}", "optim.lr=1e-05", "log.every=3"]
    resolved = resolve(write(tmp_path, RECIPE), words)
    rendered = render(resolved.config, resolved.origins)
    assert resolve(write(tmp_path, rendered)).config == resolved.config


@given(st.text(st.characters(codec=None)))
def test_any_text_is_read_back_from_yaml(text: str):
    node = yaml.compose(f"key: {format_value(text)}  # a comment\n")
    assert node.value[0][1].value == text


def test_an_origin_is_a_comment_of_one_line(tmp_path: Path):
    folder = tmp_path / "two\nlines: \udc80"
    folder.mkdir()
    resolved = resolve(write(folder, RECIPE))
    rendered = render(resolved.config, resolved.origins)
    assert resolve(write(tmp_path, rendered)).config == resolved.config


# Brown et al. 2020, table 2.1: learning rate, and batch in units of 1,024 tokens.
GPT3 = {
    "gpt3-125m": (6e-4, 512),
    "gpt3-350m": (3e-4, 512),
    "gpt3-760m": (2.5e-4, 512),
    "gpt3-1.3b": (2e-4, 1024),
    "gpt3-2.7b": (1.6e-4, 1024),
    "gpt3-6.7b": (1.2e-4, 2048),
    "gpt3-13b": (1e-4, 2048),
    "gpt3-175b": (0.6e-4, 3072),
}


@pytest.mark.parametrize("name", GPT3)
def test_gpt3_recipes_are_the_papers(name: str):
    config = resolve(name).config
    optim, budget = config.optim, config.budget
    assert (optim.lr, budget.batch_tokens) == (GPT3[name][0], GPT3[name][1] * 1024)
    assert (optim.beta1, optim.beta2, optim.eps) == (0.9, 0.95, 1e-8)
    assert (optim.grad_clip, optim.weight_decay, optim.min_lr_ratio) == (1.0, 0.1, 0.1)
    assert (str(optim.warmup), str(optim.decay)) == ("375000000tok", "260000000000tok")
    assert (budget.tokens, budget.batch_start) == (300_000_000_000, 32_768)
    assert 4_000_000_000 <= budget.batch_ramp <= 12_000_000_000
    assert config.model.preset == name


def test_words_of_other_tools_name_settings():
    words = yaml.safe_load(WORDS.read_text())
    assert {text.partition(" ")[0] for text in words.values()} <= FIELDS.keys()
    assert not words.keys() & {key.rpartition(".")[2] for key in FIELDS}


@pytest.mark.parametrize(
    ("name", "text", "fix"),
    [
        ("a.py", "n_layer = 2\n", "--nanogpt"),
        ("a.toml", "[model]\nname = 'llama3'\n", "TOML"),
        ("a.yaml", "model: {name: mpt_causal_lm}\nmax_seq_len: 2048\n", "--composer"),
        ("a.yaml", "train_loader:\n  dataset: {}\noptimizer: {betas: [0.9, 0.95]}\n", "--composer"),
    ],
)
def test_recipes_of_other_programs_are_named(tmp_path: Path, name: str, text: str, fix: str):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=fix):
        load_config(path)


@pytest.mark.parametrize(
    "words",
    [
        ["optim.name=adamw", "optim.matrix_lr=0.03"],
        ["optim.schedule=constant", "optim.decay=0.5dur"],
        ["objective.name=sft", "data.document_mask=true"],
        ["objective.name=dpo", "objective.group=4"],
        ["model.window=0", "model.window_pattern=SL"],
        ["model.pos_emb=learned", "model.rope_theta=1000"],
        ["evaluate.every=0", "evaluate.patience=3"],
    ],
)
def test_ignored_overrides_are_refused(words: list[str], tmp_path: Path):
    resolved = resolve("quickstart", words[:1])
    with pytest.raises(ConfigError, match=words[1].partition("=")[0]):
        resolve("quickstart", words)
    rendered = render(resolved.config, resolved.origins)
    assert resolve(write(tmp_path, rendered)).config == resolved.config


def test_conditions_name_settings_and_values():
    for spec in FIELDS.values():
        cause, _, values = spec.only_if.replace("!", "").partition("=")
        if cause:
            choices = FIELDS[cause].choices
            assert not choices or set(values.split("|")) <= set(choices), spec.key


def test_registered_choices_satisfy_every_condition(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("megatoken.config.fields._REGISTERED", {"optim.name": ["mine"]})
    config = load_config("quickstart", "optim.name=mine", "optim.matrix_lr=0.5")
    assert config.optim.matrix_lr == 0.5


def test_changes_are_listed_with_what_a_resume_may_do():
    old = load_config("quickstart", "optim.lr=3e-3")
    words = ["optim.lr=1e-4", "data.path=/moved", "machine.micro_batch=1", "seed=1"]
    new = load_config("quickstart", *words)
    assert [(str(change), change.resume) for change in list_changes(old, new)] == [
        ("seed: 1337 -> 1", "fatal"),
        ("data.path: data/python -> /moved", "free"),
        ("optim.lr: 0.003 -> 0.0001", "guarded"),
        ("machine.micro_batch: auto -> 1", "free"),
    ]


def test_redacted_secrets_are_no_change():
    old = load_config("quickstart", "sample.prompt=see https://***@host")
    new = load_config("quickstart", "sample.prompt=see https://user:password@host")
    assert list_changes(old, new) == []


def test_a_resume_may_leave_out_initial_weights():
    old, new, other = (load_config("quickstart", f"model.init={name}") for name in ("a", "", "b"))
    assert list_changes(old, new) == []
    assert [str(change) for change in list_changes(old, other)] == ["model.init: a -> b"]
    assert [str(change) for change in list_changes(new, other)] == ['model.init: "" -> b']
