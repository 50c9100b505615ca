"""Fixtures of all tests.

A test that takes `precision` or `device` runs in fp32 and in bf16,
whatever this machine prefers; MEGATOKEN_PRECISION=fp32 or bf16 (`make test PRECISION=fp32`) decides for the others.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

# Before torch is loaded: threads that wait for work spin for milliseconds, which takes the cores from the other tests.
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "10")

import torch

if TYPE_CHECKING:
    from megatoken.system.device import Device

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = (
        "1"  # before anything imports Triton: its kernels run on the CPU, slowly
    )

REAL_DATA = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Folder of third-party texts that are not part of the project."""
    if not REAL_DATA.is_dir():
        pytest.skip("the real data beside the project is not here")
    return REAL_DATA


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What tests measure is not what this user's runs believe."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGATOKEN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def short_measurements() -> Iterator[None]:
    """In this process; processes of tests/ranks.py do the same."""
    from tests.ranks import SHORT_MEASUREMENTS  # after TRITON_INTERPRET

    with pytest.MonkeyPatch.context() as patch:
        for name, value in SHORT_MEASUREMENTS.items():
            patch.setattr(name, value)
        yield


@pytest.fixture(scope="session")
def s3_server() -> Iterator[dict[str, str]]:
    """Variables of the environment for a local S3 server with a bucket `tests`; skips without s3fs or moto."""
    from tests.s3_server import serve

    with serve() as variables:
        yield variables


@pytest.fixture
def s3(s3_server: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """An empty folder on a local S3 server, for this process and those it starts."""
    for name, value in s3_server.items():
        monkeypatch.setenv(name, value)
    return f"s3://tests{tmp_path}"


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch on one thread: waking a second core costs more than tiny models take."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=["fp32", "bf16"])
def precision(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test in fp32 and in bf16: what `machine.precision=auto` stands for, also in child processes."""
    monkeypatch.setenv("MEGATOKEN_PRECISION", request.param)
    return str(request.param)


@pytest.fixture
def device(precision: str) -> "Device":
    """A CPU that computes in `precision`."""
    from tests.tiny_model import CPU  # after TRITON_INTERPRET

    return replace(CPU, precision=precision)
