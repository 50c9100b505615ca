"""Each room outside the core can be deleted: the rest trains, resumes and lists its commands."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import megatoken
from megatoken.base.rooms import CORE, find_rooms
from megatoken.text.prepare import prepare
from tests.tiny_run import TEXT, assert_equal_tensors, read_losses, train

PACKAGE = Path(megatoken.__file__).parent
ROOMS = sorted(find_rooms().keys() - {*CORE})
KILLED_AT = 6  # of 8 steps
RECIPE = """\
version: 2
model: {n_layer: 2, n_head: 2, d_model: 32, seq_len: 16}
optim: {lr: 1e-2, warmup: 5steps}
budget: {steps: 8, batch_tokens: 192}
machine: {device: cpu, precision: fp32, threads: 1, micro_batch: 6, attention: flash, gemm_backend: torch,
  fused: off, adamw: fused, compile: off}
save: {every: 4steps}
evaluate: {every: 4steps, tokens: 4096}
"""


def copy_without(rooms: list[str], folder: Path) -> Path:
    """Copy the package without some rooms."""
    shutil.copytree(PACKAGE, folder / "megatoken")  # with its compiled modules, which stay valid
    for room in rooms:
        shutil.rmtree(folder / "megatoken" / room)
    return folder


@pytest.mark.long
def test_rooms_can_be_removed(tmp_path: Path):
    """A killed and resumed run has the same bits as a run of the full package without a stop."""
    (tmp_path / "text.txt").write_bytes(TEXT * 300)
    prepare(tmp_path / "text.txt", tmp_path / "data", tokenizer="bytes", val_fraction=0.1)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    settings = [f"data.path={tmp_path / 'data'}"]
    expected = tmp_path / "expected"
    train(expected, *settings, recipe=recipe)
    cases = {room: [room] for room in ROOMS} | {"all": ROOMS}
    runs = []
    for name, rooms in cases.items():
        copy = copy_without(rooms, tmp_path / "copies" / name)
        run = {"copy": str(copy), "out": f"{tmp_path}/{name}", "settings": [str(recipe), *settings]}
        runs += [{**run, "kill_at": KILLED_AT}, {**run, "kill_at": 0}]
    command = [sys.executable, Path(__file__).with_name("without_rooms.py"), json.dumps(runs)]
    process = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    lines = [line for line in process.stdout.splitlines() if line.startswith("[")]
    assert len(lines) == len(cases), process.stderr[-4000:]
    for name, line in zip(cases, lines, strict=True):
        left = {room for room in find_rooms() if room not in cases[name]}
        while lacking := {room for room in left if {*find_rooms()[room].needs} - left}:
            left -= lacking
        commands = [find_rooms()[room].entries.get("command", {}) for room in left]
        assert json.loads(line) == sorted(key for each in commands for key in each), name
        assert_equal_tensors(tmp_path / name, expected)
        assert read_losses(tmp_path / name, "val") == read_losses(expected, "val")
