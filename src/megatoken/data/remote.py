"""Find the local folder of a dataset, which is fetched or streamed if it is at an address."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatoken.base.rooms import load_entry
from megatoken.base.system.address import is_address, strip_file_scheme
from megatoken.base.system.atomic_write import local_path

Report = Callable[[str], None]
ALL = "all"  # fetch a dataset before it is used


def no_report(line: str) -> None:
    """Discard a progress line."""


def local_dataset(path: str | Path, report: Report = no_report) -> Path:
    """Return `path`; if it is an address, fetch it and return its folder in the cache.

    report: called with a progress line when a download starts and during it.
    """
    path = strip_file_scheme(str(path))
    if not is_address(path):
        return local_path(path)
    folder: Path = load_entry("address", "dataset")(path, report)
    return folder


def open_stream(path: str | Path, cache: str, report: Report = no_report) -> Any:
    """Return the streamed folder of a dataset at an address (store/stream.py).

    Return None if it is local, or fetched completely: cache is "all", or it is not prepared text.
    """
    if cache == ALL or not is_address(strip_file_scheme(str(path))):
        return None
    limit = round(float(cache[:-2]) * {"MB": 1e6, "GB": 1e9, "TB": 1e12}[cache[-2:]])
    return load_entry("address", "stream")(str(path), limit, report)
