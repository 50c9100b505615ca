"""Malformed recipes and overrides exit with 2 and one line, before anything is written."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatoken.cli.arguments import build_parser
from megatoken.cli.main import main
from megatoken.errors import ExitCode
from tests.config.bad_configs import KINDS, BadConfig

PARSER = build_parser("train")


@pytest.mark.fault(42, 51)
@pytest.mark.parametrize("kind", KINDS)
def test_bad_configs_exit_with_one_line(
    kind: Callable[[], Iterator[BadConfig]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(tmp_path)
    # Building it takes most of the time.
    monkeypatch.setattr("megatoken.cli.arguments.build_parser", lambda _: PARSER)
    recipe = tmp_path / "r.yaml"
    for case in kind():
        recipe.write_bytes(case.recipe)
        words = [str(recipe) if word == "RECIPE" else word for word in case.words]
        code = main(["train", *words])
        out, err = capsys.readouterr()
        assert (code, out, err.count("\n")) == (ExitCode.CONFIG, "", 1), (case, err)
        assert err.startswith("error: ")
        assert all(part.replace("FILE", str(recipe)) in err for part in case.says), (case, err)
        assert [path.name for path in tmp_path.iterdir()] == ["r.yaml"], case
