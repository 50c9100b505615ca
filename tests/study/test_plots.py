"""Pictures of rows that lack values, and of models without a run."""

import re
from pathlib import Path

import pytest

from megatoken.base.errors import ExitCode
from megatoken.convert.hf.export import write_hf
from megatoken.convert.llmc import write_llmc
from megatoken.study.plots import draw_weights
from tests.conftest import Call
from tests.convert.models import byte_tokenizer, draw_model
from tests.tiny_run import write_jsonl

pytest.importorskip("matplotlib")


def write_rows(folder: Path, *, steps: int, seconds: float) -> Path:
    """Write a log with a last training loss of 3.5 and a last validation loss of 3.25."""
    values = {"grad_norm": 0.75, "lr": 6e-4, "tokens_per_second": 123456.0}
    rows = [{"kind": "train", "loss": 9.0, **values} for _ in range(steps)]
    rows[-1]["loss"] = 3.5
    rows.append({"kind": "val", "loss": 3.25})
    rows.append({"kind": "eval", "task": "piqa", "acc": 0.625, "stderr": {"acc": 0.01}})
    for number, row in enumerate(rows, start=1):
        step = min(number, steps)
        row |= {"step": step, "tokens": step * 500_000, "elapsed_seconds": step * seconds}
    return write_jsonl(folder / "metrics.jsonl", rows).parent


def test_axes_and_last_values_are_drawn_and_values_and_steps_may_be_missing(
    tmp_path: Path, call: Call
):
    run = write_rows(tmp_path / "run", steps=8, seconds=60.0)
    with (run / "metrics.jsonl").open("a") as log:
        log.write('{"kind": "train", "step": 9, "tokens": 30, "loss": 1e99, "lr": "nan"}\n')
        log.write('{"kind": "eval", "step": 9, "tokens": 30, "task": "piqa", "acc": null}\n{half')
    row = {"kind": "val", "step": 0, "tokens": 0, "loss": 5.0}
    started = write_jsonl(tmp_path / "started/metrics.jsonl", [row]).parent
    labels = {"tokens": "training tokens", "steps": "steps", "seconds": "time (minutes)"}
    for x, label in labels.items():
        picture = tmp_path / f"{x}.svg"
        line = f"plot {started} {run} --x {x} --out {picture}"
        assert call(line) == (ExitCode.DONE, f"{picture}\n", "")
        texts = {*re.findall(r"<!-- (.*?) -->", picture.read_text())}
        assert {"3.2500 val", "123,456", "tokens/s", label, str(run)} <= texts
    assert call(f"plot {started}")[0] == ExitCode.DATA
    assert call(f"plot {run} --out {tmp_path}/x.docx")[0] == ExitCode.CONFIG


def test_weights_of_a_file_or_folder_are_drawn_in_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
):
    write_llmc(tmp_path / "tiny.bin", draw_model(), "fp32")
    byte_tokenizer().vocabulary.save(tmp_path)
    folder = tmp_path / "model"
    folder.mkdir()
    write_hf(folder, draw_model(), byte_tokenizer(), "fp32")
    files = sorted(folder.iterdir())
    monkeypatch.chdir(tmp_path)
    targets = {"tiny.bin": "plots/tiny", "model": "plots/model", "model --out mine": "mine"}
    for arguments, target in targets.items():
        code, printed, _ = call(f"plot {arguments} --pictures")
        pictures = [f"{target}/positions.png", f"{target}/matrix.png"]
        assert (code, printed.split()) == (ExitCode.DONE, pictures)
        assert all((tmp_path / picture).stat().st_size > 5_000 for picture in pictures)
    assert sorted(folder.iterdir()) == files
    assert call("plot model")[0] == ExitCode.DATA


def test_channels_and_block_of_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    figures = []
    monkeypatch.setattr(
        "megatoken.base.pictures.save_figure", lambda *arguments: figures.append(arguments[0])
    )
    model = draw_model()
    state = model.state_dict()
    write_hf(tmp_path, model, byte_tokenizer(), "fp32")
    for channels, drawn, block, shown in (
        ([1, 31, 99], [1, 31], 0, 0),
        ([150], [0, 1, 2], 9, 1),  # the model has 32 channels and 2 blocks
    ):
        draw_weights(tmp_path, tmp_path, channels, block)
        positions, matrix = figures[-2:]
        columns = [line.get_ydata().tolist() for line in positions.axes[1].lines]
        assert columns == state["positions.weight"].T[drawn].tolist()
        corner = state[f"blocks.{shown}.attention.qkv.weight"][:300, :300]
        assert matrix.axes[0].images[0].get_array().tolist() == corner.tolist()
