"""Recipes: every value has an origin, every mistake a line."""

from pathlib import Path

import pytest

from megatoken.errors import Exit, Fault
from megatoken.presets import PRESETS
from megatoken.recipe import list_recipes, render, resolve, science_changes

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
    assert resolved.run.model.n_layer == 3
    assert resolved.origins["model.n_layer"] == "command line"
    assert resolved.origins["model.d_model"] == "preset gpt2-124m"
    assert resolved.origins["data.path"] == f"{path}:4"
    assert resolved.origins["seed"] == "default"


def test_a_rendered_run_is_a_recipe_again(tmp_path: Path) -> None:
    resolved = resolve(
        write(tmp_path, RECIPE), ['sample.prompt=a: b # c\n"d"', "save.time_limit=90m", "optim.lr=1e-05"]
    )
    again = resolve(write(tmp_path, render(resolved.run, resolved.origins)))
    assert again.run == resolved.run


@pytest.mark.parametrize("name", list_recipes())
def test_shipped_recipes_are_sound(name: str) -> None:
    resolved = resolve(name)
    assert resolved.run.data.path
    text = (Path(__file__).parents[1] / "src/megatoken/recipes" / f"{name}.yaml").read_text()
    assert "FLOP" in text.split("version:")[0], "a recipe opens with its cost"
    assert "megatoken prepare" in text


def test_the_promised_recipes_are_there() -> None:
    promised = {"quickstart", "shakespeare", *(p for p in PRESETS if p.startswith("gpt2"))}
    promised |= {"gpt3-125m", "gpt3-350m", "gpt3-760m", "gpt3-1.3b", "llama-5m", "llama-110m"}
    assert promised <= set(list_recipes())


def test_a_later_layer_replaces_the_length_of_an_earlier_one(tmp_path: Path) -> None:
    run = resolve(write(tmp_path, RECIPE), ["budget.tokens=1e6"]).run
    assert (run.budget.steps, run.budget.tokens) == (0, 1_000_000)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model:\n  n_layers: 3\n", "unknown key 'model.n_layers' — {}:2 — did you mean 'model.n_layer'?"),
        ("modle:\n  n_layer: 3\n", "unknown section 'modle' — {}:1 — did you mean 'model'?"),
        ("lr: 3\n", "unknown key 'lr' — {}:1 — did you mean 'optim.lr'?"),
        ("model:\n  n_layer: x\n", "model.n_layer: expected a whole number, got 'x' — {}:2"),
        ("model:\n  n_layer: [1]\n", "model.n_layer: expected a whole number, got a list or section — {}:2"),
        ("model:\n  n_layer: 2\n  n_layer: 3\n", "key 'model.n_layer' is given twice — {}:3 — first given at {}:2"),
        ("model: 3\n", "'model' is a section, not a value — {}:1"),
        ("- a\n", "the recipe is not a section of key: value lines — {}:1"),
        ("model:\n  n_layer: 'a\n", "not valid YAML"),
        ("a: &x 1\nb: *x\n", "YAML tags, anchors and aliases are not read — {}:1"),
        ("seed: !!python/object/apply:os.system ['true']\n", "YAML tags, anchors and aliases are not read — {}:1"),
        ("version: 9\nmodel:\n  n_layer: 1\n", "recipe is of version 9, this megatoken reads version 1 — {}:1"),
        ("\tmodel: 1\n", "not valid YAML"),
        ("? [1]\n: 2\n", "a key must be a plain word"),
        ("model:\n  d_model: 100\n", "model.n_head: 12 heads do not divide d_model 100"),
        ("model:\n  seq_len: 1000\n", "batch_tokens 524288 is not a multiple of seq_len 1000"),
        ("", "budget.steps: no length given"),
    ],
)
def test_mistakes_name_file_and_line(tmp_path: Path, text: str, said: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(Fault) as fault:
        resolve(path)
    assert fault.value.code == Exit.CONFIG
    assert said.replace("{}", path) in str(fault.value)
    assert "\n" not in str(fault.value)


@pytest.mark.parametrize("data", [b"\xff\xfe\x00", b"\x00", b"a" * (2 << 20), b"[" * 100_000])
def test_junk_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(data)
    with pytest.raises(Fault) as fault:
        resolve(str(path))
    assert fault.value.code == Exit.CONFIG


def test_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(Fault, match=r"did you mean 'quickstart'"):
        resolve("quikstart")
    with pytest.raises(Fault, match=r"no recipe file 'nowhere/x\.yaml'"):
        resolve("nowhere/x.yaml")


def test_override_mistakes() -> None:
    with pytest.raises(Fault, match=r"unknown key 'modle.n_layer' — command line — did you mean 'model.n_layer'"):
        resolve("quickstart", ["modle.n_layer=3"])
    with pytest.raises(Fault, match="cannot read override 'fast'"):
        resolve("quickstart", ["fast"])


def test_science_changes_are_told_apart() -> None:
    old = resolve("quickstart", ["optim.lr=3e-3"]).run
    new = resolve("quickstart", ["optim.lr=1e-4", "machine.micro_batch=1", "data.path=/moved", "save.every=7"]).run
    assert science_changes(old, new) == ["optim.lr: 0.003 -> 0.0001"]
