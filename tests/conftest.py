"""Fixtures of all tests.

A test with the fixture `device` runs in fp32 and in bf16. MEGATOKEN_PRECISION
(`make test PRECISION=fp32`) sets the precision of the others.
"""

import json
import os
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

# Before torch is loaded: waiting threads spin for milliseconds and take the cores of other tests.
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "10")

import torch

if TYPE_CHECKING:
    from megatoken.base.system.device import Device

if not torch.cuda.is_available():
    # Before Triton is loaded: run its kernels on the CPU, slowly.
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Count the skipped tests by what this machine lacks."""
    skips = terminalreporter.stats.get("skipped", [])
    reasons = Counter(skip.longrepr[2].removeprefix("Skipped: ") for skip in skips)
    if reasons:
        counts = (f"{count} {reason}" for reason, count in reasons.most_common())
        terminalreporter.write_line(f"skipped: {'; '.join(counts)}")


REAL_DATA = Path(__file__).parents[2] / "shared/data"


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Return a folder of third-party texts that are not part of the project."""
    if not REAL_DATA.is_dir():
        pytest.skip("no real data on this machine")
    return REAL_DATA


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the measurements of tests out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGATOKEN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def short_measurements() -> Iterator[None]:
    """Shorten measurements in this process, as tests/ranks.py does in others."""
    from tests.ranks import SHORT_MEASUREMENTS  # after TRITON_INTERPRET

    with pytest.MonkeyPatch.context() as patch:
        for name, value in SHORT_MEASUREMENTS.items():
            patch.setattr(name, value)
        yield


@pytest.fixture(scope="session")
def s3_server() -> Iterator[dict[str, str]]:
    """Return environment variables for a local S3 server; skip without s3fs or moto."""
    from tests.s3_server import serve

    with serve() as variables:
        yield variables


@pytest.fixture
def s3(s3_server: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Return an empty folder on a local S3 server."""
    for name, value in s3_server.items():
        monkeypatch.setenv(name, value)
    return f"s3://tests{tmp_path}"


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Run torch on one thread: a second one slows tiny models down."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=["fp32", "bf16"])
def device(request: pytest.FixtureRequest) -> "Device":
    """Return a CPU device that computes in fp32, then one in bf16."""
    from tests.tiny_model import CPU  # after TRITON_INTERPRET

    return replace(CPU, precision=request.param)


Call = Callable[[str], tuple[int, str, str]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Return a function that runs `megatoken LINE` and returns exit code, stdout and stderr."""
    from megatoken.cli.main import main  # after TRITON_INTERPRET

    def run(line):
        return main(shlex.split(line)), *capsys.readouterr()

    return run


Ask = Callable[[str], Any]


@pytest.fixture
def ask(call: Call) -> Ask:
    """Return a function that runs `megatoken LINE --json` and returns its result."""

    def run(line):
        code, printed, error = call(f"{line} --json")
        assert code == 0, error
        return json.loads(printed.splitlines()[-1])

    return run
