"""Data and finished runs that the tests of a process share."""

import pytest

from tests.tiny_run import write_shards


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the setting of shards of a repetitive text."""
    return write_shards(tmp_path_factory.mktemp("shards"))
