"""Records and tables of benchmarks."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report import draw_pictures
from benchmarks.scoreboard import list_speeds
from megatoken.base.console import Console
from megatoken.base.markdown_table import format_cell
from megatoken.study.bench.report import write_record


def figure(median: float, low: float, high: float) -> dict[str, Any]:
    return {"median": median, "low": low, "high": high, "repeats": 5}


CELLS = """\
tokens_per_second 1234.5 1000 2000: 1,234 (1,000 to 2,000)
seconds 0.0123 0.01 0.02: 12.3 ms (10 to 20)
seconds 0.5 0.4 2: 500 ms (400 to 2 s)
overhead_seconds -0.032: -32 ms
seconds_per_token 2.5e-5: 25 µs
flops_per_second 1.234e12: 1.234 TFLOP/s
peak_memory_bytes 2.5e9: 2.5 GB
mfu_causal 0.71987: 72.0%
gain 1.5: 1.50x
loss 3.76328: 3.7633
"""


@pytest.mark.parametrize("row", CELLS.splitlines())
def test_cells_have_the_unit_of_their_key(row: str):
    arguments, cell = row.split(": ")
    key, *numbers = arguments.split()
    value, *spread = map(float, numbers)
    assert format_cell(key, figure(value, *spread) if spread else value) == cell


def test_a_ladder_has_the_speedup_of_its_rounds():
    """Tokens/s divided by the plain step's in the same rounds, not by the first row's."""
    rows = [("plain", 100.0, 1.0), ("native", 400.0, 3.5)]
    rungs = [
        {"name": name, "tokens_per_second": rate, "speedup": speedup, "rate": figure(rate, 90, 500)}
        for name, rate, speedup in rows
    ]
    result = {"preset": "tiny", "batch_tokens": 32, "device": "a cpu", "rungs": rungs}
    assert [row["ratio"] for row in list_speeds({"a": result}, every=True)] == [1.0, 3.5]
    both = list_speeds({"a": result, "b": result}, every=False)
    assert [(row["value"]["median"], row["ratio"]) for row in both] == [(400.0, 1.0), (400.0, 1.0)]


def test_pictures_are_drawn_from_records(tmp_path: Path):
    pytest.importorskip("matplotlib")
    records = {"ladder": json.loads(Path("records/ladder.json").read_text())}
    draw_pictures(records, tmp_path, Console())
    assert (tmp_path / "ladder.png").is_file()


def test_a_record_names_no_absolute_path(tmp_path: Path):
    path = write_record(tmp_path, "a", {}, "cpu", ["bench", "--data", "/home/me/text.txt"])
    assert json.loads(path.read_text())["command"] == "bench --data text.txt"
