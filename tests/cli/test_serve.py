"""`megatoken serve`: from the command to the first answer and to its end, and what it refuses."""

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


def test_it_serves_until_it_is_asked_to_stop_and_finishes_an_answer(model: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "megatoken",
        "serve",
        str(model),
        "--port",
        "0",
        "--parallel",
        "2",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(
            r".*tiny: http://127\.0\.0\.1:(\d+)/ to talk, .*, until Ctrl-C\n", line
        )
        assert found, line
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "secret"}],
            "temperature": 0,
            "stream": True,
        }
        with closing(HTTPConnection("127.0.0.1", int(found[1]), timeout=120)) as connection:
            connection.request(
                "POST",
                "/v1/chat/completions",
                json.dumps(body),
                {"Content-Type": "application/json"},
            )
            with closing(connection.getresponse()) as response:
                assert response.status == 200
                assert response.readline().startswith(b"data: {")
                process.send_signal(signal.SIGTERM)
                assert response.read().endswith(b"data: [DONE]\n\n")
        out, err = process.communicate(timeout=120)
        assert (process.returncode, err) == (0, "")
        assert out == "stopping: answers on their way are finished\n"
    finally:
        process.kill()
        process.wait()


def test_it_stops_in_this_process_with_an_object(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> None:
        while signal.getsignal(signal.SIGINT) is default:
            time.sleep(0.01)
        time.sleep(0.5)  # it waits by now
        # The kernel may give a signal of the process to any thread: one that does not wake the main thread.
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    default = signal.default_int_handler  # a job in the background begins with the signal ignored
    before = signal.signal(signal.SIGINT, default)
    try:
        thread = threading.Thread(target=interrupt, daemon=True)
        thread.start()
        assert main(["serve", str(model), "--port", "0", "--json"]) == 0
        thread.join()
        assert signal.getsignal(signal.SIGINT) is default
    finally:
        signal.signal(signal.SIGINT, before)
    answer = json.loads(capsys.readouterr().out)
    assert answer["model"] == str(model)
    assert answer["address"].startswith("http://127.0.0.1:")


def test_what_cannot_be_served(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opens = "--host 0.0.0.0 opens the server to other machines"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for words, message in (
            (
                ["/no/such", "--host", "0.0.0.0"],
                f"{opens} — megatoken serve — give --api-key, which clients must send",
            ),
            (["/no/such", "--api-key", ""], "the API key is empty or holds spaces"),
            (["/no/such", "--api-key", "é"], "the API key holds signs that no header can"),
            (["/no/such", "--port", "65536"], "--port is 65536 — --port — give 0 to 65,535"),
            (["/no/such", "--parallel", "0"], "--parallel is 0"),
            (["/no/such", "--queue", "-1"], "--queue is -1"),
            (
                [str(model), "--port", port],
                f"cannot listen: Address already in use — 127.0.0.1, port {port}",
            ),
            ([str(model), "--host", "no.such.host.invalid", "--api-key", "k"], "cannot listen: "),
        ):
            assert main(["serve", *words]) == 2
            error = capsys.readouterr().err
            assert error.startswith(f"error: {message}")
            assert error.count("\n") == 1
    assert main(["serve", "/no/such/run"]) == 4
