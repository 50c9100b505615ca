"""Read the table that belongs to a module."""

import tomllib
from pathlib import Path
from typing import Any


def read_table(module_file: str) -> dict[str, Any]:
    """Return the content of MODULE.toml, which is next to MODULE.py. module_file: its __file__."""
    return tomllib.loads(Path(module_file).with_suffix(".toml").read_text(encoding="utf-8"))
