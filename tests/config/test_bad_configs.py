"""Malformed recipes, overrides, options and variables end in one line within a second, before data or model."""

from pathlib import Path

import pytest

from megatoken.cli.arguments import build_parser
from megatoken.cli.main import main
from megatoken.errors import ExitCode
from tests.config.bad_configs import KINDS, Kind

PARSER = build_parser("train")


@pytest.mark.fault(42, 51)
@pytest.mark.parametrize("kind", KINDS)
def test_bad_configs_are_refused_in_one_line(
    kind: Kind, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "megatoken.cli.arguments.build_parser", lambda _: PARSER
    )  # which takes most of the time
    recipe = tmp_path / "r.yaml"
    for case in kind():
        recipe.write_bytes(case.recipe)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in case.environment.items():
                patch.setenv(name, value)
            code = main(["train", *case.arguments(str(recipe))])
        out, err = capsys.readouterr()
        assert (code, out) == (ExitCode.CONFIG, ""), (case.name, err)
        assert case.find_mistakes(err, str(recipe)) == [], (case.name, err)
        assert [path.name for path in tmp_path.iterdir()] == ["r.yaml"], case.name


def test_there_are_enough_of_them() -> None:
    names = [case.name for kind in KINDS for case in kind()]
    assert len(set(names)) == len(names) >= 200
