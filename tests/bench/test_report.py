"""bench report: headlines with units, and changes judged by whether quartile ranges overlap."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatoken.bench.report import choose_headline, compare, format_cell, list_leaves, write_record
from megatoken.cli.main import main
from megatoken.console import Console
from megatoken.errors import ExitCode
from megatoken.system.timing import Timing
from tests.tiny_model import CPU

QUIET = Console(quiet=True)
RECORDS = Path(__file__).parents[2] / "records"


def rate(median: float, low: float, high: float, repeats: int = 5) -> dict[str, Any]:
    return {"median": median, "low": low, "high": high, "repeats": repeats}


def record_of(answer: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": "some",
        "date": "2026-01-02",
        "commit": "abc",
        "hardware": {"device": "cpu"},
        "answer": answer,
    }


def report(
    *words: object, capsys: pytest.CaptureFixture[str]
) -> tuple[dict[str, Any], list[str], str]:
    """The JSON answer, the lines before it and what was warned of; the exit code must be 0."""
    code = main(["bench", "report", *map(str, words)])
    out, err = capsys.readouterr()
    assert code == 0, err
    *lines, last = out.splitlines()
    return (
        json.loads(last),
        lines,
        "\n".join(line for line in lines if line.startswith("warning: ")),
    )


def test_figures_are_found_by_path_wherever_they_are() -> None:
    rows = [
        {
            "seq_len": 64,
            "batch_tokens": 512,
            "tokens_per_second": {"first": rate(1, 1, 1), "later": rate(2, 2, 2)},
        },
        {"seq_len": 64, "batch_tokens": 256, "tokens_per_second": {"first": rate(3, 3, 3)}},
    ]
    rungs = [
        {"name": "sdpa", "loss": 2.5, "mfu": None},
        {"name": "bf16", "speed": rate(4, 3, 5, 2)},
    ]
    products = [
        {"name": "square", "dtype": kind, "flops": rate(5, 5, 5)} for kind in ("fp32", "bf16")
    ]
    answer = {
        "rows": rows,
        "rungs": rungs,
        "products": products,
        "plain": [rate(6, 6, 6), 7],
        "x": "so",
        "on": True,
    }
    assert dict(list_leaves(answer)) == {
        "rows[64,512].tokens_per_second.first": rate(1, 1, 1),
        "rows[64,512].tokens_per_second.later": rate(2, 2, 2),
        "rows[64,512].seq_len": 64,
        "rows[64,512].batch_tokens": 512,
        "rows[64,256].tokens_per_second.first": rate(3, 3, 3),
        "rows[64,256].seq_len": 64,
        "rows[64,256].batch_tokens": 256,
        "rungs[sdpa].loss": 2.5,
        "rungs[bf16].speed": rate(4, 3, 5, 2),
        "products[square,fp32].flops": rate(5, 5, 5),
        "products[square,bf16].flops": rate(5, 5, 5),
        "plain[0]": rate(6, 6, 6),
        "plain[1]": 7,
        "on": True,
    }


@pytest.mark.parametrize(
    ("old", "new", "ratio", "outside"),
    [
        (rate(100, 95, 105), rate(120, 115, 125), 1.2, True),
        (rate(100, 95, 105), rate(80, 75, 85), 0.8, True),
        (rate(100, 95, 105), rate(110, 105, 115), 1.1, False),  # they touch
        (rate(100, 50, 200), rate(150, 140, 160), 1.5, False),  # one inside the other
        (rate(100, 95, 105, 2), rate(120, 115, 125), 1.2, None),
        (rate(100, 95, 105), rate(120, 115, 125, 2), 1.2, None),
        (rate(100, 95, 105, 3), rate(120, 115, 125, 3), 1.2, True),
        (rate(0, 0, 0), rate(1, 1, 1), None, True),
    ],
)
def test_a_change_counts_when_the_ranges_lie_apart(
    old: dict[str, Any], new: dict[str, Any], ratio: float | None, outside: bool | None
) -> None:
    older = {"some": record_of({"x": {"y": old}}), "other": record_of({})}
    changes = compare({"some": record_of({"x": {"y": new}, "only": new})}, older, QUIET)
    assert changes == [
        {
            "record": "some",
            "figure": "x.y",
            "old": old["median"],
            "new": new["median"],
            "ratio": ratio and pytest.approx(ratio),
            "outside_noise": outside,
        }
    ]


@given(
    st.lists(st.floats(1, 9), min_size=3, max_size=9),
    st.lists(st.floats(1, 9), min_size=3, max_size=9),
)
@settings(deadline=None, max_examples=50)
def test_the_other_way_round_is_the_same_judgement(first: list[float], second: list[float]) -> None:
    one, other = (
        {"x": record_of({"x": Timing(tuple(values)).rate(3)})} for values in (first, second)
    )
    (there,), (back,) = compare(one, other, QUIET), compare(other, one, QUIET)
    assert there["outside_noise"] == back["outside_noise"]
    assert there["ratio"] * back["ratio"] == pytest.approx(1)
    assert compare(one, one, QUIET)[0]["outside_noise"] is False


def test_headlines_are_the_best_of_a_list_else_numbers() -> None:
    rows = [
        {"size": size, "flops": rate(size * 2, 0, 9), "seconds": rate(9 - size, 0, 9)}
        for size in (1, 3, 2)
    ]
    assert choose_headline(dict(list_leaves({"rows": rows}))) == [
        "rows[3].flops",
        "rows[1].seconds",
    ]
    assert choose_headline(dict(list_leaves({"a": 1, "b": 2, "c": "x", "d": 3, "e": 4}))) == [
        "a",
        "b",
        "d",
    ]
    assert choose_headline({}) == []


def test_the_command_shows_records_and_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    speeds = {"megatoken": rate(50.25, 48, 51), "transformers": rate(24, 23, 25)}
    write_record(
        new, "generate", {"tokens_per_second": speeds}, CPU.name, ["megatoken", "bench", "generate"]
    )
    speeds = {
        "megatoken": rate(40.2, 40, 41),
        "transformers": rate(24.5, 23.5, 25.5),
        "other": rate(1, 1, 1),
    }
    write_record(
        old, "generate", {"tokens_per_second": speeds}, CPU.name, ["megatoken", "bench", "generate"]
    )
    before = sorted(tmp_path.rglob("*"))
    answer, lines, warned = report(new, "--against", old, capsys=capsys)
    assert not warned
    assert sorted(tmp_path.rglob("*")) == before, "a report leaves nothing behind"
    (record,) = answer["records"]
    assert record["name"] == "generate"
    assert record["headline"] == ["tokens_per_second.megatoken", "tokens_per_second.transformers"]
    assert record["figures"]["tokens_per_second.megatoken"] == rate(50.25, 48, 51)
    ours = {
        "record": "generate",
        "figure": "tokens_per_second.megatoken",
        "old": 40.2,
        "new": 50.25,
    }
    theirs = {
        "record": "generate",
        "figure": "tokens_per_second.transformers",
        "old": 24.5,
        "new": 24,
    }
    assert answer["changes"] == [
        {**ours, "ratio": 50.25 / 40.2, "outside_noise": True},
        {**theirs, "ratio": 24 / 24.5, "outside_noise": False},
    ]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert cells[0] == ["record", "figure", "value (low to high)", "date", "commit", "hardware"]
    written = json.loads((new / "generate.json").read_text())
    where = [written["date"], written["commit"], f"cpu, {written['hardware']['cores']} cores"]
    assert cells[2] == ["generate", "tokens_per_second.megatoken", "50.25 (48 to 51)", *where]
    assert cells[3] == ["generate", "tokens_per_second.transformers", "24 (23 to 25)", *where]
    assert cells[-2] == [
        "generate",
        "tokens_per_second.megatoken",
        "40.2",
        "50.25",
        "1.25x",
        "outside the noise",
    ]
    assert cells[-1][-1] == "inside the noise"
    assert len({len(line) for line in lines[:4]}) == 1, "columns line up"


@pytest.mark.parametrize(
    ("key", "value", "cell"),
    [
        ("tokens_per_second", rate(1234.5, 1000, 2000), "1,234 (1,000 to 2,000)"),
        ("seconds", rate(0.0123, 0.01, 0.02), "12.3 ms (10 to 20)"),
        ("seconds", rate(0.5, 0.4, 2), "500 ms (400 to 2 s)"),
        ("seconds", rate(2, 2, 2, 1), "2 s"),
        ("overhead_seconds", -0.032, "-32 ms"),
        ("seconds_per_token", 2.5e-5, "25 us"),
        ("flops_per_second", 1.234e12, "1.234 TFLOP/s"),
        ("peak_memory_bytes", 2.5e9, "2.5 GB"),
        ("megabytes_per_second.prepare", 12.484, "12.48"),
        ("mfu_causal", 0.71987, "72.0%"),
        ("gain", 1.5, "1.50x"),
        ("loss", 3.76328, "3.7633"),
        ("chosen", "fp32", "fp32"),
        ("mfu", None, ""),
    ],
)
def test_cells_have_the_unit_of_their_key(key: str, value: Any, cell: str) -> None:
    assert format_cell(key, value) == cell


def test_too_few_repeats_and_other_hardware_are_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder, repeats in (("new", 2), ("old", 5)):
        write_record(
            tmp_path / folder,
            "loader",
            {"x_seconds": rate(2, 1, 3, repeats)},
            CPU.name,
            ["megatoken"],
        )
    path = tmp_path / "old" / "loader.json"
    path.write_text(path.read_text().replace('"device": "cpu"', '"device": "abacus"'))
    answer, lines, warned = report(tmp_path / "new", "--against", tmp_path / "old", capsys=capsys)
    assert answer["changes"][0]["outside_noise"] is None
    assert "too few repeats" in lines[-1]
    assert warned.startswith("warning: loader: measured on cpu, ")
    assert "on abacus, " in warned


def test_what_is_no_record_is_named_and_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(tmp_path, "good", {"x": rate(2, 1, 3)}, CPU.name, ["megatoken"])
    good = (tmp_path / "good.json").read_text()
    (tmp_path / "a-half.json").write_text(good[:40])
    (tmp_path / "b-list.json").write_text("[1, 2]")
    (tmp_path / "c-bytes.json").write_bytes(b"\xff\xfe{}")
    lacking = {
        key: value for key, value in json.loads(good).items() if key not in ("commit", "answer")
    }
    (tmp_path / "d-lacks.json").write_text(json.dumps(lacking))
    (tmp_path / "i-folder.json").mkdir()
    (tmp_path / "picture.png").write_bytes(b"")
    answer, lines, warned = report(tmp_path, capsys=capsys)
    assert [record["name"] for record in answer["records"]] == ["good"]
    assert answer["changes"] == []
    expected = [
        ("a-half.json", "delimiter"),
        ("b-list.json", "list indices"),
        ("c-bytes.json", "can't decode byte"),
        ("d-lacks.json", "commit"),
        ("i-folder.json", "Is a directory"),
    ]
    warnings = warned.splitlines()
    assert len(warnings) == len(expected)
    for line, (name, why) in zip(warnings, expected, strict=True):
        assert line.startswith(f"warning: {tmp_path / name}: skipped, not a record: ")
        assert why in line
    assert any(line.startswith("| good") for line in lines)


def test_a_folder_without_records_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty, full = tmp_path / "empty", tmp_path / "full"
    empty.mkdir()
    write_record(full, "good", {}, CPU.name, ["megatoken"])
    for words, message in (
        ([str(empty)], f"error: no records in this folder — {empty} — "),
        ([str(tmp_path / "none")], f"error: no records in this folder — {tmp_path / 'none'} — "),
        ([str(full), "--against", str(empty)], f"error: no records in this folder — {empty} — "),
    ):
        assert main(["bench", "report", *words]) == ExitCode.DATA
        assert capsys.readouterr().err.startswith(message)


def test_our_own_records_are_all_shown(capsys: pytest.CaptureFixture[str]) -> None:
    answer, _, warned = report(RECORDS, "--against", RECORDS, capsys=capsys)
    assert not warned
    assert {record["name"] for record in answer["records"]} == {
        path.stem for path in RECORDS.glob("*.json")
    }
    assert all(record["headline"] for record in answer["records"])
    assert all(change["ratio"] == 1 and not change["outside_noise"] for change in answer["changes"])
