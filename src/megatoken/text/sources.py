"""Find a corpus: local files, folders and patterns, and a few corpora by name.

The result is a sorted list of files.
"""

import glob
import hashlib
import os
import re
import sysconfig
import urllib.request
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO

from megatoken.base.errors import ConfigError, DataError
from megatoken.base.rooms import list_entries, load_entry
from megatoken.base.system.atomic_write import local_path, replace_file
from megatoken.base.system.environment import megatoken_cache
from megatoken.base.system.table import read_table
from megatoken.data.shard_format import DESCRIPTION_NAME, hash_bytes
from megatoken.text.file_kinds import (
    FORMATS,
    FileFormat,
    find_compression,
    find_foreign,
    find_format,
    find_split,
)

# Files that describe a dataset; they are skipped in folders.
_CARD = re.compile(r"(readme|dataset_?card|dataset_infos?|dataset_dict)(\.\w+)?", re.IGNORECASE)

SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"

# name -> (dataset repository on the Hugging Face hub, its files)
HUB: dict[str, list[str]] = read_table(__file__)["hub"]
_TIMEOUT_SECONDS = 10

# The corpus "python" excludes tests, installed packages, demos and tables. A table is a file with
# at least _TABLE_SHARE of its bytes in lines that begin with a number or a string, not a docstring.
_NOT_PYTHON = {
    *("test", "tests", "idle_test", "site-packages", "dist-packages"),
    *("idlelib", "lib2to3", "turtledemo", "encodings", "pydoc_data"),
}
_TABLE_LINE = re.compile(rb"""^[ \t([{+-]*(?:[bru]{0,2}(?:'(?!'')|"(?!""))|\d).*""", re.MULTILINE)
_TABLE_SHARE = 0.3


def open_local(file: "File") -> BinaryIO:
    """Open a local file. Raises DataError if it changed since it was listed."""
    stream = open(file.path, "rb")  # noqa: SIM115 (the caller closes it)
    status = os.fstat(stream.fileno())
    if (status.st_size, status.st_mtime_ns) != (file.size, file.changed):
        stream.close()
        fix = "delete the output folder and prepare again"
        raise DataError("file changed while it was prepared", file.path, fix)
    return stream


def open_on_hub(file: "File") -> BinaryIO:
    """Open a file on the Hugging Face hub."""
    from huggingface_hub import HfFileSystem

    stream: BinaryIO = HfFileSystem().open(file.path, "rb")
    return stream


@dataclass(frozen=True)
class File:
    """An input file.

    name: path relative to the corpus. size: bytes on disk, or of generated text. changed: mtime in
    ns, 0 if unknown. format: how it is divided into documents. opener: opens it, in any process.
    split: "val", or "" if each document is assigned by a hash, if at all.
    """

    name: str
    path: str
    size: int
    changed: int
    format: FileFormat
    opener: Callable[["File"], BinaryIO] = open_local
    split: str = ""

    @property
    def is_packed(self) -> bool:
        """Whether the file is compressed, so that its text is longer than `size`."""
        return bool(find_compression(self.name)) or self.format == "parquet"


@dataclass(frozen=True)
class Source:
    """The files of a corpus, in reading order.

    skipped: how many files were left out, by extension or name.
    """

    name: str
    files: tuple[File, ...]
    skipped: Mapping[str, int] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Total size of the files on disk."""
        return sum(file.size for file in self.files)

    @property
    def has_val(self) -> bool:
        """Whether some files are the validation split."""
        return any(file.split for file in self.files)

    def digest(self, *, times: bool) -> str:
        """Return the xxh3_128 hex of all file names, sizes and splits.

        times: whether to include the modification times.
        """
        rows = (
            f"{file.name}\0{file.size}\0{file.changed if times else ''}{file.split}\n"
            for file in self.files
        )
        return hash_bytes("".join(rows).encode(errors="surrogateescape"))


def find_source(spec: str, root: Path | None = None, exclude: Path | None = None) -> Source:
    """Return the files that `spec` names, sorted by name.

    spec: a named corpus, which is a room's entry or in HUB, a file, a folder or a glob pattern.
    root: a local copy of a named corpus. exclude: the output folder, which is skipped like any
    other dataset or run. Raises DataError if there is no text file, and ConfigError if `spec` names
    both a corpus and a local path.
    """
    is_named = spec in {*list_entries("corpus"), *HUB}
    if is_named and root is None and Path(spec).exists():
        fix = f"write ./{spec} for the local one"
        raise ConfigError(f"{spec} is a corpus, and also a local path", spec, fix)
    if is_named:
        find = _find_on_hub if spec in HUB else load_entry("corpus", spec)
        found: Source = find(spec, root)
        return found
    path = local_path(spec)
    if error := find_foreign(path):
        raise error
    if path.is_dir():
        paths = [path / name for name in _walk(path, exclude)]
        return _list_local(path.resolve().name, path, paths, in_folder=True)
    if path.is_file():
        return _list_local(path.name, path.parent, [path])
    matches = map(Path, glob.glob(spec, recursive=True))  # noqa: PTH207 (absolute patterns)
    paths = [path for path in matches if path.is_file()]
    outputs = {folder for path in paths for folder in path.parents if _is_output(folder, exclude)}
    paths = [path for path in paths if outputs.isdisjoint(path.parents)]
    start = os.path.commonpath([path.parent for path in paths]) if paths else spec
    return _list_local(Path(spec).name, Path(start), paths)


def find_corpus(
    spec: str, root: Path | None = None, exclude: Path | None = None, val: str | None = None
) -> Source:
    """Return the files to prepare: those of `find_source`, each with its split.

    val: names the validation files like `spec`. By default, files are split by their names. Test
    files, and with `val` files named as validation, are skipped and counted. If that leaves no file
    to train on, names are ignored. Raises ConfigError if all files are in `val`.
    """
    source = find_source(spec, root, exclude)
    named = find_source(val).files if val else ()
    paths = {Path(file.path).resolve() for file in named}
    splits = {}
    for file in source.files:
        if not paths or Path(file.path).resolve() not in paths:
            # Words in the names of programs, such as test_model.py, are no splits.
            is_text = file.format != "whole" or ".md" in file.name
            splits[file] = find_split(file.name) if is_text else ""
    if not splits:
        raise ConfigError("all files of the source are for validation", "--val", "name other files")
    if {"", "train"}.isdisjoint(splits.values()):
        splits = dict.fromkeys(splits, "")
    left_out = ("test", "val") if val else ("test",)
    skipped = Counter(f"named {split}" for split in splits.values() if split in left_out)
    val_files = named or [file for file, split in splits.items() if split == "val"]
    files = [file for file, split in splits.items() if split in ("", "train")]
    files += [replace(file, split="val") for file in val_files]
    return Source(source.name, tuple(files), {**source.skipped, **skipped})


def describe_skipped(skipped: Mapping[str, int]) -> str:
    """FileFormat the counts of `Source.skipped`: {".pdf": 2, ".png": 1} as "2 .pdf, 1 .png"."""
    return ", ".join(f"{count:,} {name}" for name, count in Counter(skipped).most_common())


def find_python(name: str, root: Path | None) -> Source:
    """Return the modules of Python's standard library, or of `root`."""
    library = Path(root or sysconfig.get_paths()["stdlib"])
    names = _walk(library, None, _NOT_PYTHON)
    paths = [library / each for each in names if each.endswith(".py")]
    return _list_local(name, library, [path for path in paths if not _is_table(path)])


def find_shakespeare(name: str, root: Path | None) -> Source:
    """Return Karpathy's text of Shakespeare, in `root` or downloaded."""
    if root is not None:
        return _list_local(name, root, [root / "input.txt"])
    path = megatoken_cache() / "tinyshakespeare.txt"
    download(SHAKESPEARE_URL, path, SHAKESPEARE_SHA256)
    file = _list_local(name, path.parent, [path]).files[0]
    return Source(name, (replace(file, name="input.txt"),))


def _is_table(path: Path) -> bool:
    text = path.read_bytes()
    in_table = sum(len(line.lstrip()) for line in _TABLE_LINE.findall(text))
    return in_table > _TABLE_SHARE * sum(len(line.lstrip()) for line in text.splitlines())


def _find_on_hub(name: str, root: Path | None) -> Source:
    """List the files of a corpus on the Hugging Face hub, or in `root`.

    Files on the hub are read over the network during preparation.
    """
    repository, pattern = HUB[name]
    if root:
        return _list_local(name, root, root.glob(pattern))
    folder = f"datasets/{repository}/"
    try:
        from huggingface_hub import HfFileSystem

        listing: dict[str, Any] = HfFileSystem().glob(folder + pattern, detail=True)
    except Exception as error:  # the hub, its cache and the network raise their own exceptions
        what = f"cannot read {name}: {type(error).__name__}: {error!s:.200}"
        fix = f"check the connection, or name a folder with {pattern} by --root"
        raise DataError(what, f"dataset {repository}", fix) from error
    files = tuple(
        File(path.removeprefix(folder), path, int(row["size"]), 0, "parquet", open_on_hub)
        for path, row in sorted(listing.items())
    )
    return Source(name, files)


def _list_local(
    name: str, folder: Path, paths: Iterable[Path], *, in_folder: bool = False
) -> Source:
    """Return those of `paths` that hold text as a source. Every path is below `folder`.

    in_folder: whether the paths were found in a folder, not named by the user. Then those of
    unknown formats are left out and counted by extension, like files that describe a dataset;
    otherwise, they are read as text. Raises DataError if no file is left.
    """
    files: list[File] = []
    skipped: Counter[str] = Counter()
    foreign: list[DataError] = []
    for path in paths:
        file_format = find_format(path)
        is_card = in_folder and _CARD.fullmatch(path.name)
        error = None if file_format else find_foreign(path)
        if is_card or error or (in_folder and not file_format):
            skipped[path.name if is_card else path.suffix or "no extension"] += 1
            foreign += [error] if error else []
            continue
        try:
            status = path.stat()
        except OSError as failure:
            raise DataError(f"cannot read: {failure.strerror}", path, "check the path") from failure
        size, changed = status.st_size, status.st_mtime_ns
        relative = path.relative_to(folder).as_posix()
        files.append(File(relative, str(path), size, changed, file_format or "whole"))
    if not files:
        left_out = f" (skipped: {describe_skipped(skipped)})" if skipped else ""
        corpora = ", ".join([*list_entries("corpus"), *HUB])
        fix = f"name {', '.join(FORMATS)} files, or a corpus: {corpora}"
        raise next(iter(foreign), DataError(f"no text files here{left_out}", folder, fix))
    return Source(name, tuple(sorted(files, key=attrgetter("name", "path"))), skipped)


def _walk(folder: Path, exclude: Path | None, skip: Collection[str] = ()) -> Iterator[str]:
    """Yield the relative name of every file below a folder, except hidden ones.

    Follows links to folders, and visits each folder once. skip: names of folders to skip.
    """
    visited = set[Path]()
    for parent, folders, names in os.walk(folder, onerror=_refuse_folder, followlinks=True):
        target = Path(parent).resolve()
        if target in visited or _is_output(Path(parent), exclude):
            folders.clear()
            continue
        visited.add(target)
        folders[:] = sorted(it for it in folders if not it.startswith(".") and it not in skip)
        for name in names:
            path = Path(parent, name)
            if not name.startswith(".") and path.is_file():
                yield path.relative_to(folder).as_posix()


def _refuse_folder(error: OSError) -> None:
    what = f"cannot read the folder: {error.strerror}"
    raise DataError(what, error.filename, "check its permissions") from error


def _is_output(folder: Path, out: Path | None) -> bool:
    """Return whether `folder` is `out`, or a dataset or run."""
    is_out = out is not None and folder.resolve() == out.resolve()
    return is_out or (folder / "tokenizer" / DESCRIPTION_NAME).is_file()


def download(url: str, target: Path, sha256: str, alternative: str = "") -> bytes:
    """Return the bytes at `url`, cached in `target`.

    alternative: advice to add to the error message. Raises DataError if the download fails or has
    another sha256.
    """
    with suppress(OSError):
        cached = target.read_bytes()
        if hashlib.sha256(cached).hexdigest() == sha256:
            return cached
    fix = f"download it elsewhere and place it at {target}{alternative}"
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as response:
            data: bytes = response.read()
    except OSError as error:  # URLError and time-outs are OSErrors
        raise DataError(f"cannot download: {error}", url, fix) from error
    actual = hashlib.sha256(data).hexdigest()
    if actual != sha256:
        raise DataError(f"download has sha256 {actual}, expected {sha256}", url, fix)
    with suppress(OSError):  # the cache is optional
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_file(target, data)
    return data
