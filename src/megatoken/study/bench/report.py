"""Records of benchmarks as JSON files, and pictures of their results."""

import datetime
import json
import platform
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from megatoken.base.console import Console
from megatoken.base.errors import MegatokenError
from megatoken.base.redact import redact
from megatoken.base.system.atomic_write import replace_file, storage_errors
from megatoken.base.system.machine import cpu_count, find_commit
from megatoken.base.system.metrics_log import Row
from megatoken.model.native.build import runnable_instruction_sets

PACKAGES = ("torch", "numpy", "tokenizers", "tiktoken", "transformers", "triton")


def write_record(folder: Path, name: str, result: Row, device: str, command: Sequence[str]) -> Path:
    """Write a benchmark's result to FOLDER/NAME.json and return the path.

    The record also has the command, the commit, the hardware and the versions. Absolute paths in
    the command are reduced to their names. Raises StorageError.
    """
    words = [Path(word).name if word.startswith("/") else word for word in command]
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    record = {
        "name": name,
        "date": datetime.date.today().isoformat(),
        "command": redact(shlex.join(words)),
        "commit": find_commit(),
        "hardware": {
            "device": device,
            "cores": cpu_count(),
            "system": platform.machine(),
            "instructions": next(iter(runnable_instruction_sets()), ""),
        },
        "versions": versions,
        "answer": result,
    }
    path = folder / f"{name}.json"
    with storage_errors(folder, what="cannot write record", fix="choose --out"):
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(record, indent=1) + "\n")  # a record is complete or absent
    return path


def save_picture(draw: Callable[[Path], Path], path: Path, console: Console) -> None:
    """Call `draw(path)` and print where the picture is, or why it could not be drawn."""
    try:
        console.print(f"picture: {draw(path)}")
    except MegatokenError as error:
        console.print(f"not drawn: {error}")
