"""What to prepare: files, folders and patterns on this disk, and a few corpora by name.

In: what the user typed. Out: `Source`, a fixed list of files in a fixed order, and a way to open each.
Deliberately absent: what is inside the files (blocks.py, documents.py).
"""

import glob
import os
import stat
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import xxhash

from megatoken.data.download import download
from megatoken.errors import Exit, Fault
from megatoken.hardware import megatoken_cache

# Documents between <|endoftext|>s; a document a file; a line of JSON; a row of parquet.
Form = Literal["separated", "whole", "lines", "rows"]
Compression = Literal["", "gz", "zst"]

FORMS: dict[str, Form] = {
    ".txt": "separated",
    ".md": "whole",
    ".py": "whole",
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".parquet": "rows",
}
COMPRESSIONS: dict[str, Compression] = {".gz": "gz", ".zst": "zst"}
IN_FOLDERS = (".txt", ".md", ".jsonl", ".parquet")  # picked up in a folder; anything else must be named

SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"

HUB = {  # name -> dataset repository on the Hugging Face hub, its files
    "tinystories": ("roneneldan/TinyStories", "data/train-*.parquet"),
    "fineweb": ("HuggingFaceFW/fineweb", "sample/10BT/*.parquet"),
    "fineweb-edu": ("HuggingFaceFW/fineweb-edu", "sample/10BT/*.parquet"),
}
NAMES = ("python", "tinyshakespeare", *HUB)

# Not what a reader of Python learns from: tests, other people's packages, an editor, a converter, demos.
_NOT_PYTHON = {
    *("test", "tests", "idle_test", "site-packages", "dist-packages", "idlelib", "lib2to3", "turtledemo"),
    "__pycache__",
}


@dataclass(frozen=True, slots=True)
class File:
    """One input file. name: relative, for the listing; path: what to open; changed: mtime in ns, 0 unknown."""

    name: str
    path: str
    size: int
    changed: int
    form: Form
    compression: Compression


@dataclass(frozen=True, slots=True)
class Source:
    """Files in the order of reading. direct: the user named this very file, so it must be text."""

    name: str
    files: tuple[File, ...]
    open: Callable[[File], BinaryIO]
    direct: bool = False

    @property
    def size_bytes(self) -> int:
        """Bytes on disk of all files, compressed as they are."""
        return sum(file.size for file in self.files)

    def digest(self, *, times: bool) -> str:
        """xxh3_128 of the listing: names and sizes, with `times` also when each file was changed."""
        rows = (f"{file.name}\0{file.size}\0{file.changed if times else ''}\n" for file in self.files)
        return str(xxhash.xxh3_128_hexdigest("".join(rows).encode(errors="surrogateescape")))


def find_source(spec: str, root: Path | None = None, exclude: Path | None = None) -> Source:
    """The files that `spec` means: a name of NAMES, a file, a folder (recursive) or a pattern, sorted by name.

    root: a local folder with the layout of a named corpus, used in place of the internet.
    exclude: a folder to leave out, where the dataset itself is written.
    Fault(Exit.DATA) when there is nothing, nothing readable, or the folder holds shards already.
    """
    if spec == "python":
        return _find_python(Path(root or sysconfig.get_paths()["stdlib"]))
    if spec == "tinyshakespeare":
        return _find_shakespeare(root)
    if spec in HUB:
        return _find_on_hub(spec) if root is None else _find_copy(spec, root)
    path = Path(spec)
    if path.is_file():
        _refuse_shards([path])
        return _list_local(path.name, [(path.name, path)], direct=True)
    if path.is_dir():
        _refuse_shards(path.iterdir())
        found = [(name, file) for name, file in _walk(path, exclude) if _form_in_folder(file)]
        if not found:
            what = f"no {', '.join(IN_FOLDERS)} files (.gz and .zst included) in this folder"
            raise Fault(Exit.DATA, what, str(path), "name another folder, a file or a pattern")
        return _list_local(path.resolve().name, found)
    if glob.has_magic(spec):
        matches = [Path(match) for match in glob.glob(spec, recursive=True)]  # noqa: PTH207 (absolute patterns)
        _refuse_shards(matches)
        found = [(match.as_posix(), match) for match in matches if match.is_file()]
        if not found:
            raise Fault(Exit.DATA, "no file matches the pattern", spec, "check it; quote it against the shell")
        start = os.path.commonpath([match.parent for _, match in found])
        named = [(match.relative_to(start).as_posix(), match) for _, match in found]
        return _list_local(Path(spec).name, named)
    what = f"no such file, folder or named corpus (names: {', '.join(NAMES)})"
    raise Fault(Exit.DATA, what, spec, "check the spelling")


def _find_python(library: Path) -> Source:
    found = [(name, path) for name, path in _walk(library, None, _NOT_PYTHON) if path.suffix == ".py"]
    if not found:
        raise Fault(Exit.DATA, "no Python sources here", str(library), "give root=, a folder of .py files")
    return _list_local("python", found)


def _find_shakespeare(root: Path | None) -> Source:
    path = root / "input.txt" if root else megatoken_cache() / "tinyshakespeare.txt"
    if not path.is_file():
        if root:
            raise Fault(Exit.DATA, "no such file", str(path), "place tiny Shakespeare there")
        download(SHAKESPEARE_URL, path, SHAKESPEARE_SHA256)
    return _list_local("tinyshakespeare", [("input.txt", path)], direct=True)


def _find_copy(name: str, root: Path) -> Source:
    pattern = HUB[name][1]
    found = [(path.relative_to(root).as_posix(), path) for path in root.glob(pattern)]
    if not found:
        what = f"no {pattern} in this folder"
        raise Fault(Exit.DATA, what, str(root), f"copy the files of dataset {HUB[name][0]} there")
    return _list_local(name, found)


def _find_on_hub(name: str) -> Source:
    """Lists the repository's files; they are read over the network while they are prepared."""
    repository, pattern = HUB[name]
    try:
        from huggingface_hub import HfFileSystem
    except ImportError as error:
        fix = 'pip install "megatoken[data]"'
        raise Fault(Exit.DATA, f"{name} needs huggingface_hub and pyarrow", name, fix) from error
    try:
        hub = HfFileSystem()
        listing: dict[str, Any] = hub.glob(f"datasets/{repository}/{pattern}", detail=True)
    except Exception as error:  # the hub, its cache and the network each raise their own kinds
        what = f"cannot reach the Hugging Face hub: {type(error).__name__}"
        fix = f"download {pattern} of that dataset elsewhere and give its folder with --root"
        raise Fault(Exit.DATA, what, f"dataset {repository}", fix) from error
    if not listing:
        raise Fault(Exit.DATA, f"no files {pattern}", f"dataset {repository}", "it may have moved; give root")
    prefix = f"datasets/{repository}/"
    files = tuple(
        File(path.removeprefix(prefix), path, int(row["size"]), 0, "rows", "") for path, row in sorted(listing.items())
    )
    return Source(name, files, lambda file: hub.open(file.path, "rb"))


def _list_local(name: str, found: Iterable[tuple[str, Path]], direct: bool = False) -> Source:
    files = []
    for relative, path in sorted(found):
        try:
            status = path.stat()
        except OSError as error:
            fix = "check permissions, or leave it out"
            raise Fault(Exit.DATA, f"cannot read: {error.strerror}", str(path), fix) from error
        form, compression = classify(path.name)
        files.append(File(relative, str(path), status.st_size, status.st_mtime_ns, form, compression))
    return Source(name, tuple(files), open_local, direct)


def classify(name: str) -> tuple[Form, Compression]:
    """Form and compression of a file by its name; an unknown ending means text."""
    path = Path(name.lower())
    compression = COMPRESSIONS.get(path.suffix, "")
    suffix = Path(path.stem).suffix if compression else path.suffix
    return FORMS.get(suffix, "whole"), compression


def open_local(file: File) -> BinaryIO:
    """Opens a file of this disk. Fault(Exit.DATA) when it is not the one that was listed."""
    stream = open(file.path, "rb")  # noqa: SIM115 (the caller closes it)
    status = os.fstat(stream.fileno())
    if (status.st_size, status.st_mtime_ns) != (file.size, file.changed):
        stream.close()
        raise Fault(Exit.DATA, "file was changed while it was prepared", file.path, _START_ANEW)
    return stream


_START_ANEW = "delete the output folder and prepare again"


def _walk(folder: Path, exclude: Path | None, unwanted: Iterable[str] = ()) -> list[tuple[str, Path]]:
    """(relative name, path) of every regular file below; hidden ones and links to folders are left out."""
    skip, away, found = set(unwanted), exclude and exclude.resolve(), []

    def complain(error: OSError) -> None:
        fix = "check its permissions"
        raise Fault(Exit.DATA, f"cannot read the folder: {error.strerror}", str(error.filename), fix) from error

    for place, folders, names in os.walk(folder, onerror=complain):
        here = Path(place)
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skip]
        if away and here.resolve() == away:
            folders.clear()
            continue
        for name in names:
            path = here / name
            if not name.startswith(".") and stat.S_ISREG(path.stat().st_mode if path.exists() else 0):
                found.append((path.relative_to(folder).as_posix(), path))
    return found


def _form_in_folder(path: Path) -> bool:
    name = path.name.lower()
    for suffix in COMPRESSIONS:
        name = name.removesuffix(suffix)
    return name.endswith(IN_FOLDERS)


def _refuse_shards(paths: Iterable[Path]) -> None:
    shard = next((path for path in sorted(paths) if path.suffix in (".bin", ".npy")), None)
    if shard:
        what = "these are token shards already, which `megatoken train` uses as they are"
        raise Fault(Exit.DATA, what, str(shard), "train with data.path set to their folder, or name text files here")
