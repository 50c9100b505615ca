"""Malformed recipes and overrides exit with 2 and one line, before anything is written.

Each lists parts that its error must contain.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatoken.base.config.fields import ConfigField, Duration
from megatoken.base.config.schema import FIELDS
from megatoken.base.errors import ExitCode
from megatoken.cli.arguments import build_parser
from megatoken.cli.main import main

PARSER = build_parser("train")
GOOD = (
    b"data: {path: nowhere}\nbudget: {steps: 1, batch_tokens: 1024}\nmodel: {preset: gpt2-124m}\n"
)


# A recipe, arguments of `megatoken train`, and parts of the error. FILE: the recipe's path.
Cases = Iterator[tuple[bytes, list[str], tuple[str, ...]]]


def misspelled_fields() -> Cases:
    """Write the last letter of every field's name twice."""
    for key in FIELDS:
        yield GOOD, ["FILE", f"{key}{key[-1]}=1"], ("command line", f"'{key}'")


def list_wrong_values(spec: ConfigField) -> list[str]:
    """Return values that the field cannot have."""
    if spec.choices:
        return ["nonsense"]
    if spec.type is str:
        return []
    if spec.type is bool:
        return ["maybe"]
    wrong = {Duration: ["5 bananas", "nan"], int: ["1.5", "2e999"], float: ["nan", "inf", "fast"]}
    below = ["-7"] if spec.low >= 0 else []
    above = ["1e300"] if spec.high < 1e300 else []
    return [*wrong[spec.value_type], *below, *above]


def wrong_values() -> Cases:
    for key, spec in FIELDS.items():
        for value in list_wrong_values(spec):
            section, _, name = key.rpartition(".")
            lines = f"{section}:\n  {name}: {value}\n" if section else f"\n{name}: {value}\n"
            yield lines.encode(), ["FILE"], ("FILE:2", key)
            yield GOOD, ["FILE", f"{key}={value}"], ("command line", key)


BROKEN_YAML = {  # text -> the line at fault; 0 if not known
    "": 0,
    "- a\n- b\n": 1,
    "model:\n\tn_layer: 3\n": 2,
    "model:\n  n_layer: 3\n n_head: 2\n": 3,
    "model:\n  n_layer:3\n": 1,
    "data:\n  path: 'x\n": 0,
    "model: {n_layer: 3\n": 0,
    "%model: 3\n": 1,
    "seed: 1\n---\nseed: 2\n": 2,
    "model:\n  n_layer: 2\n  n_layer: 3\n": 3,
    "model: {n_layer: 2}\nmodel: {n_layer: 3}\n": 2,
    "model: &m {n_layer: 2}\noptim:\n  <<: *m\n": 1,
    "seed: *nowhere\n": 1,
    "a0: &a0 [x]\na1: [*a0, *a0]\n": 1,
    "seed: !!python/object/apply:os.system ['touch canary']\n": 1,
    "? [1, 2]\n: 3\n": 1,
    "model:\n  n_layer: [3, 4]\n": 2,
    "model:\n  gpt:\n    n_layer: 3\n": 3,
    "model: " + "{a: " * 3000 + "1" + "}" * 3000: 0,
    "[" * 100_000: 0,
    '"": 3\n': 1,
    "x" * 1000 + ": 3\n": 1,
    "model:\n  n_layer: " + "9" * 5000 + "\n": 2,
    '"model\\nn_layer": 3\n': 1,
    "version: 1\n": 1,
    "optim:\n  lr: 6e\u22124\n": 2,
    "budget:\n  tokens: 10,000\n": 2,
    "seed: 0x10\n": 1,
    "[model]\nn_layer = 3\n": 0,
    "seed: \x07\n": 0,
    "budget:\n  steps: 5\n  tokens: 1e9\n": 3,
    "model:\n  pos_emb: rotary\n  n_head: 12\n  d_model: 36\nbudget: {steps: 1}\n": 3,
}


def broken_yaml() -> Cases:
    for recipe, line in BROKEN_YAML.items():
        yield recipe.encode(), ["FILE"], (f"FILE:{line}",) if line else ()
    for data in (
        "data: {path: na\u00efve}\n".encode("latin-1"),
        "seed: 1\n".encode("utf-16"),
        b"seed: \x00\n",
        bytes(range(256)) * 8,
        b"data: {path: \xf0\x9f\x98",
        b"seed: 1\n" * (1 << 18),  # 2 MiB
    ):
        yield data, ["FILE"], ("FILE",)


WRONG_OVERRIDES = """
    a.b=c model.=1 n_layers=3 model=3 MODEL.N_LAYR=3 model.n_layer= model.n_layer=12tok
    optim.lr=1e-3tok optim.warmup=0.1 budget.tokens=3ep budget.tokens=300steps budget.steps=1000tok
    save.time_limit=soon seed=99999999999999999999 budget.batch_tokens=1000 machine.micro_batch=5
    model.n_head=7 model.preset=gpt5 optim.decay=1.5dur
"""


def wrong_overrides() -> Cases:
    for argument in (*WRONG_OVERRIDES.split(), "save.every=10 minutes"):
        yield GOOD, ["FILE", argument], (argument.partition("=")[0], "command line")
    for argument in ("--model.n_layer=3", "model.n_layer", "=3", "-lr"):
        yield GOOD, ["FILE", argument], (argument,)
    for argument in ("data.path=nothing://bucket/data", "save.mirror=nothing://bucket/run"):
        yield GOOD, ["FILE", argument], ("nothing",)
    yield GOOD, ["FILE", "data.path=s3://KEY:a-secret@bucket/data"], ("s3://***@bucket/data",)


def wrong_names() -> Cases:
    near = {
        "quikstart": "quickstart",
        "gpt2-xl": "gpt2-1558m",
        "gpt2-124": "gpt2-124m",
        "llama3-8b": "model.preset",
    }
    for name, suggestion in near.items():
        yield GOOD, [name], (name, suggestion)
    for name in ("nowhere/x.yaml", ".", "", "x" * 300, "/dev/null/x", "a\0b", "a\nb"):
        yield GOOD, [name], ()


@pytest.mark.long
@pytest.mark.fault(42, 51)
@pytest.mark.parametrize(
    "kind", [misspelled_fields, wrong_values, broken_yaml, wrong_overrides, wrong_names]
)
def test_bad_configs_exit_with_one_line(
    kind: Callable[[], Cases],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(tmp_path)
    # Building it takes most of the time.
    monkeypatch.setattr("megatoken.cli.arguments.build_parser", lambda _: PARSER)
    recipe = tmp_path / "r.yaml"
    for content, arguments, says in kind():
        recipe.write_bytes(content)
        words = [argument.replace("FILE", str(recipe)) for argument in arguments]
        code = main(["train", *words])
        out, err = capsys.readouterr()
        assert (code, out, err.count("\n")) == (ExitCode.CONFIG, "", 1), (content, words, err)
        assert err.startswith("error: ")
        assert all(part.replace("FILE", str(recipe)) in err for part in says), (says, err)
        assert [path.name for path in tmp_path.iterdir()] == ["r.yaml"], (content, words)
