"""Recognize files and datasets in formats that are not read (foreign_formats.toml)."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from megatoken.errors import DataError
from megatoken.system.table import read_table

# datasets: by name, the file patterns that together identify one, and how to convert it. files: by
# name, a file's pattern, what it starts with (or does not), and how to convert it.
FOREIGN_FORMATS: dict[str, dict[str, dict[str, Any]]] = read_table(__file__)


def refuse_foreign(path: Path) -> None:
    """Raise DataError if `path` belongs to a dataset in one of FOREIGN_FORMATS.

    path: a folder that holds the files or a split's folder with them, or one of the files; for
    Megatron-LM, also their name without a suffix.
    """
    index = Path(f"{path}.idx")
    path = index if index.is_file() else path
    for folder in [path, *path.glob("*/")] if path.is_dir() else [path.parent]:
        for name, row in FOREIGN_FORMATS["datasets"].items():
            has_all = all(any(folder.glob(marker)) for marker in row["markers"])
            if has_all and (path.is_dir() or any(map(path.match, row["markers"]))):
                what = f"a dataset of {name}, a format that is not read"
                raise DataError(what, path, row["fix"].replace("DIR", str(folder)))


def find_foreign(path: Path) -> DataError | None:
    """Return an error that names the format of a file, if that is one of FOREIGN_FORMATS."""
    head = b""
    with suppress(OSError), path.open("rb") as file:
        head = file.read(16)
    for name, row in FOREIGN_FORMATS["files"].items():
        is_start = head.startswith(row.get("start", "").encode("latin-1"))
        is_other = "other" in row and head.startswith(row["other"].encode("latin-1"))
        if path.match(row["pattern"]) and is_start and not is_other:
            fix = row["fix"].replace("FILE", str(path))
            return DataError(f"{name}, a format that is not read", path, fix)
    return None
