"""Find the local folder of a dataset, which is fetched if it is at an address."""

from collections.abc import Callable
from pathlib import Path

from megatoken.base.rooms import load_entry
from megatoken.base.system.address import is_address, strip_file_scheme
from megatoken.base.system.atomic_write import local_path

Report = Callable[[str], None]


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
