"""Tell addresses such as s3://bucket/run from local paths."""

import re
from pathlib import Path

from megatoken.base.errors import ConfigError
from megatoken.base.system.atomic_write import local_path


def is_address(text: str | Path) -> bool:
    """Return whether a text is an address such as s3://bucket/data, not a local path."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", str(text)) is not None


def path_or_address(text: str) -> Path | str:
    """Convert text to a local path, unless it is an address.

    Raises ConfigError if it is neither.
    """
    text = strip_file_scheme(text)
    return text if is_address(text) else local_path(text)


def strip_file_scheme(text: str) -> str:
    """Convert file:///path to /path, and leave anything else unchanged."""
    return re.sub("^file:///", "/", text)


def run_folder(text: str | Path) -> Path:
    """Return the local path of a run folder. Raises ConfigError for an address or invalid path."""
    if is_address(text):
        fix = f"train in a local folder, with a copy there: save.mirror={text}"
        raise ConfigError(f"not a path on this machine: {text}", "--out", fix)
    return local_path(text)
