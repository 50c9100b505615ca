"""The page of runs: its numbers are those of metrics.jsonl, nothing of a run is read as HTML, nothing is fetched."""

import html.parser
import json
import re
import shutil
import subprocess
import threading
import urllib.error
import urllib.request
from argparse import Namespace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from megatoken.cli.main import main
from megatoken.cli.report import MOST_POINTS, build_page, read_curves, serve
from megatoken.console import Console
from megatoken.errors import ExitCode

HOSTILE = "</script><script>alert('x')</script><img src=x onerror=alert(1)>"


def write_run(folder: Path, steps: int = 40, text: str = HOSTILE) -> Path:
    folder.mkdir()
    rows: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        place = {"step": step, "tokens": 512 * step, "elapsed_seconds": 0.5 * step}
        speeds = {"lr": 1e-3, "grad_norm": 0.5, "tokens_per_second": 1024.0, "mfu": 0.25}
        rows.append({"kind": "train", **place, "loss": 4.0 + 1 / step, **speeds})
    rows[2]["loss"] = "nan"
    rows.append({"kind": "val", **place, "loss": 4.125, "bits_per_byte": 1.5})
    scores = {"acc": 0.26, "acc_norm": 0.3, "acc_token_mean": None, "stderr": {"acc": 0.004, "acc_norm": 0.005}}
    rows.append({"kind": "eval", **place, "task": "hellaswag", **scores})
    rows.append({"kind": "sample", **place, "text": [text]})
    rows.append({"kind": "event", **place, "what": "warning", "message": text})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "status.json").write_text(json.dumps({"state": "done", "step": steps, "total_steps": steps}))
    (folder / "provenance.json").write_text(json.dumps({"commit": "abc", "peak_flops": 1e12, "processes": 2}))
    return folder


class Elements(html.parser.HTMLParser):
    """Every element with its attributes, and the text of the table cells."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attributes)))

    def handle_data(self, data: str) -> None:
        if self.found and self.found[-1][0] in ("td", "th", "pre"):
            self.cells.append(data)


def read_data(page: str) -> dict[str, Any]:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert match
    return dict(json.loads(match[1]))


def test_the_page_holds_the_numbers_and_nothing_of_a_run_is_html(tmp_path: Path) -> None:
    page = build_page([write_run(tmp_path / "a<b>")], price=3.6, ladder=None)
    elements = Elements(page)
    tags = [tag for tag, _ in elements.found]
    assert tags.count("script") == 2
    assert "img" not in tags
    assert HOSTILE in elements.cells  # as text
    assert {"4.1250, best 4.1250", "1.5000", "1,024", "25.0%", "20s x 2", "1.00e+13", "$0.04"} <= {*elements.cells}
    assert {"30.00 ± 0.50", "31.14"} <= {*elements.cells}  # beside the published scores
    (run,) = read_data(page)["runs"]
    assert run["name"] == "a<b>"
    assert run["train"]["loss"][:3] == [5.0, 4.5, None]
    assert run["val"] == {"step": [40], "tokens": [20480], "elapsed_seconds": [20], "loss": [4.125]}


def test_the_page_asks_no_address(tmp_path: Path) -> None:
    page = build_page([write_run(tmp_path / "a")], price=None, ladder=None)
    addresses = {
        value for _, attributes in Elements(page).found for name, value in attributes.items() if name in ("src", "href")
    }
    assert addresses == {"data:,"}
    assert set(re.findall(r"https?://[^\"' ]*", page)) == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert "default-src 'none'" in page


def test_long_runs_are_means_with_their_lowest_and_highest() -> None:
    steps = 10 * MOST_POINTS
    rows = [
        {"kind": "train", "step": s, "tokens": s, "elapsed_seconds": s, "loss": float(s % 10)} for s in range(steps)
    ]
    train = read_curves(rows)["train"]
    assert len(train["loss"]) == MOST_POINTS
    assert set(train["loss"]) == {4.5}
    assert set(train["low"]) == {0.0}
    assert set(train["high"]) == {9.0}
    assert train["step"][:2] == [4.5, 14.5]


def test_wrong_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(write_run(tmp_path / "a"))
    (tmp_path / "no.json").write_text("{}")
    for words, code, error in (
        ([str(tmp_path / "none")], ExitCode.DATA, "no metrics to read"),
        ([run, "--price", "-1"], ExitCode.CONFIG, "give dollars an hour of one process"),
        ([run, "--ladder", str(tmp_path / "no.json")], ExitCode.CONFIG, "no record of `megatoken bench ladder`"),
        ([run, "--out", "/dev/full/x.html"], ExitCode.STORAGE, "cannot write the report"),
    ):
        assert main(["report", *words]) == code
        assert error in capsys.readouterr().err


def test_the_server_shows_the_run_as_it_is_now_to_this_machine_alone(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    ready, lines = threading.Event(), []

    class Listener(Console):
        def print(self, text: str = "", style: str = "") -> None:
            lines.append(text)
            ready.set()

    options = Namespace(runs=[run], price=None, ladder=None, serve=0)
    threading.Thread(target=serve, args=(options, Listener()), daemon=True).start()
    assert ready.wait(60)
    address = lines[0].split()[0]
    with urllib.request.urlopen(address) as answer:
        data = read_data(answer.read().decode())
    assert data["live"]
    assert len(data["runs"][0]["train"]["loss"]) == 40
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 41, "tokens": 41, "loss": 3.5}\n')
    with urllib.request.urlopen(address) as answer:
        assert read_data(answer.read().decode())["runs"][0]["train"]["loss"][-1] == 3.5
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(address + "../../etc/passwd")
    port = int(address.rstrip("/").rpartition(":")[2])
    connection = HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/", headers={"Host": "evil.example:80"})
    assert connection.getresponse().status == 404


def test_a_browser_draws_every_panel_without_an_error(tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium on this machine")
    page = tmp_path / "report.html"
    page.write_text(build_page([write_run(tmp_path / "a"), write_run(tmp_path / "b")], price=None, ladder=None))
    words = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    dom = subprocess.run([browser, *words, page.as_uri()], capture_output=True, text=True, timeout=240).stdout
    drawn = Elements(dom)
    labels = [attributes["aria-label"] or "" for tag, attributes in drawn.found if attributes.get("role") == "img"]
    heads = ["loss (nats per token)", "learning rate", "gradient norm", "tokens per second", "model FLOPs", "hellaswag"]
    assert [label[:8] for label in labels] == [head[:8] for head in heads]
    assert "a: 5 to 4.025" in labels[0]
    assert [tag for tag, _ in drawn.found].count("figure") == 6
