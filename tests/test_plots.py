"""Pictures: rows that lack values, and models that are no run of ours."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatoken.cli.main import main
from megatoken.convert.hf.export import write_hf
from megatoken.errors import ExitCode
from megatoken.plots import draw_curves
from tests.convert.models import byte_tokenizer, draw_model

pytest.importorskip("matplotlib")


def test_rows_may_lack_anything_but_their_place(tmp_path: Path) -> None:
    train = {"kind": "train", "step": 1, "tokens": 10}
    rows: list[dict[str, Any]] = [
        train,
        train | {"loss": None},
        train | {"loss": "high", "tokens": 10**400},
        train | {"loss": 2.0, "lr": 10**400},
        {"kind": "val", "step": 1, "tokens": 10},
        *({"kind": "eval", "step": 1, "tokens": 10} | scores for scores in ({}, {"task": "piqa"}, {"task": ["x"]})),
        {"kind": "eval", "step": 2, "tokens": 20, "task": "piqa", "acc": 0.5},
        {"kind": "eval", "step": 3, "tokens": 30, "task": "piqa", "acc": 0.5, "stderr": {"acc": None}},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert draw_curves([tmp_path], tmp_path / "curves.png").stat().st_size > 10_000


def test_pictures_of_a_model_folder_are_written_beside_the_user_not_into_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_hf(folder, draw_model(), byte_tokenizer(), "fp32")
    before = sorted(folder.iterdir())
    monkeypatch.chdir(tmp_path)
    for words, target in (([], "plots/model"), (["--out", "mine"], "mine")):
        assert main(["plot", "model", "--pictures", *words]) == ExitCode.DONE
        assert capsys.readouterr().out.split() == [f"{target}/positions.png", f"{target}/matrix.png"]
        assert (tmp_path / target / "positions.png").stat().st_size > 5_000
    assert sorted(folder.iterdir()) == before
    assert main(["plot", "model"]) == ExitCode.DATA
    assert main(["plot", "model", "model", "--pictures"]) == ExitCode.DATA
