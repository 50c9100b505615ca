"""The page of runs: numbers of metrics.jsonl, no HTML from a run, nothing fetched."""

import html
import json
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


def write_run(folder: Path, steps: int = 40, seconds: float = 0.5) -> Path:
    """Write a run of 512 tokens and `seconds` a step."""
    train, *others = map(json.loads, ROWS.replace("TEXT", HOSTILE).splitlines())
    positions = [
        {"step": step, "tokens": 512 * step, "elapsed_seconds": seconds * step}
        for step in range(1, steps + 1)
    ]
    rows = [train | {"loss": 4.0 + 1 / position["step"]} | position for position in positions]
    rows[2]["loss"] = "nan"
    rows += [row | positions[-1] for row in others]
    write_jsonl(folder / "metrics.jsonl", rows)
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


def read_data(page: str) -> Any:
    head = '<script type="application/json" id="data">'
    return json.loads(page.partition(head)[2].partition("</script>")[0])


def read_cells(page: str) -> set[str]:
    return {*map(html.unescape, re.findall(r"<(?:td|th|pre)\b[^>]*>([^<]*)", page))}


def test_the_page_holds_the_numbers_and_nothing_of_a_run_is_html(tmp_path: Path):
    """Half of the time is training: FLOPs are those of the tokens, however long the run took."""
    page = build_page([write_run(tmp_path / "a<b>", seconds=1.0)], price=3.6, ladder=None)
    assert (page.count("<script"), page.count("<img")) == (2, 0)
    assert re.findall(r"<[a-z][^>]*(?:src|href)=([^ >]*)", page) == ['"data:,"']
    assert "default-src 'none'" in page
    cells = read_cells(page)
    assert HOSTILE in cells  # as text
    numbers = {"4.1250, best 4.1250", "1.5000", "512", "25.0%", "40s x 2", "1.00e+13", "$0.08"}
    numbers |= {"1.235e+12"}  # without digits that nobody measured
    published = {"30.00 ± 0.50", "31.14", "31.00", "50.89", "3.2924"}
    assert numbers | published <= cells
    (run,) = read_data(page)["runs"]
    assert run["name"] == "a<b>"
    assert run["train"]["loss"][:3] == [5.0, 4.5, None]
    assert run["val"] == {"step": [40], "tokens": [20480], "elapsed_seconds": [40], "loss": [4.125]}


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
        def print(self, text="", style=""):
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
    assert {"memory", "later"} <= read_cells(page)
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
    port, key = match.groups()
    local = f"http://127.0.0.1:{port}/"
    assert read_data(fetch(f"{local}{key}/").text)["runs"] == []
    for path in ("", f"{key[:-1]}/", f"x{key}/", f"{key}", f"?{key}/"):
        assert fetch(local + path).status_code == 403
