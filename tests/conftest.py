"""What every test may ask for."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton: its kernels run on the CPU, slowly

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
