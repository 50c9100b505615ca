"""Pictures: rows that lack values, and models that are no run of ours."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatoken.cli.main import main
from megatoken.convert.hf.export import write_hf
from megatoken.convert.llmc import write_llmc
from megatoken.errors import ExitCode
from megatoken.plots import draw_curves, format_tick
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
        *(
            {"kind": "eval", "step": 1, "tokens": 10} | scores
            for scores in ({}, {"task": "piqa"}, {"task": ["x"]})
        ),
        {"kind": "eval", "step": 2, "tokens": 20, "task": "piqa", "acc": 0.5},
        {
            "kind": "eval",
            "step": 3,
            "tokens": 30,
            "task": "piqa",
            "acc": 0.5,
            "stderr": {"acc": None},
        },
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert draw_curves([tmp_path], tmp_path / "curves.png").stat().st_size > 10_000


def write_rows(
    folder: Path, *, steps: int, seconds: float | None, mfu: float | None = 0.25
) -> Path:
    """A log whose last loss is 3.5 in training and 3.25 in validation."""
    folder.mkdir(parents=True)
    rows = []
    for step in range(1, steps + 1):
        row = {
            "kind": "train",
            "step": step,
            "tokens": step * 500_000,
            "loss": 3.5,
            "grad_norm": 0.75,
            "lr": 6e-4,
        }
        time = {} if seconds is None else {"elapsed_seconds": step * seconds}
        rows.append(row | {"tokens_per_second": 123456.0, "mfu": mfu} | time)
    rows.append(rows[-1] | {"kind": "val", "loss": 3.25})
    rows.append(rows[-1] | {"kind": "eval", "task": "piqa", "acc": 0.625, "stderr": {"acc": 0.01}})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def read_texts(picture: Path) -> set[str]:
    return set(re.findall(r"<!-- (.*?) -->", picture.read_text()))


def test_axes_last_values_and_names_are_on_the_picture(tmp_path: Path) -> None:
    runs = [write_rows(tmp_path / name / "run", steps=8, seconds=60.0) for name in ("a", "b")]
    runs.append(write_rows(tmp_path / "other", steps=8, seconds=900.0))
    values = {"3.5000 train", "3.2500 val", "0.0006", "0.75", "123,456", "25.0%", "62.5% acc"}
    titles = {"loss (nats per token)", "MFU (full attention)", "tokens per second", "piqa"}
    for x, label in (
        ("tokens", "training tokens"),
        ("steps", "steps"),
        ("seconds", "time (minutes)"),
    ):
        texts = read_texts(draw_curves(runs[:2], tmp_path / f"{x}.svg", x))
        assert {*values, *titles, label, str(runs[0]), str(runs[1])} <= texts
    assert {"1M", "2M", "3M", "4M", "50k", "100k"} <= read_texts(tmp_path / "tokens.svg")
    assert {"2", "4", "6", "8"} <= read_texts(tmp_path / "seconds.svg")
    texts = read_texts(draw_curves(runs[1:], tmp_path / "long.svg", "seconds"))
    assert {"time (hours)", "run", "other"} <= texts  # 8 minutes and 2 hours
    assert (
        main(["plot", *map(str, runs), "--x", "seconds", "--out", str(tmp_path / "all.svg")])
        == ExitCode.DONE
    )
    assert read_texts(tmp_path / "all.svg") == texts - {"run", "other"} | {str(run) for run in runs}
    assert [format_tick(value) for value in (0, 6e-4, 250e3, 1.5e6, 10e9)] == [
        "0",
        "0.0006",
        "250k",
        "1.5M",
        "10B",
    ]


@pytest.mark.parametrize(("steps", "marks"), [(1, 5), (2, 0)])
def test_a_run_of_one_row_is_seen(steps: int, marks: int, tmp_path: Path) -> None:
    """In the panels of loss, rate, norm, tokens per second and MFU."""
    picture = draw_curves(
        [write_rows(tmp_path / "run", steps=steps, seconds=1.0)], tmp_path / "curves.svg"
    ).read_text()
    crosses = {*re.findall(r'<path id="(\w+)" d="M -3 0\s+L 3 0\s+M 0 3\s+L 0 -3', picture)}
    assert sum(picture.count(f'<use xlink:href="#{cross}"') for cross in crosses) == marks


def test_runs_without_times_or_a_peak(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = write_rows(tmp_path / "old", steps=2, seconds=None, mfu=None)
    assert "MFU (full attention)" not in read_texts(draw_curves([old], tmp_path / "old.svg"))
    with (old / "metrics.jsonl").open("a") as log:  # resumed since
        log.write(
            '{"kind": "train", "step": 3, "tokens": 30, "elapsed_seconds": 1.5, "loss": 2.0}\n'
        )
    assert main(["plot", str(old), "--x", "steps"]) == ExitCode.DONE
    assert main(["plot", str(old), "--x", "seconds"]) == ExitCode.DATA
    what = "its rows have no time: an earlier version began this run"
    assert capsys.readouterr().err == f"error: {what} — {old} — use --x tokens or --x steps\n"


def test_one_of_several_runs_without_steps_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, begun, none = (
        write_rows(tmp_path / "run", steps=2, seconds=1.0),
        tmp_path / "begun",
        tmp_path / "none",
    )
    begun.mkdir()
    (begun / "metrics.jsonl").write_text('{"kind": "val", "step": 0, "tokens": 0, "loss": 5.0}\n')
    with (run / "metrics.jsonl").open("a") as log:
        log.write("{half\n[]\n")
    assert (
        main(["plot", str(begun), str(run), str(none), "--out", str(tmp_path / "x.svg")])
        == ExitCode.DONE
    )
    assert {"3.5000 train", "run"} <= read_texts(tmp_path / "x.svg")
    assert "begun" not in read_texts(tmp_path / "x.svg")
    out, err = capsys.readouterr()
    assert out == f"{tmp_path / 'x.svg'}\n"
    assert err.splitlines() == [
        f"warning: left out: not a row of metrics — {run}/metrics.jsonl:5 and 1 more",
        f"warning: left out: no training steps are recorded here — {begun} — give the folder of a run",
        f"warning: left out: no metrics to read: No such file or directory — {none}/metrics.jsonl — "
        "name the folder of a run",
    ]
    assert main(["plot", str(begun), str(none)]) == ExitCode.DATA


def test_pictures_of_a_checkpoint_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = draw_model()
    write_llmc(tmp_path / "tiny.bin", model, "fp32")
    byte_tokenizer().save(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["plot", "tiny.bin", "--pictures"]) == ExitCode.DONE
    assert sorted(path.name for path in (tmp_path / "plots" / "tiny").iterdir()) == [
        "matrix.png",
        "positions.png",
    ]


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
        assert capsys.readouterr().out.split() == [
            f"{target}/positions.png",
            f"{target}/matrix.png",
        ]
        assert (tmp_path / target / "positions.png").stat().st_size > 5_000
    assert sorted(folder.iterdir()) == before
    assert main(["plot", "model"]) == ExitCode.DATA
    assert main(["plot", "model", "model", "--pictures"]) == ExitCode.DATA
