"""`megatoken quickstart`, and the prepare commands of shipped recipes."""

import asyncio
import lzma
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatoken.base.config.load import resolve
from megatoken.base.errors import ExitCode
from megatoken.inference.settings import SampleConfig
from megatoken.text import sources
from tests.conftest import Ask, Call

SHORT = """budget.steps=2 model.n_layer=1 model.n_head=2 model.d_model=32 machine.micro_batch=2
    evaluate.tokens=512"""


def test_quickstart_makes_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: Ask, call: Call
):
    monkeypatch.chdir(tmp_path)
    part = {"stdlib": Path(asyncio.__file__).parent}
    monkeypatch.setattr(sources, "sysconfig", SimpleNamespace(get_paths=lambda: part))
    first = ask(f"quickstart {SHORT}")
    assert list(first) == ["prepare", "train", "eval", "compressors", "sample"]
    assert first["prepare"]["tokenizer"]["vocab_size"] == 4096
    assert (first["train"]["steps"], len(first["sample"]["text"])) == (2, 3)
    # All held-out tokens, whatever evaluate.tokens.
    assert first["eval"]["target_tokens"] == first["prepare"]["val_tokens"] - 1
    # Another run is in the folder.
    assert call(f"quickstart {SHORT} budget.steps=3")[0] == ExitCode.CONFIG


def test_quickstart_on_own_text_is_one_command_and_a_rerun_skips_what_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: Ask, call: Call
):
    monkeypatch.chdir(tmp_path)
    lines = [f"Day {day}: we sailed {day * 7} miles, then {day % 5} more.\n" for day in range(2000)]
    log = Path("ship log.txt")
    log.write_text("".join(lines))
    line = f"quickstart --data '{log}' {SHORT}"
    first = ask(f"{line} --prompt 'Day a=1:'")
    assert first["train"]["run"] == "runs/ship-log"
    assert resolve("runs/ship-log/config.yaml").config.section(SampleConfig).prompt == "Day a=1:"
    text = log.read_bytes()
    n_val, n_train = first["eval"]["text_bytes"], first["compressors"]["training_bytes"]
    assert 0 < len(text) - n_train - n_val < 20  # the first held-out token is no target
    train, val = text[:n_train], text[-n_val:]
    both, seen = (len(lzma.compress(part, preset=9)) for part in (train + val, train))
    assert first["compressors"]["xz -9"] == pytest.approx(8 * (both - seen) / n_val)

    metrics = Path("runs/ship-log/metrics.jsonl").read_bytes()
    again = ask(line)  # prompted by how the held-out text begins
    assert again["prepare"]["unchanged"]
    assert again["eval"] == first["eval"]
    log.write_text("other text")
    assert call(line)[0] == ExitCode.DATA  # never trained on what is no longer the text
    assert "prepare" not in ask(f"quickstart --data data/ship-log --out runs/ship-log {SHORT}")
    assert Path("runs/ship-log/metrics.jsonl").read_bytes() == metrics
