"""bench report: headlines with units, and changes judged by whether quartile ranges overlap."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatoken.bench.record import write_record
from megatoken.bench.report import Figure, Record, choose_headlines, compare, find_unit, format_value, list_leaves
from megatoken.cli import main
from megatoken.errors import Exit
from megatoken.timing import Timing
from tests.tiny import CPU

RECORDS = Path(__file__).parents[2] / "records"


def rate(median: float, low: float, high: float, repeats: int = 5) -> dict[str, Any]:
    return {"median": median, "low": low, "high": high, "repeats": repeats}


def record_of(answer: dict[str, Any], name: str = "some") -> Record:
    return Record(name=name, date="2026-01-02", commit="abc", hardware="cpu", answer=answer)


def report(*words: object, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], list[str], str]:
    """The JSON answer, the lines before it and what was warned of; the exit code must be 0."""
    code = main(["bench", "report", *map(str, words)])
    out, err = capsys.readouterr()
    assert code == 0, err
    *lines, last = out.splitlines()
    return json.loads(last), lines, "\n".join(line for line in lines if line.startswith("warning: "))


def test_figures_are_found_by_path_wherever_they_are() -> None:
    rows = [
        {"seq_len": 64, "batch_tokens": 512, "tokens_per_second": {"first": rate(1, 1, 1), "later": rate(2, 2, 2)}},
        {"seq_len": 64, "batch_tokens": 256, "tokens_per_second": {"first": rate(3, 3, 3)}},
    ]
    rungs = [{"name": "sdpa", "loss": 2.5, "mfu": None}, {"name": "bf16", "speed": rate(4, 3, 5, 2)}]
    products = [{"name": "square", "dtype": kind, "flops": rate(5, 5, 5)} for kind in ("fp32", "bf16")]
    answer = {"rows": rows, "rungs": rungs, "products": products, "plain": [rate(6, 6, 6), 7], "said": "so", "on": True}
    assert dict(list_leaves(answer)) == {
        "rows[64,512].tokens_per_second.first": Figure(1, 1, 1, 5),
        "rows[64,512].tokens_per_second.later": Figure(2, 2, 2, 5),
        "rows[64,512].seq_len": 64,
        "rows[64,512].batch_tokens": 512,
        "rows[64,256].tokens_per_second.first": Figure(3, 3, 3, 5),
        "rows[64,256].seq_len": 64,
        "rows[64,256].batch_tokens": 256,
        "rungs[sdpa].loss": 2.5,
        "rungs[bf16].speed": Figure(4, 3, 5, 2),
        "products[square,fp32].flops": Figure(5, 5, 5, 5),
        "products[square,bf16].flops": Figure(5, 5, 5, 5),
        "plain[0]": Figure(6, 6, 6, 5),
        "plain[1]": 7,
        "on": True,
    }


def test_older_ranges_count_as_spread() -> None:
    older = {"a": {"median": 2.0, "lowest": 1.0, "highest": 3.0, "n": 120}, "b": {"median": 5, "min": 4, "max": 6}}
    assert record_of(older).figures() == {"a": Figure(2, 1, 3, 120), "b": Figure(5, 4, 6, 0)}
    broken = {"a": rate(float("nan"), 1, 2), "b": {"median": "2", "low": 1, "high": 3}, "c": {"median": 2, "low": 1}}
    assert record_of(broken).figures() == {}


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
    changes = compare([record_of({"x": {"y": new}, "only": new})], [record_of({"x": {"y": old}}), record_of({}, "b")])
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


@given(st.lists(st.floats(1, 9), min_size=3, max_size=9), st.lists(st.floats(1, 9), min_size=3, max_size=9))
@settings(deadline=None, max_examples=50)
def test_there_and_back_is_the_same_judgement(first: list[float], second: list[float]) -> None:
    one, other = (record_of({"x": Timing(tuple(values)).rate(3)}) for values in (first, second))
    (there,), (back,) = compare([one], [other]), compare([other], [one])
    assert there["outside_noise"] == back["outside_noise"]
    assert there["ratio"] * back["ratio"] == pytest.approx(1)
    assert compare([one], [one])[0]["outside_noise"] is False


def test_headlines_are_the_best_of_a_list_else_rates_else_numbers() -> None:
    rows = [{"size": size, "flops": rate(size * 2, 0, 9), "seconds": rate(9 - size, 0, 9)} for size in (1, 3, 2)]
    assert list(choose_headlines(record_of({"rows": rows}))) == ["rows[3].flops", "rows[1].seconds"]
    plain = {"megabytes": 60, "megabytes_per_second": {"prepare": 12.5, "tiktoken": 10.0}}
    rates = {"megabytes_per_second.prepare": 12.5, "megabytes_per_second.tiktoken": 10.0}
    assert choose_headlines(record_of(plain)) == rates
    assert choose_headlines(record_of({"a": 1, "b": 2, "c": "x", "d": 3, "e": 4})) == {"a": 1, "b": 2, "d": 3}
    soak = {"what": "kills", "megabytes": 60, "kills": 20, "byte_identical": True}
    assert choose_headlines(record_of(soak, "prepare-kills")) == {"kills": 20, "byte_identical": True}
    assert choose_headlines(record_of({})) == {}


@pytest.mark.parametrize(
    ("path", "unit", "value", "shown"),
    [
        ("rows[64,512].tokens_per_second.later", "tokens/s", 1_140_364_594.2, "1,140,364,594 tokens/s"),
        ("megabytes_per_second.prepare", "MB/s", 12.484, "12.48 MB/s"),
        ("rows[bf16].flops_per_second", "FLOP/s", 1.234e12, "1.234 TFLOP/s"),
        ("peak_memory_bytes", "B", 2.5e9, "2.5 GB"),
        ("wall_seconds_after_installation", "s", 223.5, "223.5 s"),
        ("step_milliseconds", "ms", 2.0, "2 ms"),
        ("last_validation_loss", "nats", 3.76328, "3.763 nats"),
        ("mfu", "", 0.71987, "0.7199"),
        ("same_ids", "", True, "yes"),
    ],
)
def test_units_come_from_the_path(path: str, unit: str, value: float, shown: str) -> None:
    assert find_unit(path) == unit
    assert format_value(value, unit) == shown


def test_the_command_shows_records_and_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    speeds = {"megatoken": rate(50.25, 48, 51), "transformers": rate(24, 23, 25)}
    write_record(new, "generate", {"tokens_per_second": speeds}, CPU, ["megatoken", "bench", "generate"])
    speeds = {"megatoken": rate(40.2, 40, 41), "transformers": rate(24.5, 23.5, 25.5), "other": rate(1, 1, 1)}
    write_record(old, "generate", {"tokens_per_second": speeds}, CPU, ["megatoken", "bench", "generate"])
    before = sorted(tmp_path.rglob("*"))
    answer, lines, warned = report(new, "--against", old, capsys=capsys)
    assert not warned
    assert sorted(tmp_path.rglob("*")) == before, "a report leaves nothing behind"
    (record,) = answer["records"]
    assert record["name"] == "generate"
    assert record["headline"] == ["tokens_per_second.megatoken", "tokens_per_second.transformers"]
    assert record["figures"]["tokens_per_second.megatoken"] == rate(50.25, 48, 51)
    ours = {"record": "generate", "figure": "tokens_per_second.megatoken", "old": 40.2, "new": 50.25}
    theirs = {"record": "generate", "figure": "tokens_per_second.transformers", "old": 24.5, "new": 24}
    assert answer["changes"] == [
        {**ours, "ratio": 50.25 / 40.2, "outside_noise": True},
        {**theirs, "ratio": 24 / 24.5, "outside_noise": False},
    ]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert cells[0] == ["record", "figure", "value", "low to high (repeats)", "hardware", "commit", "date"]
    written = json.loads((new / "generate.json").read_text())
    hardware = f"cpu, {written['hardware']['cores']} cores"
    where = [hardware, written["commit"], written["date"]]
    assert cells[2] == ["generate", "tokens_per_second.megatoken", "50.25 tokens/s", "48 to 51 (5)", *where]
    assert cells[3] == ["", "tokens_per_second.transformers", "24 tokens/s", "23 to 25 (5)", "", "", ""]
    changed = ["tokens_per_second.megatoken", "40.2 tokens/s", "50.25 tokens/s", "1.250", "outside the noise"]
    assert cells[-2] == ["generate", *changed]
    assert cells[-1][-1] == "inside the noise"
    assert len({len(line) for line in lines[:4]}) == 1, "columns line up"


def test_too_few_repeats_and_other_hardware_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, repeats in (("new", 2), ("old", 5)):
        write_record(tmp_path / folder, "loader", {"x_seconds": rate(2, 1, 3, repeats)}, CPU, ["megatoken"])
    path = tmp_path / "old" / "loader.json"
    path.write_text(path.read_text().replace('"device": "cpu"', '"device": "abacus"'))
    answer, lines, warned = report(tmp_path / "new", "--against", tmp_path / "old", capsys=capsys)
    assert answer["changes"][0]["outside_noise"] is None
    assert "too few repeats" in lines[-1]
    assert warned.startswith("warning: loader: measured on cpu, ")
    assert "on abacus, " in warned


def test_what_is_no_record_is_named_and_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_record(tmp_path, "good", {"x": rate(2, 1, 3)}, CPU, ["megatoken"])
    good = (tmp_path / "good.json").read_text()
    (tmp_path / "a-half.json").write_text(good[:40])
    (tmp_path / "b-list.json").write_text("[1, 2]")
    (tmp_path / "c-bytes.json").write_bytes(b"\xff\xfe{}")
    lacking = {key: value for key, value in json.loads(good).items() if key not in ("commit", "answer")}
    (tmp_path / "d-lacks.json").write_text(json.dumps(lacking))
    (tmp_path / "h-twice.json").write_text(good)
    (tmp_path / "i-folder.json").mkdir()
    (tmp_path / "picture.png").write_bytes(b"")
    answer, lines, warned = report(tmp_path, capsys=capsys)
    assert [record["name"] for record in answer["records"]] == ["good"]
    assert answer["changes"] == []
    expected = [
        ("a-half.json", "not JSON"),
        ("b-list.json", "not a JSON object"),
        ("c-bytes.json", "not JSON"),
        ("d-lacks.json", "lacks commit, answer"),
        ("h-twice.json", "another file here holds the record 'good'"),
        ("i-folder.json", "Is a directory"),
    ]
    warnings = warned.splitlines()
    assert len(warnings) == len(expected)
    for line, (name, why) in zip(warnings, expected, strict=True):
        assert str(tmp_path / name) in line
        assert why in line
    assert any(line.startswith("| good") for line in lines)


def test_no_records_are_a_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty, full = tmp_path / "empty", tmp_path / "full"
    empty.mkdir()
    write_record(full, "good", {}, CPU, ["megatoken"])
    for words, said in (
        ([str(empty)], f"error: the folder holds no record — {empty} — "),
        ([str(tmp_path / "none")], f"error: no such folder of records — {tmp_path / 'none'} — "),
        ([str(full), "--against", str(empty)], f"error: the folder holds no record — {empty} — "),
    ):
        assert main(["bench", "report", *words]) == Exit.DATA
        assert capsys.readouterr().err.startswith(said)


def test_our_own_records_are_all_shown(capsys: pytest.CaptureFixture[str]) -> None:
    answer, _, warned = report(RECORDS, "--against", RECORDS, capsys=capsys)
    assert not warned
    assert {record["name"] for record in answer["records"]} == {path.stem for path in RECORDS.glob("*.json")}
    assert all(record["headline"] for record in answer["records"])
    assert all(change["ratio"] == 1 and not change["outside_noise"] for change in answer["changes"])
