"""`megatoken serve` as a process, its end by a signal, and what it refuses."""

import re
import signal
import socket
import threading
from pathlib import Path

import httpx2
import pytest

from megatoken.base.errors import ExitCode
from megatoken.convert.hf.export import write_hf
from tests.cli.conftest import run_command
from tests.conftest import Ask, Call
from tests.inference.served import build_model, user
from tests.processes import HANG_SECONDS, wait_until
from tests.ranks import start_process


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    write_hf(folder, *build_model(), "fp32")
    return folder


@pytest.mark.long
def test_sigterm_finishes_a_running_answer(model: Path, tmp_path: Path):
    log = tmp_path / "log"
    log.touch()
    process = start_process(run_command, f"serve {model} --port 0".split(), log)
    try:
        wait_until(lambda: "\n" in log.read_text() or not process.is_alive())
        printed = log.read_text()
        match = re.search(r"http://127\.0\.0\.1:\d+/", printed)
        body = {"messages": [user("secret")], "seed": 0, "stream": True, "model": "tiny"}
        url = f"{match[0]}v1/chat/completions"
        with httpx2.stream("POST", url, json=body, timeout=HANG_SECONDS) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: {")
            process.terminate()
            assert list(lines)[-2:] == ["data: [DONE]", ""]
        process.join()
        assert (process.exitcode, log.read_text()) == (0, printed)
    finally:
        process.kill()


def test_sigint_ends_it_with_a_json_object(model: Path, ask: Ask):
    def interrupt():
        wait_until(lambda: signal.getsignal(signal.SIGINT) is not default)
        signal.raise_signal(signal.SIGINT)

    default = signal.default_int_handler  # a background job starts with the signal ignored
    previous = signal.signal(signal.SIGINT, default)
    try:
        threading.Thread(target=interrupt, daemon=True).start()
        result = ask(f"serve {model} --port 0")
        assert signal.getsignal(signal.SIGINT) is default
    finally:
        signal.signal(signal.SIGINT, previous)
    assert result["model"] == str(model)
    assert result["address"].startswith("http://127.0.0.1:")


REFUSED = """--host 0.0.0.0
--port 65536
--port USED
--parallel 0
--queue -1
--host no.such.host.invalid --api-key k"""


def test_refused_options(model: Path, call: Call):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        used = str(listener.getsockname()[1])
        for options in REFUSED.replace("USED", used).splitlines():
            code, _, error = call(f"serve {model} {options}")
            assert (code, error.count("\n")) == (ExitCode.CONFIG, 1)
