"""Find a corpus: local files, folders and patterns, and a few corpora by name.

The result is a sorted list of files.
"""

import glob
import hashlib
import io
import os
import re
import sysconfig
import urllib.request
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

import xxhash

from megatoken.data.exercises import EXERCISES
from megatoken.data.shard_format import DESCRIPTION_NAME
from megatoken.errors import ConfigError, DataError
from megatoken.system.atomic_write import local_path, replace_file
from megatoken.system.environment import megatoken_cache

# separated: documents between <|endoftext|>; whole: one document; the others: rows with named fields.
Format = Literal["separated", "whole", "json", "csv", "tsv", "parquet"]
Compression = Literal["", "gz", "zst"]

ROW_FORMATS: dict[str, Format] = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".json": "json",  # a row per line, or one array of rows
    ".jsonl": "json",
    ".ndjson": "json",
}
FORMATS: dict[str, Format] = {".txt": "separated", **ROW_FORMATS}  # any other suffix is "whole"
COMPRESSIONS: dict[str, Compression] = {".gz": "gz", ".zst": "zst"}
IN_FOLDERS = (*FORMATS, ".md")  # read from a folder; other files must be named
# Descriptions of a dataset, which are skipped in folders.
_CARD = re.compile(r"(readme|dataset_?card|dataset_infos?|dataset_dict)(\.\w+)?", re.IGNORECASE)

SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"

# name -> dataset repository on the Hugging Face hub, its files
HUB = {
    "tinystories": ("roneneldan/TinyStories", "data/train-*.parquet"),
    "fineweb": ("HuggingFaceFW/fineweb", "sample/10BT/*.parquet"),
    "fineweb-100bt": ("HuggingFaceFW/fineweb", "sample/100BT/*.parquet"),
    "fineweb-350bt": ("HuggingFaceFW/fineweb", "sample/350BT/*.parquet"),
    "fineweb-full": ("HuggingFaceFW/fineweb", "data/*/*.parquet"),
    "fineweb-edu": ("HuggingFaceFW/fineweb-edu", "sample/10BT/*.parquet"),
    "fineweb-edu-100bt": ("HuggingFaceFW/fineweb-edu", "sample/100BT/*.parquet"),
    "fineweb-edu-350bt": ("HuggingFaceFW/fineweb-edu", "sample/350BT/*.parquet"),
    "fineweb-edu-full": ("HuggingFaceFW/fineweb-edu", "data/*/*.parquet"),
}
_TIMEOUT_SECONDS = 10
INSTALL_DATA = 'pip install "megatoken[data]"'
NAMES = ("python", "tinyshakespeare", *EXERCISES, *HUB)

# Not in the corpus "python": tests, installed packages, demos, and tables, which are files with at
# least _TABLE_SHARE of their bytes in lines that begin with a string or a number (not a docstring).
_NOT_PYTHON = {
    *("test", "tests", "idle_test", "site-packages", "dist-packages"),
    *("idlelib", "lib2to3", "turtledemo", "encodings", "pydoc_data"),
}
_TABLE_LINE = re.compile(rb"""^[ \t([{+-]*(?:[bru]{0,2}(?:'(?!'')|"(?!""))|\d).*""", re.MULTILINE)
_TABLE_SHARE = 0.3


@dataclass(frozen=True, slots=True)
class File:
    """An input file. name: relative, for the listing; changed: mtime in ns, 0 if unknown."""

    name: str
    path: str
    size: int
    changed: int
    format: Format
    compression: Compression

    @property
    def is_packed(self) -> bool:
        """Whether the text is longer than the file."""
        return bool(self.compression) or self.format == "parquet"


@dataclass(frozen=True, slots=True)
class Source:
    """Files in reading order.

    direct: the user named this one file, so it must be text. skipped: number of files that were
    not listed, by extension or reason.
    """

    name: str
    files: tuple[File, ...]
    open: Callable[[File], BinaryIO]
    direct: bool = False
    skipped: Mapping[str, int] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Bytes of all files on disk."""
        return sum(file.size for file in self.files)

    @property
    def has_rows(self) -> bool:
        """Whether any file holds rows with named fields."""
        return any(file.format in ROW_FORMATS.values() for file in self.files)

    def digest(self, *, times: bool) -> str:
        """Return the xxh3_128 of all names and sizes, with `times` also of modification times."""
        rows = (
            f"{file.name}\0{file.size}\0{file.changed if times else ''}\n" for file in self.files
        )
        return str(xxhash.xxh3_128_hexdigest("".join(rows).encode(errors="surrogateescape")))


def find_source(spec: str, root: Path | None = None, exclude: Path | None = None) -> Source:
    """Return the files of `spec`, sorted by name: one of NAMES, a file, a folder or a pattern.

    root: a local copy of a named corpus. exclude: the output folder, which is skipped, as are other
    datasets and runs. Raises DataError if nothing readable is found, ConfigError if `spec` names
    both a corpus and a local file.
    """
    path = local_path(spec)
    if spec in NAMES:
        if path.exists() and not root:
            fix = f"write ./{spec} for the local one"
            raise ConfigError(f"{spec} is a corpus, and also a local path", path, fix)
        return _find_corpus(spec, root)
    if root:
        raise ConfigError(f"--root does not apply to {spec}", "--root", f"use it with {NAMES[0]}")
    if path.is_file():
        return _list_local(path.name, [(path.name, path)], direct=True)
    if path.is_dir():
        return _list_folder(path, exclude)
    if glob.has_magic(spec):
        return _list_pattern(spec, exclude)
    fix = f"check the path; the named corpora are {', '.join(NAMES)}"
    raise DataError("no such file, folder or corpus", spec, fix)


def describe_skipped(skipped: Mapping[str, int]) -> str:
    """Return "2 .pdf, 1 README.md" for the counts of `Source.skipped`."""
    by_count = sorted(skipped.items(), key=lambda item: -item[1])
    return ", ".join(f"{count:,} {name}" for name, count in by_count)


def _find_corpus(name: str, root: Path | None) -> Source:
    if name == "python":
        return _find_python(Path(root or sysconfig.get_paths()["stdlib"]))
    if name in EXERCISES:
        content = EXERCISES[name]()
        file = File(f"{name}.jsonl", name, len(content), 0, "json", "")
        return Source(name, (file,), lambda _: io.BytesIO(content), direct=True)
    if name == "tinyshakespeare":
        path = root / "input.txt" if root else megatoken_cache() / "tinyshakespeare.txt"
        if not root:
            download(SHAKESPEARE_URL, path, SHAKESPEARE_SHA256)
        return _list_local(name, [("input.txt", path)], direct=True)
    if root is None:
        return _find_on_hub(name)
    repository, pattern = HUB[name]
    paths = [(path.relative_to(root).as_posix(), path) for path in root.glob(pattern)]
    if not paths:
        raise DataError(f"no {pattern} in this folder", root, f"copy dataset {repository} there")
    return _list_local(name, paths)


def _find_python(library: Path) -> Source:
    files = [
        (name, path)
        for name, path in _walk(library, None, _NOT_PYTHON)
        if path.suffix == ".py" and path.exists() and not _is_table(path)
    ]
    if not files:
        raise DataError("no Python sources here", library, "name a folder of .py files by --root")
    return _list_local("python", files)


def _is_table(path: Path) -> bool:
    text = path.read_bytes()
    in_table = sum(len(line.lstrip()) for line in _TABLE_LINE.findall(text))
    return in_table > _TABLE_SHARE * sum(len(line.lstrip()) for line in text.splitlines())


def _find_on_hub(name: str) -> Source:
    """List a repository's files, which are read over the network during preparation."""
    repository, pattern = HUB[name]
    folder = f"datasets/{repository}/"
    try:
        from huggingface_hub import HfFileSystem
    except ImportError as error:
        raise DataError(f"{name} needs huggingface_hub and pyarrow", name, INSTALL_DATA) from error
    try:
        hub = HfFileSystem()
        listing: dict[str, Any] = hub.glob(folder + pattern, detail=True)
    except Exception as error:  # the hub, its cache and the network raise their own exceptions
        what = f"cannot reach the Hugging Face hub: {type(error).__name__}"
        fix = f"download {pattern} of that dataset and name its folder by --root"
        raise DataError(what, f"dataset {repository}", fix) from error
    files = tuple(
        File(path.removeprefix(folder), path, int(row["size"]), 0, "parquet", "")
        for path, row in sorted(listing.items())
    )
    return Source(name, files, lambda file: hub.open(file.path, "rb"))


def _list_folder(folder: Path, exclude: Path | None) -> Source:
    """List the text files below a folder, and count the others by extension."""
    if exclude and folder.resolve() == exclude.resolve():
        raise DataError("the text is in the output folder", folder, "choose another --out")
    files: list[tuple[str, Path]] = []
    skipped: Counter[str] = Counter()
    for name, path in _walk(folder, exclude):
        if not path.exists():
            skipped["broken link"] += 1
        elif _CARD.fullmatch(path.name):
            skipped[path.name] += 1
        elif _split_suffix(path.name)[0] in IN_FOLDERS:
            files.append((name, path))
        else:
            skipped[path.suffix or "no extension"] += 1
    if not files:
        what = f"no text files in this folder (skipped: {describe_skipped(skipped) or 'none'})"
        raise DataError(what, folder, f"use {', '.join(IN_FOLDERS)}, or name the files")
    return _list_local(folder.resolve().name, files, skipped=skipped)


def _list_pattern(pattern: str, exclude: Path | None) -> Source:
    paths = [Path(match) for match in glob.glob(pattern, recursive=True)]  # noqa: PTH207 (absolute patterns)
    outputs = {folder for path in paths for folder in path.parents if _is_output(folder, exclude)}
    paths = [path for path in paths if path.is_file() and outputs.isdisjoint(path.parents)]
    if not paths:
        raise DataError("no file matches the pattern", pattern, "check it and its quotes")
    start = os.path.commonpath([path.parent for path in paths])
    files = [(path.relative_to(start).as_posix(), path) for path in paths]
    return _list_local(Path(pattern).name, files)


def _list_local(
    name: str,
    paths: Iterable[tuple[str, Path]],
    direct: bool = False,
    skipped: Mapping[str, int] | None = None,
) -> Source:
    """List files sorted by name, each once: of several links to a file the first counts."""
    files: dict[tuple[int, int], File] = {}
    counts = Counter(skipped)
    for relative, path in sorted(paths):
        if path.suffix in (".bin", ".npy"):
            raise DataError("a token shard, not text", path, "train with data.path=FOLDER")
        try:
            status = path.stat()
        except OSError as error:
            raise DataError(f"cannot read: {error.strerror}", path, "check the path") from error
        identity = (status.st_dev, status.st_ino)
        if identity in files:
            counts["second link to a file"] += 1
            continue
        files[identity] = File(
            relative, str(path), status.st_size, status.st_mtime_ns, *classify(path.name)
        )
    return Source(name, tuple(files.values()), open_local, direct, counts)


def classify(name: str) -> tuple[Format, Compression]:
    """Return format and compression of a file by its name; an unknown suffix means text."""
    suffix, compression = _split_suffix(name)
    return FORMATS.get(suffix, "whole"), compression


def _split_suffix(name: str) -> tuple[str, Compression]:
    path = Path(name.lower())
    compression = COMPRESSIONS.get(path.suffix, "")
    return Path(path.stem).suffix if compression else path.suffix, compression


def open_local(file: File) -> BinaryIO:
    """Open a local file. Raises DataError if it changed since it was listed."""
    stream = open(file.path, "rb")  # noqa: SIM115 (the caller closes it)
    status = os.fstat(stream.fileno())
    if (status.st_size, status.st_mtime_ns) != (file.size, file.changed):
        stream.close()
        fix = "delete the output folder and prepare again"
        raise DataError("file changed while it was prepared", file.path, fix)
    return stream


def _walk(
    folder: Path, exclude: Path | None, skip: Collection[str] = ()
) -> Iterator[tuple[str, Path]]:
    """Yield (relative name, path) of every file and broken link below, except hidden ones.

    Follows links to folders, and visits each folder once. skip: names of folders to skip.
    """
    visited = set[tuple[int, int]]()
    for parent, folders, names in os.walk(folder, onerror=_refuse_folder, followlinks=True):
        status = Path(parent).stat()
        identity = (status.st_dev, status.st_ino)
        if identity in visited or _is_output(Path(parent), exclude):
            folders.clear()
            continue
        visited.add(identity)
        folders[:] = sorted(it for it in folders if not it.startswith(".") and it not in skip)
        for name in names:
            path = Path(parent, name)
            if not name.startswith(".") and (path.is_file() or not path.exists()):
                yield path.relative_to(folder).as_posix(), path


def _refuse_folder(error: OSError) -> None:
    what = f"cannot read the folder: {error.strerror}"
    raise DataError(what, error.filename, "check its permissions") from error


def _is_output(folder: Path, out: Path | None) -> bool:
    """Return whether this is `out`, or another dataset or run."""
    is_out = out is not None and folder.resolve() == out.resolve()
    return is_out or (folder / "tokenizer" / DESCRIPTION_NAME).is_file()


def download(url: str, target: Path, sha256: str, alternative: str = "") -> bytes:
    """Return the bytes at `url`, cached in `target`. Raises DataError if they cannot be had.

    alternative: what else the user can do.
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
