"""Recipes: every value has an origin, every mistake a line."""

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
from megatoken.config.schema import DataConfig
from megatoken.errors import ExitCode, MegatokenError

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


def test_origins(tmp_path: Path) -> None:
    path = write(tmp_path, RECIPE)
    resolved = resolve(path, ["optim.lr=1e-3", "model.n_layer=3"])
    assert resolved.config.model.n_layer == 3
    assert resolved.origins["model.n_layer"] == "command line"
    assert resolved.origins["model.d_model"] == "preset gpt2-124m"
    assert resolved.origins["data.path"] == f"{path}:4"
    assert resolved.origins["seed"] == "default"


@pytest.mark.parametrize("recipe", list_recipes())
def test_a_preset_on_the_command_line_replaces_every_size_and_switch_of_a_recipe(
    recipe: str,
) -> None:
    batch = (
        "budget.batch_start=0",
        "budget.batch_ramp=0",
        "budget.batch_tokens=524288",
    )  # of whole contexts
    for name, preset in PRESETS.items():
        resolved = resolve(recipe, [f"model.preset={name}", *batch])
        model, vocab_size = resolved.config.model, resolve(recipe).config.model.vocab_size
        found = model.resolve(preset.vocab_size).architecture()
        not_of_it = {"vocab_size": 0, "value_head": False}
        assert found | not_of_it == preset.architecture() | not_of_it, name
        assert model.vocab_size in (vocab_size, preset.vocab_size)
        assert resolved.origins["model.n_layer"] == f"preset {name}"
    shorter = resolve(recipe, ["model.n_layer=3", "model.preset=gpt2-124m", *batch])
    assert shorter.config.model.n_layer == 3  # the command line's own


@pytest.mark.parametrize("null", ["null", "~", ""])
def test_null_is_no_value(tmp_path: Path, null: str) -> None:
    text = f"model: {{init: {null}}}\ndata:\n  path: {null}\nsample: {null}\nbudget: {{steps: 1, tokens: {null}}}\n"
    resolved = resolve(write(tmp_path, text + "save: {mirror: 'null'}\n"))
    config = resolved.config
    assert (config.model.init, config.data, config.budget.tokens, config.save.mirror) == (
        "",
        DataConfig(),
        0,
        "null",
    )
    assert resolved.origins["data.path"] == "default"


def test_rendered_config_loads_again(tmp_path: Path) -> None:
    words = [
        'sample.prompt=a: b # c\n"d"',
        "sample.every=1",
        "save.time_limit=90m",
        "optim.lr=1e-05",
    ]
    resolved = resolve(write(tmp_path, RECIPE), words)
    again = resolve(write(tmp_path, render(resolved.config, resolved.origins)))
    assert again.config == resolved.config


@pytest.mark.parametrize(
    "text",
    [
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
def test_any_text_is_rendered_so_that_it_loads_again(tmp_path: Path, text: str) -> None:
    resolved = resolve(
        write(tmp_path, RECIPE), [f"data.path={text}", f"sample.prompt={text}", "sample.every=1"]
    )
    again = resolve(write(tmp_path, render(resolved.config, resolved.origins)))
    assert again.config == resolved.config


@given(st.text(st.characters(codec=None)))
def test_any_text_is_read_back_from_yaml(text: str) -> None:
    node = yaml.compose(f"key: {format_value(text)}  # a comment\n")
    assert node.value[0][1].value == text


def test_origin_is_a_comment_of_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "two\nlines: \udc80"
    folder.mkdir()
    resolved = resolve(write(folder, RECIPE))
    assert (
        resolve(write(tmp_path, render(resolved.config, resolved.origins))).config
        == resolved.config
    )


@pytest.mark.parametrize("name", list_recipes())
def test_shipped_recipes_resolve(name: str) -> None:
    resolved = resolve(name)
    assert resolved.config.data.path
    text = (Path(__file__).parents[2] / "src/megatoken/config/recipes" / f"{name}.yaml").read_text()
    assert "FLOP" in text.split("version:")[0], "a recipe opens with its cost"
    assert "megatoken prepare" in text


# Brown et al. 2020, table 2.1: rate and batch, the latter in units of 1,024 tokens.
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
def test_gpt3_recipes_are_the_papers(name: str) -> None:
    config = resolve(name).config
    optim, budget = config.optim, config.budget
    assert (optim.lr, budget.batch_tokens) == (GPT3[name][0], GPT3[name][1] * 1024)
    assert (optim.beta1, optim.beta2, optim.eps, optim.grad_clip, optim.weight_decay) == (
        0.9,
        0.95,
        1e-8,
        1.0,
        0.1,
    )
    assert (str(optim.warmup), str(optim.decay), optim.min_lr_ratio) == (
        "375000000tok",
        "260000000000tok",
        0.1,
    )
    assert (budget.tokens, budget.batch_start) == (300_000_000_000, 32_768)
    assert 4_000_000_000 <= budget.batch_ramp <= 12_000_000_000
    assert config.model.preset == name


def test_a_preset_with_a_recipe_of_its_own_is_pointed_to() -> None:
    (note,) = resolve("gpt3-1.3b", ["model.preset=gpt3-6.7b"]).notes
    assert note == (
        "optim.lr 0.0002 and budget.batch_tokens 1048576 stay gpt3-1.3b's: the recipe gpt3-6.7b has its own"
    )
    for name, words in (("gpt3-1.3b", ["optim.lr=1e-4"]), ("gpt3-6.7b", [])):
        assert resolve(name, [*words, "model.preset=gpt3-6.7b"]).notes == ()


@pytest.mark.parametrize(
    ("schedule", "decay"), [("cosine", "auto"), ("constant", "auto"), ("wsd", "0.2dur")]
)
def test_the_decay_of_version_1_had_a_meaning_under_wsd_only(
    tmp_path: Path, schedule: str, decay: str
) -> None:
    """Every config.yaml of version 1 gives it; the run goes on at its rates, and a default equals it."""
    text = RECIPE + f"optim:\n  decay: 0.2dur\n  schedule: {schedule}\n"
    old = resolve(write(tmp_path, f"version: 1\n{text}")).config
    assert str(old.optim.decay) == decay
    new = resolve(write(tmp_path, text.replace("  decay: 0.2dur\n", ""))).config
    assert list_changes(old, new) == []
    if schedule != "constant":
        assert str(resolve(write(tmp_path, f"version: 2\n{text}")).config.optim.decay) == "0.2dur"


def test_recipe_names() -> None:
    promised = {"quickstart", "shakespeare", *(p for p in PRESETS if p.startswith("gpt2"))}
    promised |= {*GPT3, "llama-5m", "llama-110m", "finetune", "sft"}
    assert promised <= set(list_recipes())


def test_override_replaces_the_length_of_the_run(tmp_path: Path) -> None:
    run = resolve(write(tmp_path, RECIPE), ["budget.tokens=1e6"]).config
    assert (run.budget.steps, run.budget.tokens) == (0, 1_000_000)


@pytest.mark.parametrize(
    ("text", "output"),
    [
        (
            "model:\n  n_layers: 3\n",
            "unknown key 'model.n_layers' — {}:2 — did you mean 'model.n_layer'?",
        ),
        (
            "modle:\n  n_layer: 3\n",
            "unknown key 'modle.n_layer' — {}:2 — did you mean 'model.n_layer'?",
        ),
        ("lr: 3\n", "unknown key 'lr' — {}:1 — did you mean 'optim.lr'?"),
        ("model:\n  n_layer: x\n", "model.n_layer: expected a whole number, got 'x' — {}:2"),
        (
            "model:\n  n_layer: [1]\n",
            "model.n_layer is neither a value nor a section of field: value lines — {}:2",
        ),
        (
            "model:\n  n_layer: 2\n  n_layer: 3\n",
            "key 'model.n_layer' is given twice — {}:3 — first given at {}:2",
        ),
        ("model: 3\n", "model is a section, got '3' — {}:1 — write `field: value` lines below it"),
        ("- a\n", "the recipe is neither a value nor a section of field: value lines — {}:1"),
        ("model:\n  n_layer: 'a\n", "not valid YAML"),
        ("a: &x 1\nb: *x\n", "not valid YAML: tags, anchors and aliases are not read — {}:1"),
        (
            "seed: !!python/object/apply:os.system ['true']\n",
            "not valid YAML: tags, anchors and aliases are not read — {}:1",
        ),
        (
            "version: 9\nmodel:\n  n_layer: 1\n",
            "recipe is of version 9, this megatoken reads versions 1 and 2 — {}:1",
        ),
        ("\tmodel: 1\n", "not valid YAML"),
        ("? [1]\n: 2\n", "the recipe is neither a value nor a section"),
        ("model:\n  d_model: 100\n", "model.n_head: 12 heads do not divide d_model 100"),
        ("model:\n  seq_len: 1000\n", "batch_tokens 524288 is not a multiple of seq_len 1000"),
        ("", "budget.steps: no length given"),
    ],
)
def test_mistakes_name_file_and_line(tmp_path: Path, text: str, output: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(MegatokenError) as error:
        resolve(path)
    assert error.value.code == ExitCode.CONFIG
    assert output.replace("{}", path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("data", [b"\xff\xfe\x00", b"\x00", b"a" * (2 << 20), b"[" * 100_000])
def test_invalid_yaml_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(data)
    with pytest.raises(MegatokenError) as error:
        resolve(str(path))
    assert error.value.code == ExitCode.CONFIG


def test_unknown_recipe_suggests_the_nearest() -> None:
    with pytest.raises(MegatokenError, match=r"did you mean 'quickstart'"):
        resolve("quikstart")
    with pytest.raises(MegatokenError, match=r"no recipe named 'nowhere/x\.yaml'"):
        resolve("nowhere/x.yaml")
    with pytest.raises(MegatokenError, match=r"cannot read recipe: File name too long"):
        resolve("x" * 256)


def test_override_mistakes() -> None:
    with pytest.raises(
        MegatokenError,
        match=r"unknown key 'modle.n_layer' — command line — did you mean 'model.n_layer'",
    ):
        resolve("quickstart", ["modle.n_layer=3"])
    with pytest.raises(MegatokenError, match="cannot read override 'fast'"):
        resolve("quickstart", ["fast"])


def test_changes_are_listed_with_what_a_resume_may_do() -> None:
    old = resolve("quickstart", ["optim.lr=3e-3"]).config
    new = resolve(
        "quickstart", ["optim.lr=1e-4", "data.path=/moved", "machine.micro_batch=1", "seed=1"]
    ).config
    assert [(str(change), change.resume) for change in list_changes(old, new)] == [
        ("seed: 1337 -> 1", "fatal"),
        ("data.path: data/python -> /moved", "free"),  # the same data may lie elsewhere
        ("optim.lr: 0.003 -> 0.0001", "guarded"),
        ("machine.micro_batch: auto -> 1", "free"),
    ]


def test_a_secret_that_the_run_folder_does_not_hold_is_no_change() -> None:
    old = load_config("quickstart", "sample.prompt=see https://***@host")
    new = load_config("quickstart", "sample.prompt=see https://user:password@host")
    assert list_changes(old, new) == []


def test_initial_weights_of_a_resume_may_be_left_out_but_not_be_others() -> None:
    old, new, other = (load_config("quickstart", f"model.init={name}") for name in ("a", "", "b"))
    assert list_changes(old, new) == []
    assert [str(change) for change in list_changes(old, other)] == ["model.init: a -> b"]
    assert [str(change) for change in list_changes(new, other)] == ['model.init: "" -> b']


def test_old_and_new_name_of_a_field_together_are_refused(tmp_path: Path) -> None:
    recipe = write(tmp_path, "optim:\n  floor: 0.1\n  min_lr_ratio: 0.2\n")
    with pytest.raises(
        MegatokenError, match=r"key 'optim.min_lr_ratio' is given twice .* first given at .*:2"
    ):
        resolve(recipe)


def test_load_config_warns_of_an_old_name() -> None:
    with pytest.warns(UserWarning, match=r"optim.floor is now called optim.min_lr_ratio"):
        assert load_config("quickstart", "optim.floor=0.1").optim.min_lr_ratio == 0.1
