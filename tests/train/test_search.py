"""A run with random settings has the same bits when stopped, and the same losses on other ranks."""

import random
from pathlib import Path

import pytest

from tests.train.search import BASE, MODEL, Case, write_data


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_data(folder)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("seed", [2, 3, 4, 5, 6])
def test_random_settings(data: Path, tmp_path: Path, seed: int):
    Case(random.Random(seed), data).check(tmp_path)


@pytest.mark.long
def test_a_stopped_run_ends_bit_identical_on_two_threads(data: Path, tmp_path: Path):
    """The gradients of LayerNorm's parameters depend on the number of torch's threads."""
    case = Case(random.Random(2), data)
    torch = "model.norm=layernorm machine.precision=fp32 machine.gemm_backend=torch"
    kernels = "machine.attention=auto machine.fused=auto"
    case.settings = f"{BASE} {MODEL} {torch} {kernels} data.path={data}/a/*.npy"
    case.nprocs, case.precision, case.is_deterministic = 1, "fp32", False
    case.check(tmp_path)
