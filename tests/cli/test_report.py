"""The page of runs: numbers of metrics.jsonl, no HTML from a run, nothing fetched."""

import html.parser
import json
import os
import queue
import re
import shutil
import socket
import threading
from argparse import Namespace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from megatoken.base.config.load import render, resolve
from megatoken.base.console import Console
from megatoken.study.commands.report import run as run_report
from megatoken.study.report_page import MAX_POINTS, build_page, read_curves
from tests.cli.browser import Browser
from tests.conftest import Call
from tests.processes import HANG_SECONDS
from tests.tiny_run import write_jsonl

HOSTILE = "</script><script>alert('x')</script><img src=x onerror=alert(1)>"


ROWS = """\
{"kind": "train", "lr": 1e-3, "grad_norm": 0.5, "tokens_per_second": 1024.0, "mfu": 0.25}
{"kind": "val", "loss": 4.125, "bits_per_byte": 1.5}
{"kind": "eval", "task": "hellaswag", "acc_token_mean": null, "acc": 0.26, "acc_norm": 0.3, \
"stderr": {"acc": 0.004, "acc_norm": 0.005}}
{"kind": "sample", "text": ["TEXT"]}
{"kind": "event", "what": "warning", "message": "TEXT"}
"""


def write_run(
    folder: Path, steps: int = 40, text: str = HOSTILE, seconds: float = 0.5, **more: dict[str, Any]
) -> Path:
    """Write a run of 512 tokens and `seconds` a step. more: values of its train and val rows."""
    train, *others = map(json.loads, ROWS.replace("TEXT", text).splitlines())
    positions = [
        {"step": step, "tokens": 512 * step, "elapsed_seconds": seconds * step}
        for step in range(1, steps + 1)
    ]
    rows = [train | {"loss": 4.0 + 1 / position["step"]} | position for position in positions]
    rows[2]["loss"] = "nan"
    rows += [row | positions[-1] for row in others]
    write_jsonl(folder / "metrics.jsonl", (row | more.get(row["kind"], {}) for row in rows))
    status = f'{{"state": "done", "step": {steps}, "total_steps": {steps}}}'
    (folder / "status.json").write_text(status)
    facts = '{"commit": "abc", "peak_flops": 1e12, "measured": 1234567890123.5, "processes": 2}'
    (folder / "provenance.json").write_text(facts)
    return folder


def write_config(run: Path, *settings: str) -> Path:
    """Write the recipe of a run."""
    resolved = resolve("quickstart", settings)
    (run / "config.yaml").write_text(render(resolved.config, resolved.origins))
    return run


def log(run: Path, **row: Any) -> None:
    """Append a row to a run's log."""
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


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


def read_data(page: str) -> Any:
    head = '<script type="application/json" id="data">'
    return json.loads(page.partition(head)[2].partition("</script>")[0])


def read_cells(*runs: Path, price: float | None = None) -> set[str]:
    return {*Elements(build_page(runs, price, ladder=None)).cells}


def test_flops_are_those_of_the_tokens_however_long_the_run_took(tmp_path: Path):
    """One run is half as fast, and validates for as long as it trains."""
    slow = {"tokens_per_second": 512.0, "mfu": 0.125}
    run = write_run(tmp_path / "run", seconds=2.0, train=slow)
    assert {"12.5%", "1m20s x 2", "1.00e+13"} <= read_cells(run)


def test_the_page_holds_the_numbers_and_nothing_of_a_run_is_html(tmp_path: Path):
    page = build_page([write_run(tmp_path / "a<b>")], price=3.6, ladder=None)
    elements = Elements(page)
    tags = [tag for tag, _ in elements.found]
    assert (tags.count("script"), "img" in tags) == (2, False)
    names = ("src", "href")
    links = [found[name] for _, found in elements.found for name in names if name in found]
    assert links == ["data:,"]
    assert "default-src 'none'" in page
    assert HOSTILE in elements.cells  # as text
    numbers = {"4.1250, best 4.1250", "1.5000", "1,024", "25.0%", "20s x 2", "1.00e+13", "$0.04"}
    published = {"30.00 ± 0.50", "31.14", "31.00", "50.89", "3.2924"}
    rounded = {"1.235e+12"}  # without digits that nobody measured
    assert numbers | published | rounded <= {*elements.cells}
    (run,) = read_data(page)["runs"]
    assert run["name"] == "a<b>"
    assert run["train"]["loss"][:3] == [5.0, 4.5, None]
    assert run["val"] == {"step": [40], "tokens": [20480], "elapsed_seconds": [20], "loss": [4.125]}


def test_rewards_have_curves_and_a_column(tmp_path: Path):
    rewards = {"reward": 0.25, "stopped": 0.5, "kl": 0.01}
    held_out = {"reward": 0.75, "reward_stderr": 0.0125, "stopped": 1.0}
    run = write_run(tmp_path / "grpo", steps=4, train=rewards, val=held_out)
    write_config(run, "objective.name=sft")
    base = write_run(tmp_path / "base")
    tuned, plain = read_data(build_page([run, base], price=None, ladder=None))["runs"]
    for name, value in rewards.items():
        assert tuned["train"][name] == [value] * 4
    assert (tuned["val"]["reward"], tuned["val"]["stopped"]) == ([0.75], [1.0])
    assert "answer_tokens" not in tuned["train"]
    assert "reward" not in plain["train"]
    row = {"objective", "sft", "reward", "0.250, held out 0.750 ± 0.013"}
    assert row <= read_cells(run, base)
    assert "objective" not in read_cells(base)


def test_planned_time_and_cost_are_next_to_the_actual(tmp_path: Path):
    """By the price list where the device is in it; GPU-hours of two processes."""
    run = write_run(tmp_path / "a")
    facts = {"device": "NVIDIA H100 80GB HBM3", "processes": 2}
    (run / "provenance.json").write_text(json.dumps(facts))
    log(
        run, kind="event", step=0, tokens=0, what="planned", message="", tokens_per_second=512 / 360
    )
    log(run, kind="train", step=40, tokens=20480, elapsed_seconds=18000.0, loss=4.0)
    listed = build_page([run], price=None, ladder=None)
    assert {"5h00m x 2, planned 4h00m", "$26.90, planned $21.52"} <= {*Elements(listed).cells}
    given = build_page([run], price=1.0, ladder=None)
    assert "$10.00, planned $8.00" in Elements(given).cells
    assert ("RunPod" in listed, "RunPod" in given) == (True, False)


def test_long_runs_are_means_with_their_lowest_and_highest():
    positions = ("step", "tokens", "elapsed_seconds")
    rows = [
        {"kind": "train", "loss": float(n % 10), **dict.fromkeys(positions, n)}
        for n in range(10 * MAX_POINTS)
    ]
    train = read_curves(rows)["train"]
    assert len(train["loss"]) == MAX_POINTS
    assert [{*train[name]} for name in ("loss", "low", "high")] == [{4.5}, {0.0}, {9.0}]
    assert train["step"][:2] == [4.5, 14.5]


REFUSED = """\
3 OUT/none
2 OUT/a --ladder OUT/no.json
2 OUT/a --serve --port 99999
5 OUT/a --out OUT
5 OUT/a --out /dev/full/x.html
"""


def test_bad_input_is_refused(tmp_path: Path, call: Call):
    write_run(tmp_path / "a")
    (tmp_path / "no.json").write_text("{}")
    for row in REFUSED.splitlines():
        code, arguments = row.replace("OUT", str(tmp_path)).split(maxsplit=1)
        assert call(f"report {arguments}")[0] == int(code), row


def serve_runs(folder: Path, host: str = "127.0.0.1") -> str:
    """Serve the page of the runs in a folder on a thread; return its address."""
    lines = queue.Queue[str]()

    class Listener(Console):
        def print(self, text: str = "", style: str = "") -> None:
            lines.put(text)

    address = {"host": host, "port": 0, "api_key": None}
    options = Namespace(serve=True, runs=[folder], price=None, ladder=None, **address)
    threading.Thread(target=run_report, args=(options, Listener()), daemon=True).start()
    return lines.get(timeout=HANG_SECONDS).split()[0]


def fetch(address: str, **headers: str) -> httpx2.Response:
    return httpx2.get(address, headers=headers, timeout=HANG_SECONDS)


@pytest.mark.long
def test_the_server_follows_the_runs_in_a_folder(tmp_path: Path):
    run = write_run(tmp_path / "a")
    address = serve_runs(tmp_path)
    data = read_data(fetch(address).text)
    assert data["live"]
    assert len(data["runs"][0]["train"]["loss"]) == 40
    log(run, kind="train", step=41, tokens=41, loss=3.5)
    log(run, kind="sample", step=41, tokens=41, text=["later"])
    page = fetch(f"{address}?hide=/").text
    (shown,) = read_data(page)["runs"]
    assert (shown["name"], shown["train"]["loss"][-1]) == ("a", 3.5)
    assert {"memory", "later"} <= {*Elements(page).cells}
    write_jsonl(tmp_path / "b/metrics.jsonl", [])  # a run before its first step
    data = read_data(fetch(f"{address}?hide=a").text)
    assert (data["names"], data["runs"][0]["train"]) == (["a", "b"], {})
    shutil.rmtree(run)
    assert read_data(fetch(address).text)["names"] == ["b"]
    assert fetch(f"{address}etc/passwd").status_code == 403
    assert fetch(address, host="evil.example:80").status_code == 403


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_the_server_listens_on_an_address_of_ipv6(tmp_path: Path):
    address = serve_runs(tmp_path, host="::1")
    assert address.startswith("http://[::1]:")
    assert read_data(fetch(address).text)["live"]


def test_other_machines_need_the_key(tmp_path: Path):
    address = serve_runs(tmp_path, host="0.0.0.0")
    match = re.fullmatch(r"http://[\w.-]+:(\d+)/([\w-]{22})/", address)
    assert match
    port, key = match.groups()
    local = f"http://127.0.0.1:{port}/"
    assert read_data(fetch(f"{local}{key}/").text)["runs"] == []
    for path in ("", f"{key[:-1]}/", f"x{key}/", f"{key}", f"?{key}/"):
        assert fetch(local + path).status_code == 403


def test_a_folder_of_many_runs_shows_the_newest_first(tmp_path: Path):
    for number in range(10):
        log = write_run(tmp_path / f"run-{number}", steps=3) / "metrics.jsonl"
        os.utime(log, (number, number))
    data = read_data(fetch(serve_runs(tmp_path)).text)
    assert [run["name"] for run in data["runs"]] == data["names"][2:]


def test_a_browser_shows_the_page(tmp_path: Path, browser: Browser):
    page = tmp_path / "report.html"
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b")]
    page.write_text(build_page(runs, price=None, ladder=None))
    browser.resize(390)
    browser.open(page)
    assert browser.list_requests() == [page.as_uri()]
    assert browser.evaluate("document.documentElement.scrollWidth") <= 390
    charts = "[...document.querySelectorAll('[role=img]')].map(each => each.ariaLabel)"
    labels = browser.evaluate(charts)
    assert len(labels) == 6
    assert "a: 5 to 4.025" in labels[0]
    assert "a: 25% to 25%" in labels[4]
    heads = browser.evaluate("document.querySelector('figcaption').textContent")
    assert heads == "loss (nats per token) training validation"
    browser.evaluate("document.querySelector('#legend input').click()")
    assert browser.evaluate(charts)[0].count("validation") == 1


def test_a_live_page_gets_new_samples_and_keeps_what_is_open(tmp_path: Path, browser: Browser):
    run = write_run(tmp_path / "run", text="early")
    browser.open(serve_runs(run))
    samples = "[...document.querySelectorAll('details')].map(each => [each.innerText.split('\\n').pop(), each.open])"
    assert browser.evaluate(samples) == [["early", True]]
    click = "document.querySelector('summary').click()"
    browser.evaluate(f"{click}, {click}")
    for number, text in enumerate(("later", "last"), start=1):
        log(run, kind="sample", step=40 + number, tokens=20480, elapsed_seconds=30.0, text=[text])
        browser.evaluate("void refresh()")
        browser.wait_for(f"document.querySelectorAll('details').length === {1 + number}")
    # A sample that the reader opened stays open; one that was open as the newest is closed.
    assert [is_open for _, is_open in browser.evaluate(samples)] == [True, False, True]
    assert "last" in browser.evaluate("document.querySelector('details:last-of-type').innerText")
