"""Find a corpus: files, folders and patterns on this disk, and a few corpora by name, as a sorted list of files."""

import glob
import hashlib
import io
import os
import re
import sysconfig
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, BinaryIO, Literal

import xxhash

from megatoken.data.exercises import EXERCISES
from megatoken.data.shard_format import DESCRIPTION_NAME, INPUTS_NAME, MANIFEST_NAME, PROGRESS_NAME
from megatoken.errors import ConfigError, DataError
from megatoken.suggest import suggest
from megatoken.system.atomic_write import local_path, replace_file
from megatoken.system.environment import megatoken_cache

# Documents separated by <|endoftext|>; one document per file; rows with named fields.
Format = Literal["separated", "whole", "json", "csv", "tsv", "parquet"]
Compression = Literal["", "gz", "zst"]

ROW_FORMATS: dict[str, Format] = {".csv": "csv", ".tsv": "tsv", ".parquet": "parquet"}
ROW_FORMATS |= {
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
}  # a row per line, or one array of rows
FORMATS: dict[str, Format] = {
    ".txt": "separated",
    **ROW_FORMATS,
}  # other suffixes, such as .md and .py, are "whole"
COMPRESSIONS: dict[str, Compression] = {".gz": "gz", ".zst": "zst"}
IN_FOLDERS = (*FORMATS, ".md")  # read from a folder; other files must be named
# Descriptions of a dataset, skipped in folders: README.md, dataset_card.md, dataset_infos.json, dataset_dict.json.
_CARD = re.compile(r"(readme|dataset_?card|dataset_infos?|dataset_dict)(\.\w+)?", re.IGNORECASE)

SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"

HUB = {  # name -> dataset repository on the Hugging Face hub, its files
    "tinystories": ("roneneldan/TinyStories", "data/train-*.parquet"),
    **{
        name + size: (f"HuggingFaceFW/{name}", pattern)
        for name in ("fineweb", "fineweb-edu")
        for size, pattern in (
            ("", "sample/10BT/*.parquet"),
            ("-100bt", "sample/100BT/*.parquet"),
            ("-350bt", "sample/350BT/*.parquet"),
            ("-full", "data/*/*.parquet"),
        )
    },
}
_TIMEOUT_SECONDS = 10
INSTALL_DATA = 'pip install "megatoken[data]"'
NAMES = ("python", "tinyshakespeare", *EXERCISES, *HUB)

_OWN_NAMES = (MANIFEST_NAME, PROGRESS_NAME, INPUTS_NAME, "tokenizer.json", DESCRIPTION_NAME)
_OWN_FILES = re.compile("|".join((*map(re.escape, _OWN_NAMES), r"(train|val)_[0-9]{6,}\.bin")))

# Left out of the corpus "python": tests, installed packages, an editor, a converter, demos, generated tables, and any
# other file of which _TABLE_SHARE or more is in lines that begin with a string or a number (not a docstring).
_NOT_PYTHON = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "idlelib",
    "lib2to3",
    "turtledemo",
}
_NOT_PYTHON |= {"encodings", "pydoc_data"}
_TABLE_LINE = re.compile(rb"""^[ \t([{+-]*(?:[bru]{0,2}(?:'(?!'')|"(?!""))|\d).*""", re.MULTILINE)
_TABLE_SHARE = 0.3


@dataclass(frozen=True, slots=True)
class File:
    """One input file. name: relative, for the listing; path: what to open; changed: mtime in ns, 0 unknown."""

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

    direct: the user named this one file, so it must be text. skipped: number of files that were not listed, by
    extension or reason.
    """

    name: str
    files: tuple[File, ...]
    open: Callable[[File], BinaryIO]
    direct: bool = False
    skipped: Mapping[str, int] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Bytes on disk of all files, compressed as they are."""
        return sum(file.size for file in self.files)

    @property
    def has_rows(self) -> bool:
        """Whether any file holds rows with named fields."""
        return any(file.format in ROW_FORMATS.values() for file in self.files)

    def digest(self, *, times: bool) -> str:
        """xxh3_128 of the listing: names and sizes, with `times` also when each file was changed."""
        rows = (
            f"{file.name}\0{file.size}\0{file.changed if times else ''}\n" for file in self.files
        )
        return str(xxhash.xxh3_128_hexdigest("".join(rows).encode(errors="surrogateescape")))


def find_source(spec: str, root: Path | None = None, exclude: Path | None = None) -> Source:
    """The files of `spec`: a name of NAMES, a file, a folder (recursive) or a pattern, sorted by name.

    root: a local folder with the layout of a named corpus, used instead of the internet. exclude: a folder to leave
    out, where the dataset is written; datasets and runs are left out, too. Raises DataError when nothing readable is
    found, or token shards are; ConfigError when `spec` names a corpus and a file here.
    """
    path = local_path(spec)
    if root and spec not in NAMES:
        raise ConfigError(
            f"--root has no effect beside {spec}", "--root", f"it is for {', '.join(NAMES)}"
        )
    if spec in NAMES and not root and path.exists():
        what = f"{spec} is a corpus, and a {'folder' if path.is_dir() else 'file'} here"
        raise ConfigError(
            what,
            path.absolute(),
            f"write ./{spec} for what is here, or start elsewhere for the corpus",
        )
    if spec == "python":
        library = Path(root or sysconfig.get_paths()["stdlib"])
        files = [
            (name, path) for name, path in _walk(library, None, _NOT_PYTHON) if path.suffix == ".py"
        ]
        files = [(name, path) for name, path in files if path.exists() and not _is_table(path)]
        if not files:
            raise DataError("no Python sources here", library, "give root=, a folder of .py files")
        return _list_local("python", files)
    if spec in EXERCISES:
        if root:
            raise ConfigError(
                f"--root has no effect beside {spec}", "--root", "leave it out: it is made here"
            )
        lines = EXERCISES[spec]()
        made = File(f"{spec}.jsonl", spec, len(lines), 0, "json", "")
        return Source(spec, (made,), lambda _: io.BytesIO(lines), direct=True)
    if spec == "tinyshakespeare":
        return _find_shakespeare(root)
    if spec in HUB:
        return _find_on_hub(spec) if root is None else _find_copy(spec, root)
    if path.is_file():
        _refuse_shards([path])
        return _list_local(path.name, [(path.name, path)], direct=True)
    if path.is_dir():
        if exclude and path.resolve() == exclude.resolve():
            raise DataError(
                "the folder of the text is the output folder, too", path, "choose another --out"
            )
        _refuse_shards(path.iterdir())
        return _list_folder(path, exclude)
    if glob.has_magic(spec):
        paths = [Path(match) for match in glob.glob(spec, recursive=True)]  # noqa: PTH207 (absolute patterns)
        named = Path(*takewhile(lambda part: not glob.has_magic(part), path.parts))
        below = {
            folder for path in paths for folder in path.parents if not named.is_relative_to(folder)
        }
        left_out = {folder for folder in below if _is_output(folder, exclude)}
        paths = [
            path
            for path in paths
            if left_out.isdisjoint(path.parents) and not _is_own(path, exclude)
        ]
        _refuse_shards(paths)
        if not (matches := [path for path in paths if path.is_file()]):
            raise DataError(
                "no file matches the pattern", spec, "check it; quote it against the shell"
            )
        start = os.path.commonpath([match.parent for match in matches])
        return _list_local(
            Path(spec).name, [(match.relative_to(start).as_posix(), match) for match in matches]
        )
    if path.exists():
        raise DataError("neither a file nor a folder", spec, "write its content to a file first")
    owner, _, dataset = spec.partition("/")  # of the hub
    near = suggest(dataset if owner and re.fullmatch(r"[\w-]+", dataset) else spec, NAMES)
    fix = (
        f"did you mean {near}?"
        if near
        else "check it; of another corpus name the folder of its .parquet, .jsonl or .txt files"
    )
    raise DataError(f"no such file, folder or named corpus (names: {', '.join(NAMES)})", spec, fix)


def _list_folder(folder: Path, exclude: Path | None) -> Source:
    """List the text files below a folder, and count the others by extension."""
    files: list[tuple[str, Path]] = []
    skipped: Counter[str] = Counter()
    for name, path in _walk(folder, exclude):
        suffix, _ = _split_suffix(path.name)
        if not path.exists():
            skipped["broken link"] += 1
        elif suffix in IN_FOLDERS and not _CARD.fullmatch(path.name):
            files.append((name, path))
        else:
            skipped[path.name if _CARD.fullmatch(path.name) else path.suffix or "no extension"] += 1
    if not files:
        what = f"no {', '.join(IN_FOLDERS)} files (.gz and .zst included) in this folder"
        if skipped:
            what += f", only {describe_skipped(skipped)}"
        raise DataError(what, folder, "name another folder, a file or a pattern")
    source = _list_local(folder.resolve().name, files)
    return replace(source, skipped=skipped + Counter(source.skipped))


def describe_skipped(skipped: Mapping[str, int]) -> str:
    """Return "2 .pdf, 1 README.md, 1 broken link" for the counts of `Source.skipped`."""
    return ", ".join(
        f"{count:,} {name}" for name, count in sorted(skipped.items(), key=lambda item: -item[1])
    )


def _is_table(path: Path) -> bool:
    """Whether a Python file is a table, by the share of its bytes in lines that begin with a string or a number."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"cannot read: {error.strerror}", path, "check permissions, or leave it out"
        ) from error
    in_table = sum(len(line.lstrip()) for line in _TABLE_LINE.findall(text))
    return in_table > _TABLE_SHARE * sum(len(line.lstrip()) for line in text.splitlines())


def _find_shakespeare(root: Path | None) -> Source:
    path = root / "input.txt" if root else megatoken_cache() / "tinyshakespeare.txt"
    if not path.is_file():
        if root:
            raise DataError("no such file", path, "place tiny Shakespeare there")
        download(SHAKESPEARE_URL, path, SHAKESPEARE_SHA256)
    return _list_local("tinyshakespeare", [("input.txt", path)], direct=True)


def _find_copy(name: str, root: Path) -> Source:
    pattern = HUB[name][1]
    found = [(path.relative_to(root).as_posix(), path) for path in root.glob(pattern)]
    if not found:
        raise DataError(
            f"no {pattern} in this folder", root, f"copy the files of dataset {HUB[name][0]} there"
        )
    return _list_local(name, found)


def _find_on_hub(name: str) -> Source:
    """The repository's files; they are read over the network during preparation."""
    repository, pattern = HUB[name]
    try:
        from huggingface_hub import HfFileSystem
    except ImportError as error:
        raise DataError(f"{name} needs huggingface_hub and pyarrow", name, INSTALL_DATA) from error
    try:
        hub = HfFileSystem()
        listing: dict[str, Any] = hub.glob(f"datasets/{repository}/{pattern}", detail=True)
    except Exception as error:  # the hub, its cache and the network each raise their own exceptions
        what = f"cannot reach the Hugging Face hub: {type(error).__name__}"
        fix = f"download {pattern} of that dataset elsewhere and give its folder with --root"
        raise DataError(what, f"dataset {repository}", fix) from error
    if not listing:
        raise DataError(
            f"no files {pattern}", f"dataset {repository}", "it may have moved; give root"
        )
    prefix, rows = f"datasets/{repository}/", sorted(listing.items())
    files = tuple(
        File(path.removeprefix(prefix), path, int(row["size"]), 0, "parquet", "")
        for path, row in rows
    )
    return Source(name, files, lambda file: hub.open(file.path, "rb"))


def _list_local(name: str, paths: Iterable[tuple[str, Path]], direct: bool = False) -> Source:
    """List files sorted by name, each one once: of several links to a file the first counts."""
    files: dict[tuple[int, int], File] = {}
    skipped: Counter[str] = Counter()
    for relative, path in sorted(paths):
        try:
            status = path.stat()
        except OSError as error:
            raise DataError(
                f"cannot read: {error.strerror}", path, "check permissions, or leave it out"
            ) from error
        identity = (status.st_dev, status.st_ino)
        if identity in files:
            skipped["second link to a file"] += 1
            continue
        format, compression = classify(path.name)
        files[identity] = File(
            relative, str(path), status.st_size, status.st_mtime_ns, format, compression
        )
    return Source(name, tuple(files.values()), open_local, direct, skipped)


def classify(name: str) -> tuple[Format, Compression]:
    """Format and compression of a file by its name; an unknown suffix means text."""
    suffix, compression = _split_suffix(name)
    return FORMATS.get(suffix, "whole"), compression


def _split_suffix(name: str) -> tuple[str, Compression]:
    path = Path(name.lower())
    compression = COMPRESSIONS.get(path.suffix, "")
    return Path(path.stem).suffix if compression else path.suffix, compression


def open_local(file: File) -> BinaryIO:
    """Open a local file. Raises DataError when it is not the one that was listed."""
    stream = open(file.path, "rb")  # noqa: SIM115 (the caller closes it)
    status = os.fstat(stream.fileno())
    if (status.st_size, status.st_mtime_ns) != (file.size, file.changed):
        stream.close()
        raise DataError(
            "file changed while it was prepared",
            file.path,
            "delete the output folder and prepare again",
        )
    return stream


def _walk(
    folder: Path, exclude: Path | None, unwanted: Iterable[str] = ()
) -> list[tuple[str, Path]]:
    """Return (relative name, path) of every regular file and broken link below, except hidden ones.

    Links to folders are followed, and each folder is visited once.
    """
    skip, visited, files = set(unwanted), set[tuple[int, int]](), []

    def refuse(error: OSError) -> None:
        raise DataError(
            f"cannot read the folder: {error.strerror}", error.filename, "check its permissions"
        ) from error

    for parent, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        status = Path(parent).stat()
        identity = (status.st_dev, status.st_ino)
        if identity in visited or _is_output(Path(parent), exclude):
            folders.clear()
            continue
        visited.add(identity)
        folders[:] = sorted(
            name for name in folders if not name.startswith(".") and name not in skip
        )
        for name in names:
            path = Path(parent, name)
            if not name.startswith(".") and (path.is_file() or not path.exists()):
                files.append((path.relative_to(folder).as_posix(), path))
    return files


def _is_output(folder: Path, out: Path | None) -> bool:
    """Whether this is `out`, or a dataset or run that was written before."""
    return (
        bool(out and folder.resolve() == out.resolve())
        or (folder / "tokenizer" / DESCRIPTION_NAME).is_file()
    )


def _is_own(path: Path, out: Path | None) -> bool:
    """Whether this file of `out` was written by a preparation; text may lie beside them."""
    places = (out.resolve(), out.resolve() / "tokenizer") if out else ()
    return path.resolve().parent in places and bool(_OWN_FILES.fullmatch(path.name))


def _refuse_shards(paths: Iterable[Path]) -> None:
    shard = next((path for path in sorted(paths) if path.suffix in (".bin", ".npy")), None)
    if shard:
        what = "these are token shards already, which `megatoken train` uses as they are"
        raise DataError(
            what, shard, "train with data.path set to their folder, or name text files here"
        )


def download(url: str, target: Path, sha256: str, instead: str = "") -> bytes:
    """The bytes at `url`, from `target` if it holds them already; otherwise downloaded and kept there.

    instead: what else one can do. Raises DataError when the address cannot be reached or holds something else.
    """
    with suppress(OSError):
        cached = target.read_bytes()
        if hashlib.sha256(cached).hexdigest() == sha256:
            return cached
    fix = f"download it elsewhere and place it at {target}{instead}"
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as response:
            data: bytes = response.read()
    except OSError as error:  # URLError and time-outs are OSErrors
        raise DataError(f"cannot download: {error}", url, fix) from error
    actual = hashlib.sha256(data).hexdigest()
    if actual != sha256:
        raise DataError(f"download has sha256 {actual}, expected {sha256}", url, fix)
    with suppress(OSError):  # without a cache the next run downloads again
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_file(target, data)
    return data
