"""Suggest a setting for a misspelled key, or for the name that another program uses."""

from pathlib import Path

import yaml

from megatoken.base.config.schema import FIELDS
from megatoken.base.suggest import suggest

WORDS = Path(__file__).with_name("words.yaml")


def suggest_setting(key: str) -> str:
    """Return a hint for an unknown key: "did you mean 'KEY'?", or how to list all settings."""
    words: dict[str, str] = yaml.safe_load(WORDS.read_text(encoding="utf-8"))
    words = {word: text for word, text in words.items() if text.partition(" ")[0] in FIELDS}
    words |= {name.rpartition(".")[2]: name for name in FIELDS}
    last = key[:100].replace("-", "_").rpartition(".")[2]
    match = words.get(last) or suggest(key[:100], FIELDS) or words.get(suggest(last, words) or "")
    if not match:
        return "see `megatoken train --help`"
    setting, _, note = match.partition(" ")
    return f"did you mean '{setting}'? {note}".strip()
