"""Suggest a valid name for a misspelled one."""

import difflib
from collections.abc import Iterable


def suggest(name: str, choices: Iterable[str]) -> str | None:
    """Return the first choice that starts with `name`, or the closest one, or None.

    Case is ignored.
    """
    choice_of = {choice.lower(): choice for choice in choices}
    matches = [choice for choice in choice_of if choice.startswith(name.lower())]
    matches = matches or difflib.get_close_matches(name.lower(), choice_of, n=1)
    return choice_of[matches[0]] if matches else None
