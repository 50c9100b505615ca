"""The live line, fences and colors, in terminals of several widths and in files; broken streams."""

import io
import os
import re
import sys
from contextlib import closing, suppress
from unittest.mock import Mock

import pytest

from megatoken.base.console import Console, format_step

ROW = {
    "step": 410,
    "loss": 4.1234,
    "grad_norm": 1.02,
    "lr": 3.1e-4,
    "seconds": 0.098,
    "tokens_per_second": 5210.4,
    "mfu": 0.312,
}
LINE = format_step(ROW, ["loss 4.1234"], 1200, 5 << 28, 102.0)
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs pseudo-terminals")


def show(patch: pytest.MonkeyPatch, width: int, **variables: str) -> str:
    """Return what a terminal of `width` columns gets of a step and a rule."""
    for name in ("NO_COLOR", "FORCE_COLOR"):
        patch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm-256color", "COLUMNS": str(width), **variables}.items():
        patch.setenv(name, value)
    master, slave = os.openpty()
    encoding = variables.get("ENCODING", "utf-8")
    with open(slave, "w", encoding=encoding) as stream, patch.context() as streams:
        streams.setattr(sys, "stdout", stream)
        with closing(Console()) as console:
            console.step(LINE, share=410 / 1200)
            console.rule("a title")
    data = b""
    with suppress(OSError):  # raised at the end, once no process has the terminal open
        while part := os.read(master, 1 << 16):
            data += part
    os.close(master)
    return data.decode()


LIVE_LINES = {
    160: f"━━━─────── {LINE}",
    80: "━━━───────  34% | left 1m42s | step   410/1,200 | loss 4.1234 | 5,210 tokens/s",
    50: " 34% | left 1m42s | step   410/1,200 | loss 4.1234",
    20: " 34% | left 1m42s",
}


@LINUX
def test_the_live_line_fits_the_terminal_and_colors_are_replaced(monkeypatch: pytest.MonkeyPatch):
    for width, line in LIVE_LINES.items():
        assert line in re.split("[\r\n]+", ESCAPE.sub("", show(monkeypatch, width)))
    assert "[38" in show(monkeypatch, 80)
    assert "###-------  34%" in ESCAPE.sub("", show(monkeypatch, 80, ENCODING="ascii"))
    assert "[38" not in show(monkeypatch, 80, NO_COLOR="1")
    # It cannot replace a line.
    assert show(monkeypatch, 80, TERM="dumb") == f"{LINE}\r\n-- a title {'-' * 69}\r\n"


def test_lines_in_a_pipe_are_whole_and_plain(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("COLUMNS", "40")
    with closing(Console()) as console:
        console.step(LINE, share=0.3)
        console.step("too soon", share=0.3)
        console.step("the last", share=1, last=True)
        console.fence("step 8: sample", ["one\t\x1b[2J\x07é\r\x9b1m\n", "two"])
    first, second = (f"-- step 8: sample {n} of 2 ".ljust(80, "-") for n in (1, 2))
    expected = f"{LINE}\nthe last\n{first}\none     \\x1b[2J\\x07é\\r\\x9b1m\n\n{second}\ntwo\n{'-' * 80}\n"
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize(
    "error", [OSError(28, "full"), OSError(5, "dead"), BrokenPipeError(), ValueError("closed file")]
)
def test_a_stream_that_fails_silences_the_console(
    error: Exception, monkeypatch: pytest.MonkeyPatch
):
    stream = io.StringIO()
    monkeypatch.setattr(stream, "write", Mock(side_effect=error))
    monkeypatch.setattr(sys, "stdout", stream)
    with closing(Console()) as console:
        console.warn("lost")
        console.step(LINE, share=0.5)
        console.fence("sample", ["lost"])
    assert console.rich.quiet
