"""Measured answers that are kept: one JSON file a measurement, with what it was measured on.

In: an answer and how it was asked for. Out: FOLDER/NAME.json. `report` reads them back.
"""

import datetime
import json
import platform
import shlex
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from megatoken.device import Device
from megatoken.errors import Exit, Fault
from megatoken.hardware import cpu_count, find_commit

PACKAGES = ("torch", "numpy", "tokenizers", "tiktoken", "transformers", "triton")


def write_record(folder: Path, name: str, answer: dict[str, Any], device: Device, command: list[str]) -> Path:
    """Keep an answer as FOLDER/NAME.json and return that path.

    command: all words, the program's name first. Raises Fault(STORAGE) when the file cannot be written.
    """
    record = {
        "name": name,
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(command),
        "commit": find_commit(),
        "hardware": {"device": device.name, "cores": cpu_count(), "system": platform.machine()},
        "versions": {"python": platform.python_version(), **_find_versions()},
        "answer": answer,
    }
    target = folder / f"{name}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(record, indent=1) + "\n")
    except OSError as wrong:
        raise Fault(Exit.STORAGE, f"cannot write record: {wrong.strerror}", str(target), "choose --out") from None
    return target


def _find_versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
