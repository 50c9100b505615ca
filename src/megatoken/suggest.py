"""Suggest a valid name for a misspelled one."""

import difflib
from collections.abc import Iterable


def suggest(word: str, choices: Iterable[str]) -> str | None:
    """Return the choice closest to `word`, ignoring case, or None if none is close."""
    choice_of = {choice.lower(): choice for choice in choices}
    matches = difflib.get_close_matches(word.lower(), choice_of, n=1)
    return choice_of[matches[0]] if matches else None
