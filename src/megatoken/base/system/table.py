"""Read the table that belongs to a module."""

import tomllib
from pathlib import Path
from typing import Any

import yaml


def read_table(module_file: str) -> dict[str, Any]:
    """Return the content of MODULE.toml or MODULE.yaml, which is next to MODULE.py.

    module_file: the module's __file__.
    """
    path = Path(module_file)
    toml = path.with_suffix(".toml")
    if toml.exists():
        return tomllib.loads(toml.read_text(encoding="utf-8"))
    table: dict[str, Any] = yaml.safe_load(path.with_suffix(".yaml").read_text(encoding="utf-8"))
    return table
