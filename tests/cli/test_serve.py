"""`megatoken serve` as a process, its end by a signal, and what it refuses."""

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import pytest

from megatoken.cli.main import main
from megatoken.convert.hf.export import write_hf
from tests.serving.served import build_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    write_hf(folder, *build_model(), "fp32")
    return folder


def test_sigterm_finishes_a_running_answer(model: Path):
    command = [sys.executable, "-m", "megatoken", "serve", str(model), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        match = re.search(r"http://127\.0\.0\.1:(\d+)/", process.stdout.readline())
        assert match
        messages = [{"role": "user", "content": "secret"}]
        body = json.dumps({"model": "tiny", "messages": messages, "seed": 0, "stream": True})
        headers = {"Content-Type": "application/json"}
        with closing(HTTPConnection("127.0.0.1", int(match[1]), timeout=120)) as connection:
            connection.request("POST", "/v1/chat/completions", body, headers)
            with closing(connection.getresponse()) as response:
                assert response.readline().startswith(b"data: {")
                process.send_signal(signal.SIGTERM)
                assert response.read().endswith(b"data: [DONE]\n\n")
        assert process.communicate(timeout=120) == ("", "")
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()


def test_sigint_ends_it_with_a_json_object(model: Path, capsys: pytest.CaptureFixture[str]):
    def interrupt() -> None:
        while signal.getsignal(signal.SIGINT) is default:
            time.sleep(0.01)
        signal.raise_signal(signal.SIGINT)

    default = signal.default_int_handler  # a background job starts with the signal ignored
    previous = signal.signal(signal.SIGINT, default)
    try:
        threading.Thread(target=interrupt, daemon=True).start()
        assert main(["serve", str(model), "--port", "0", "--json"]) == 0
        assert signal.getsignal(signal.SIGINT) is default
    finally:
        signal.signal(signal.SIGINT, previous)
    answer = json.loads(capsys.readouterr().out)
    assert answer["model"] == str(model)
    assert answer["address"].startswith("http://127.0.0.1:")


def test_refused_options(model: Path, capsys: pytest.CaptureFixture[str]):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        for options in (
            "--host 0.0.0.0",
            "--port 65536",
            "--parallel 0",
            "--queue -1",
            f"--port {port}",
            "--host no.such.host.invalid --api-key k",
        ):
            assert main(f"serve {model} {options}".split()) == 2
            assert capsys.readouterr().err.count("\n") == 1
    assert main(["serve", "/no/such/run"]) == 4
