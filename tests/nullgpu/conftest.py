"""Skip the tests of this folder where the null GPU is not loaded (`make test-cuda`)."""

from pathlib import Path

import pytest

from tests.nullgpu.counters import is_loaded


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark = pytest.mark.skip(reason="the null GPU is not loaded: make test-cuda")
    if is_loaded():
        mark = pytest.mark.filterwarnings("ignore")  # of torch versions that we do not pin
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(mark)
