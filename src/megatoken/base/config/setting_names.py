"""Suggest a setting for a misspelled key, or for the name that another program uses."""

from pathlib import Path

import yaml

from megatoken.base.config.schema import FIELDS
from megatoken.base.suggest import suggest

OTHER_NAMES = Path(__file__).with_suffix(".yaml")


def suggest_setting(key: str) -> str:
    """Return a hint for an unknown key: "did you mean 'KEY'?", or how to list all settings."""
    names: dict[str, str] = yaml.safe_load(OTHER_NAMES.read_text(encoding="utf-8"))
    names = {name: text for name, text in names.items() if text.partition(" ")[0] in FIELDS}
    names |= {key.rpartition(".")[2]: key for key in FIELDS}
    last = key[:100].replace("-", "_").rpartition(".")[2]
    match = names.get(last) or suggest(key[:100], FIELDS) or names.get(suggest(last, names) or "")
    if not match:
        return "see `megatoken train --help`"
    setting, _, note = match.partition(" ")
    return f"did you mean '{setting}'? {note}".strip()
