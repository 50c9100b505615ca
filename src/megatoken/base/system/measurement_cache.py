"""Cache measurements of this machine in JSON files, with an entry per measurement."""

import json
from contextlib import suppress
from typing import Any

from megatoken.base.errors import StorageError
from megatoken.base.system.atomic_write import read_object, replace_file
from megatoken.base.system.environment import megatoken_cache
from megatoken.base.system.file_lock import lock_folder


def read_measurements(file: str) -> dict[str, Any]:
    """Return all entries of a cache file, or {} if it is missing or damaged. file: its name."""
    with suppress(RuntimeError):  # a user without a home
        return read_object(megatoken_cache() / file)
    return {}


def save_measurement(file: str, key: str, value: object) -> None:
    """Add or replace an entry of a cache file. Errors are ignored; it is then measured again."""
    with suppress(OSError, RuntimeError, StorageError):
        folder = megatoken_cache()
        with lock_folder(folder, "measurement", on_wait=lambda: None):
            entries = {**read_measurements(file), key: value}
            replace_file(folder / file, json.dumps(entries, indent=1) + "\n")
