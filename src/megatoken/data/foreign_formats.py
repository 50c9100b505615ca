"""Recognize datasets in formats that are not read, and name a command that converts them."""

from pathlib import Path
from typing import NamedTuple

from megatoken.errors import DataError


class ForeignFormat(NamedTuple):
    """A format and the file patterns that identify it. fix: how to convert it; DIR is the folder."""

    name: str
    markers: tuple[str, ...]
    fix: str


_THEN = "then megatoken prepare text.jsonl --out DATA"
FOREIGN_FORMATS = (
    ForeignFormat(
        "MosaicML Streaming (MDS)",
        ("index.json", "*.mds"),
        "export its text: python -c \"import json, streaming; [print(json.dumps({'text': row['text']}))"
        f" for row in streaming.LocalDataset('DIR')]\" > text.jsonl, {_THEN}",
    ),
    ForeignFormat(
        "Hugging Face datasets (save_to_disk)",
        ("dataset_info.json", "*.arrow"),
        'export it: python -c "import datasets; '
        f"datasets.load_from_disk('DIR').to_json('text.jsonl')\", {_THEN}",
    ),
    ForeignFormat(
        "LitData",
        ("index.json", "chunk-*.bin"),
        "prepare the text that it was made from: megatoken prepare SOURCE --out DATA",
    ),
    ForeignFormat(
        "Megatron-LM",
        ("*.idx", "*.bin"),
        'save its ids (int32 for vocabularies over 65,500) as .npy: python -c "import numpy; '
        "numpy.save('train.npy', numpy.fromfile('FILE.bin', 'uint16'))\", then data.path=train.npy",
    ),
)


def refuse_foreign(path: Path) -> None:
    """Raise DataError if `path` belongs to a dataset in one of FOREIGN_FORMATS.

    path: a folder that holds the files or a split's folder with them, or one of the files; for
    Megatron-LM, also their name without a suffix.
    """
    if Path(f"{path}.idx").is_file():
        path = Path(f"{path}.idx")
    folder = path if path.is_dir() else path.parent
    for name, markers, fix in FOREIGN_FORMATS:
        for split in (folder, *([] if folder != path else folder.glob("*/"))):
            found = [next(split.glob(marker), None) for marker in markers]
            if all(found) and (folder == path or any(map(path.match, markers))):
                what = f"a dataset of {name}, a format that is not read"
                raise DataError(what, path, fix.replace("DIR", str(split)))
