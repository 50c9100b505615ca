"""Recognize datasets in formats that are not read (foreign_formats.toml), and name a conversion."""

from pathlib import Path
from typing import Any

from megatoken.errors import DataError
from megatoken.system.table import read_table

# By name: the file patterns that identify a format, and how to convert it.
FOREIGN_FORMATS: dict[str, dict[str, Any]] = read_table(__file__)


def refuse_foreign(path: Path) -> None:
    """Raise DataError if `path` belongs to a dataset in one of FOREIGN_FORMATS.

    path: a folder that holds the files or a split's folder with them, or one of the files; for
    Megatron-LM, also their name without a suffix.
    """
    index = Path(f"{path}.idx")
    path = index if index.is_file() else path
    for folder in [path, *path.glob("*/")] if path.is_dir() else [path.parent]:
        for name, row in FOREIGN_FORMATS.items():
            has_all = all(any(folder.glob(marker)) for marker in row["markers"])
            if has_all and (path.is_dir() or any(map(path.match, row["markers"]))):
                what = f"a dataset of {name}, a format that is not read"
                raise DataError(what, path, row["fix"].replace("DIR", str(folder)))
