"""bench report of several folders: which speeds are compared, their ratios, and what is not comparable."""

import fcntl
import json
import os
import pty
import struct
import sys
import termios
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatoken.bench.report import write_record
from megatoken.cli.main import main
from megatoken.errors import ExitCode
from tests.tiny_model import CPU

GPU = replace(CPU, name="gpu")


def figure(median: float) -> dict[str, Any]:
    return {"median": median, "low": median, "high": median, "repeats": 5}


def ladder(*rates: float, preset: str = "gpt2-124m") -> dict[str, Any]:
    names = ("plain", "flash", "compile")
    rungs = [
        {"name": n, "rate": figure(r), "gain": figure(2)}
        for n, r in zip(names, rates, strict=False)
    ]
    return {"preset": preset, "rungs": rungs}


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    """Records of two machines; the loader of one of them."""
    command = ["megatoken", "bench"]
    for device, scale in ((CPU, 1), (GPU, 100)):
        folder = tmp_path / device.name
        write_record(
            folder, "ladder", ladder(10 * scale, 40 * scale, 20 * scale), device.name, command
        )
        answer = {
            "start_seconds": figure(8 / scale),
            "rows": [{"size": s, "seconds": figure(s)} for s in (1, 2)],
        }
        write_record(folder, "generate", answer, device.name, command)
    write_record(tmp_path / "cpu", "loader", {"x": figure(1)}, CPU.name, command)
    return [str(tmp_path / "cpu"), str(tmp_path / "gpu")]


def report(
    *words: str, capsys: pytest.CaptureFixture[str]
) -> tuple[list[tuple[str, ...]], list[list[str]]]:
    """(record, figure, machine, ratio) of the answer's rows; the cells of the table."""
    assert main(["bench", "report", *words]) == ExitCode.DONE
    *lines, last = capsys.readouterr().out.splitlines()
    rows = json.loads(last)["scoreboard"]
    assert all(row["value"]["median"] for row in rows)
    cells = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")
    ]
    return [
        (*(row[key] for key in ("record", "figure", "machine")), row["ratio"]) for row in rows
    ], cells[2:]


def test_of_each_machine_the_best_speed(
    folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, cells = report(*folders, "--plot", str(tmp_path / "board.png"), capsys=capsys)
    cpu, gpu = (cells[index][2] for index in (0, 1))
    assert (cpu.split(",")[0], gpu.split(",")[0]) == ("cpu", "gpu")
    assert rows == [  # a time is compared as a speed; the time of the smallest row says nothing
        ("generate", "start_seconds", cpu, 1.0),
        ("generate", "start_seconds", gpu, 100.0),
        ("ladder", "rungs[flash].rate", cpu, 1.0),
        ("ladder", "rungs[flash].rate", gpu, 100.0),
    ]
    assert [row[3:] for row in cells] == [
        ["8 s (8 to 8)", "1.00x", "#"],
        ["80 ms (80 to 80)", "100.00x", 30 * "#"],
        ["40 (40 to 40)", "1.00x", "#"],
        ["4,000 (4,000 to 4,000)", "100.00x", 30 * "#"],
    ]
    assert (tmp_path / "board.png").read_bytes().startswith(b"\x89PNG")


def test_all_speeds_of_one_record(folders: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    rows, cells = report(*folders, "--record", "ladder", capsys=capsys)
    assert [(row[1], row[3]) for row in rows] == [
        *(("rungs[plain].rate", 1.0), ("rungs[flash].rate", 4.0), ("rungs[compile].rate", 2.0)),
        *(
            ("rungs[plain].rate", 100.0),
            ("rungs[flash].rate", 400.0),
            ("rungs[compile].rate", 200.0),
        ),
    ]
    assert [len(row[4]) for row in cells] == [1, 1, 1, 8, 30, 15]
    rows, cells = report(folders[0], "--record", "ladder", capsys=capsys)
    assert [len(row) for row in cells] == [
        4,
        4,
        4,
    ]  # figure, value, ratio, bar: the machine is said above


def test_times_of_other_work_are_not_ranked(
    folders: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    rows, cells = report(folders[0], "--record", "generate", capsys=capsys)
    assert [(row[1], row[3]) for row in rows] == [
        ("start_seconds", 1.0), ("rows[1].seconds", 1.0), ("rows[2].seconds", 1.0)
    ]  # fmt: skip
    assert [len(row) for row in cells] == [2, 2, 2]  # figure, value
    rows, _ = report(*folders, "--record", "generate", capsys=capsys)
    assert len(rows) == 6


def test_on_a_terminal_it_fits_and_ends_without_json(folders: list[str], tmp_path: Path) -> None:
    pid, terminal = pty.fork()
    if not pid:
        os.environ["TERM"] = "xterm"
        os.execv(
            sys.executable,
            [
                sys.executable,
                "-m",
                "megatoken",
                "bench",
                "report",
                folders[0],
                "--record",
                "ladder",
            ],
        )
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    out = b""
    with suppress(OSError):  # the terminal's other end is closed
        while part := os.read(terminal, 1 << 16):
            out += part
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == ExitCode.DONE
    lines = out.decode().splitlines()
    assert "scoreboard" not in lines[-1]
    assert "#" in lines[-1]
    assert max(map(len, lines)) <= 80


def test_machines_of_one_name_and_other_settings(
    folders: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(Path(folders[1]), "ladder", ladder(5, preset="gpt2-355m"), CPU.name, ["megatoken"])
    assert main(["bench", "report", *folders]) == ExitCode.DONE
    out = capsys.readouterr().out
    cores = json.loads((Path(folders[0]) / "ladder.json").read_text())["hardware"]["cores"]
    first, second = f"cpu, {cores} cores (cpu)", f"cpu, {cores} cores (gpu)"
    assert f"warning: ladder: preset is gpt2-124m on {first}, gpt2-355m on {second}\n" in out
    assert json.loads(out.splitlines()[-1])["scoreboard"][-1]["machine"] == second


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--record", "lader"], ExitCode.DATA, "no speeds in a record 'lader' — "),
        (
            ["--against", "CPU"],
            ExitCode.CONFIG,
            "--against has no effect on a scoreboard — --against — ",
        ),
        (["nowhere"], ExitCode.DATA, "no records in this folder — nowhere — "),
    ],
)
def test_nothing_to_compare(
    words: list[str],
    code: ExitCode,
    message: str,
    folders: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        main(["bench", "report", *folders, *(word.replace("CPU", folders[0]) for word in words)])
        == code
    )
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_folders_that_share_nothing(
    folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(tmp_path / "third", "other", {"x": figure(1)}, CPU.name, ["megatoken"])
    assert main(["bench", "report", folders[0], str(tmp_path / "third")]) == ExitCode.DATA
    assert capsys.readouterr().err.startswith("error: no record is in two of these folders — ")
