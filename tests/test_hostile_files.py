"""Give malicious files to every reader: none runs code, leaves its folder, or takes much memory.

While a reader works, an audit hook records every process that is started, every name that a pickle
asks for, and every file opened in the folder next to the one it was given.
"""

import copy
import gzip
import io
import json
import os
import pickle
import random
import shlex
import shutil
import struct
import sys
import tarfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet
from safetensors.torch import load_file

from megatoken.base.config.load import resolve
from megatoken.base.errors import MegatokenError
from megatoken.base.system.atomic_write import read_object
from megatoken.base.system.machine import peak_resident_bytes
from megatoken.base.system.metrics_log import read_metrics
from megatoken.base.system.sealed_json import parse_sealed
from megatoken.base.system.sealed_json import seal as seal_json
from megatoken.convert.recipes import composer, nanogpt
from megatoken.data import vocabulary
from megatoken.data.dataset import load_dataset
from megatoken.inference.tasks import find_tasks, read_examples
from megatoken.store.manifest import (
    MANIFEST,
    CheckpointManifest,
    FileEntry,
    encode_manifest,
    hash_file,
    verify,
)
from megatoken.store.mirror import fetch_model
from megatoken.store.run_folder import find_changes
from megatoken.text.load_pretrained import load_pretrained
from megatoken.text.prepare import prepare
from megatoken.text.tokenizer import load_tokenizer, open_tokenizer
from tests.conftest import Call
from tests.convert.models import draw_model, save_run
from tests.data.small_dataset import write_dataset

CONFIG, DATA, CHECKPOINT, STORAGE = 2, 3, 4, 5  # exit codes
ANY = {None, CONFIG, DATA, CHECKPOINT, STORAGE}  # a change can be harmless
LARGEST_GROWTH = 200 << 20  # bytes of memory
WATCHED = (
    "os.system os.exec os.posix_spawn os.fork subprocess.Popen socket.connect pickle.find_class"
)
MUTANTS = 60  # of each format
_events = []
_outside = ""  # while a reader works: the folder that it must not touch

STEP = "run/checkpoints/step-00000000"
HF_CONFIG = {
    **{"model_type": "gpt2", "n_layer": 1, "n_head": 1, "n_embd": 8, "vocab_size": 10},
    **{"n_positions": 8, "auto_map": {"AutoModel": "secret.Model"}, "trust_remote_code": True},
}
Read = Callable[[], object]


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    is_outside = event == "open" and str(arguments[0]).startswith(_outside)
    if _outside and (event in WATCHED.split() or is_outside):
        _events.append(f"{event} {arguments}"[:200])


sys.addaudithook(_note)


def attack(tmp_path: Path, codes: set[int | None], read: Read) -> None:
    """Call a reader. It must raise a one-line error with one of these codes (None: nothing).

    tmp_path / "outside" must not be opened or changed; memory may grow by LARGEST_GROWTH.
    """
    global _outside
    outside = tmp_path / "outside"
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak from now on
    before = peak_resident_bytes()
    _outside = str(outside)
    code, message = None, ""
    _events.clear()
    try:
        read()
    except MegatokenError as error:
        code, message = int(error.code), str(error)
    finally:
        _outside = ""
    assert _events == []
    assert [(path.name, path.read_text()) for path in outside.iterdir()] == [("secret", "secret")]
    assert code in codes, message
    assert message.isprintable()
    assert peak_resident_bytes() - before < LARGEST_GROWTH


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with one checkpoint, and a dataset. Reading them imports everything."""
    folder = tmp_path_factory.mktemp("good")
    save_run(folder / "run", draw_model())
    (folder / "hf").mkdir()
    (folder / "hf/config.json").write_text(json.dumps(HF_CONFIG))
    write_dataset(folder / "data", {"train": [100]})
    load_pretrained(folder / "run")
    load_dataset(folder / "data")
    return folder


@pytest.fixture
def place(tmp_path: Path, good: Path) -> Path:
    """Return a folder for hostile files, next to a folder that they try to reach."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret").write_text("secret")
    return shutil.copytree(good, tmp_path / "place")


# --- pickles and junk in every file ---------------------------------------------------------------


class Calls:
    """Unpickling it calls a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.values = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.values


def list_pickles(canary: Path) -> list[bytes]:
    """Return bytes that make `canary` when they are unpickled."""
    command = f"touch {canary}".encode()
    system = Calls(os.system, f"touch {canary}")
    calls = system, Calls(Path.touch, canary), Calls(Path.write_text, canary, "")
    stack_global = b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c"
    return [
        *(pickle.dumps(call, 2) for call in calls),
        *(pickle.dumps({"model": system}, protocol) for protocol in range(6)),
        b"(S'" + command + b"'\nios\nsystem\n.",
        stack_global + bytes([len(command)]) + command + b"\x85R.",
    ]


def list_payloads(canary: Path) -> list[bytes]:
    """Return pickles, and bytes that read another file, take all memory, or break a parser."""
    calls = Calls(torch.load, f"{canary.parent}/secret"), Calls(bytearray, 2**34)
    return [
        *list_pickles(canary),
        *(pickle.dumps(value, 2) for value in (*calls, "gpt2", {"pat_str": "("})),
        b"Pcos\nsystem\n.",  # a persistent id
        b"\x80\x02\x82\x01.",  # an extension
        b"[" * 100_000,
        b"9" * 100_000,
        b'{"step": 1e999, "files": {"a": {"bytes": 1e999, "xxh3_128": ""}}}',
        b"null",
        b"\x1b[2J\x1b]0;owned\x07",
    ]


def seal(folder: Path, meta: dict[str, Any] | None = None) -> None:
    """Give a checkpoint a manifest that fits its files, as its author would."""
    files = {
        path.relative_to(folder).as_posix(): FileEntry(path.stat().st_size, hash_file(path))
        for path in folder.rglob("*")
        if path.is_file() and path.name != MANIFEST
    }
    saved = json.loads((folder / MANIFEST).read_text())["meta"]
    manifest = CheckpointManifest(0, saved if meta is None else meta, files)
    (folder / MANIFEST).write_bytes(encode_manifest(manifest))


def torch_zip(payload: bytes, canary: Path) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("decoy/data.pkl", pickle.dumps({}, 2))
        archive.writestr("archive/data.pkl", payload)
        archive.writestr("archive/DATA.PKL", payload)
        archive.writestr("archive/version", "3\n")
    return file.getvalue()


def torch_tar(payload: bytes, canary: Path) -> bytes:
    """torch's first format: a tar of pickles, here also with names that leave the folder."""
    file = io.BytesIO()
    names = ["pickle", "storages", "tensors", "sys_info", "../outside/canary", str(canary)]
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name in names:
            entry = tarfile.TarInfo(name)
            entry.size = len(payload)
            archive.addfile(entry, io.BytesIO(payload))
    return file.getvalue()


def torch_stream(payload: bytes, canary: Path) -> bytes:
    """torch's second format: pickles one after the other."""
    values = (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})
    return b"".join(pickle.dumps(value, 2) for value in values) + payload


def npy_of_objects(payload: bytes, canary: Path) -> bytes:
    header = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00v\x00" + header + payload


def plain(payload: bytes, canary: Path) -> bytes:
    return payload


def load_folder(path: Path) -> object:
    return load_pretrained(path.parent)


def load_sealed(path: Path) -> object:
    """Load the checkpoint of a file, sealed."""
    (folder,) = (each for each in path.parents if each.name.startswith("step-"))
    seal(folder)
    return load_pretrained(folder)


def read_hf_config(path: Path) -> object:
    path.with_name("model.safetensors").touch()
    return load_folder(path)


def read_dataset_of(path: Path) -> object:
    return load_dataset(path.parent)


def read_vocabulary(path: Path) -> object:
    (path.parent / "merges.txt").touch()
    return load_tokenizer(str(path.parent))


def read_progress(path: Path) -> object:
    text = path.parents[1] / "text.txt"
    text.write_text("words")
    return prepare(text, path.parent, tokenizer="bytes", workers=1)


def read_log(path: Path) -> object:
    path.write_bytes(path.read_bytes() + b"\n")  # a last line without end is half-written
    return read_metrics(path.parent, warn=lambda text: None)


def read_eval(path: Path) -> object:
    return read_examples(find_tasks("hellaswag"), path)


def read_tokenizer(path: Path) -> object:
    return load_tokenizer(str(path))


def read_recipe(path: Path) -> object:
    return resolve(str(path))


WRAPS = {"ckpt.pt": [torch_zip, torch_tar, torch_stream], "npy/train.npy": [plain, npy_of_objects]}
READERS = {
    CHECKPOINT: {
        "ckpt.pt": load_pretrained,
        "nano/ckpt.pt": load_folder,
        "model.bin": load_pretrained,
        "hf/pytorch_model.bin": load_folder,
        "hf/model.safetensors": load_folder,
        "hf/config.json": load_folder,
        f"{STEP}/{MANIFEST}": load_folder,
        f"{STEP}/model.safetensors": load_sealed,
    },
    DATA: {
        f"{STEP}/tokenizer/tokenizer.json": load_sealed,
        f"{STEP}/tokenizer/megatoken_tokenizer.json": load_sealed,
        "npy/train.npy": read_dataset_of,
        "bin/fineweb_train.bin": read_dataset_of,
        "data/manifest.json": read_dataset_of,
        "tokenizer.json": read_tokenizer,
        "bpe/vocab.json": read_vocabulary,
        "nanochat/tokenizer.pkl": lambda path: load_tokenizer(str(path.parent)),
        "out/progress.json": read_progress,
        "hellaswag.jsonl": read_eval,
        "hellaswag.parquet": read_eval,
    },
    CONFIG: {
        "new/provenance.json": lambda path: find_changes(path.parent, resolve("quickstart")),
        "recipe.yaml": read_recipe,
        "composer.yaml": composer.translate,
        "config.py": lambda path: nanogpt.translate(str(path)),
    },
    None: {
        f"{STEP}/.metadata": load_sealed,  # never opened
        "metrics.jsonl": read_log,  # bad lines are skipped
        "machine.json": read_object,  # measured again
    },
}


@pytest.mark.fault(28, 29)
@pytest.mark.parametrize(
    ("code", "name"), [(code, name) for code in READERS for name in READERS[code]]
)
def test_no_file_runs_code(tmp_path: Path, place: Path, code: int | None, name: str):
    path, canary = place / name, tmp_path / "outside/canary"
    path.parent.mkdir(exist_ok=True)
    for payload in list_payloads(canary):
        for wrap in WRAPS.get(name, [plain]):
            path.write_bytes(wrap(payload, canary))
            attack(tmp_path, {code}, lambda: READERS[code][name](path))


def test_an_attack_that_succeeds_is_noticed(tmp_path: Path, place: Path):
    canary = tmp_path / "outside/canary"
    for payload in list_pickles(canary):
        with pytest.raises(AssertionError):
            attack(tmp_path, {None}, partial(pickle.loads, payload))
        canary.unlink()
    with pytest.raises(AssertionError):
        attack(tmp_path, {None}, (tmp_path / "outside/secret").read_text)


# --- valid files with one hostile value -----------------------------------------------------------

HOSTILE = json.loads(r"""[
  null, [], {}, "", "x", "\u0000", "\u001b[2J", -1, 0, 2.5, 1e300, 2147483648, 4611686018427387904,
  1000000000000000000000000000000, true, "../../outside/secret", "/etc/passwd", "os.system",
  "(?<n>a\\g<n>)", [[[[1]]]]
]""")


def mutate(value: Any, rng: random.Random) -> Iterator[Any]:
    """Yield copies of a JSON value in which one node is replaced, removed or renamed."""
    paths = list(list_paths(value))
    for _ in range(MUTANTS):
        mutant = copy.deepcopy(value)
        *path, key = rng.choice(paths)
        parent = mutant
        for step in path:
            parent = parent[step]
        action = rng.choice(("replace", "replace", "replace", "remove", "rename"))
        if action == "replace":
            parent[key] = rng.choice(HOSTILE)
        elif action == "rename" and isinstance(parent, dict):
            parent[str(rng.choice(HOSTILE))] = parent.pop(key)
        else:
            del parent[key]
        yield mutant


def list_paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the keys that lead to each node but the root."""
    children = enumerate(value) if isinstance(value, list) else ()
    for key, child in value.items() if isinstance(value, dict) else children:
        yield (*path, key)
        yield from list_paths(child, (*path, key))


def mutate_json(name: str, read: Callable[[Path], object]) -> Callable[..., Iterator[Read]]:
    """Return a mutator of a JSON file of the good folder."""

    def run(place, rng):
        content = json.loads((place / name).read_text())
        for mutant in mutate(content, rng):
            (place / name).write_text(json.dumps(mutant))
            yield lambda: read(place / name)

    return run


def mutate_tensors(place: Path, rng: random.Random) -> Iterator[Read]:
    """Return mutations of a safetensors file's header and of its length."""
    path = place / STEP / "model.safetensors"
    data = path.read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:end])
    sizes = [0, 7, 1 << 40, 1 << 63, (1 << 64) - 1]
    for number, mutant in enumerate(mutate(header, rng)):
        raw = json.dumps(mutant).encode()
        size = sizes[number] if number < len(sizes) else len(raw)
        path.write_bytes(struct.pack("<Q", size) + raw + data[end:])
        yield lambda: load_sealed(path)


def mutate_index(place: Path, rng: random.Random) -> Iterator[Read]:
    """Return mutations of an index that describes full tensors as slices."""
    path, groups = place / STEP / "model.index.json", []
    for name, tensor in load_file(path.with_name("model.safetensors")).items():
        rows, *columns = ([0, size] for size in tensor.shape)
        slices = {"model.safetensors": [[rows], *(columns or [None])]}
        groups.append(
            {"dtype": "float32", "shape": [*tensor.shape], "slices": slices, "tensors": [name]}
        )
    path.write_text(json.dumps(groups))
    load_sealed(path)
    yield from mutate_json(f"{STEP}/{path.name}", load_sealed)(place, rng)


def mutate_checkpoint_manifest(place: Path, rng: random.Random) -> Iterator[Read]:
    folder = place / STEP
    meta = json.loads((folder / MANIFEST).read_text())["meta"]
    for mutant in mutate(meta, rng):
        seal(folder, mutant)
        yield lambda: load_pretrained(folder)


def mutate_dataset_manifest(place: Path, rng: random.Random) -> Iterator[Read]:
    path = place / "data/manifest.json"
    content = parse_sealed(path.read_bytes())
    del content["xxh3"]
    for mutant in mutate(content, rng):
        path.write_bytes(seal_json(json.dumps(mutant).encode().removesuffix(b"}"), bits=64))
        yield lambda: load_dataset(path.parent)


def mutate_npy(place: Path, rng: random.Random) -> Iterator[Read]:
    """Return mutations of a .npy file's header, a Python literal, in all of its versions."""
    path = place / "npy/train.npy"
    path.parent.mkdir(exist_ok=True)
    texts = ["[x for x in ().__class__.__base__.__subclasses__()]", "(" * 9000, "\0", "{" * 999]
    header = {"descr": [["a", "<u2"], 1], "fortran_order": False, "shape": [100, 1]}
    shapes = ({**header, "descr": "<u2", "shape": [it]} for it in HOSTILE)
    for mutant in (*mutate(header, rng), *shapes):
        for key in ("descr", "shape"):
            if isinstance(mutant.get(key), list):
                mutant[key] = tuple(mutant[key])
        texts.append(repr(mutant))
    for number, text in enumerate(texts):
        version, raw = number % 4 + 1, text.encode() + b"\n"
        size = struct.pack("<H" if version == 1 else "<I", min(len(raw), 65535))
        path.write_bytes(b"\x93NUMPY" + bytes([version, 0]) + size + raw + bytes(64))
        yield lambda: load_dataset(path.parent)


FORMATS = {
    "tensors": mutate_tensors,
    "index of tensors": mutate_index,
    "manifest of a checkpoint": mutate_checkpoint_manifest,
    "manifest of a dataset": mutate_dataset_manifest,
    ".npy": mutate_npy,
    "config.json": mutate_json("hf/config.json", read_hf_config),
    "tokenizer.json": mutate_json(f"{STEP}/tokenizer/tokenizer.json", read_tokenizer),
    "description": mutate_json(
        f"{STEP}/tokenizer/megatoken_tokenizer.json",
        lambda path: open_tokenizer(vocabulary.read_vocabulary(path.parent)),
    ),
}


@pytest.mark.fault(29)
@pytest.mark.parametrize("name", FORMATS)
def test_a_hostile_value_is_at_most_one_error(tmp_path: Path, place: Path, name: str):
    n_reads = 0
    for read in FORMATS[name](place, random.Random(name)):
        attack(tmp_path, ANY, read)
        n_reads += 1
    assert n_reads >= MUTANTS


YAMLS = (
    "!!python/object/apply:os.system ['touch CANARY']",
    "!!python/object/new:os.system ['touch CANARY']",
    "!!python/name:os.system",
    "!<tag:yaml.org,2002:python/none>",
    "!custom x",
    "\n  a: &a {x: 1}\n  b: *a",
    "\n  a: &a [x, x]\n  b: &b [*a, *a, *a]\n  c: &c [*b, *b, *b]\n  d: [*c, *c, *c]",
    "[" * 500,
    "'" + "x" * (1 << 20),
    "\n  ? [a, b]\n  : c",
    "\x00",
    "\ud800",
)


@pytest.mark.fault(28, 29)
@pytest.mark.parametrize("text", YAMLS)
def test_no_recipe_runs_code(tmp_path: Path, place: Path, text: str):
    text = text.replace("CANARY", f"{tmp_path}/outside/canary")
    path = place / "recipe.yaml"
    for content in (f"model: {text}\n", text + "\n", f"{text}: 1\n", f"include: {text}\n"):
        path.write_bytes(content.encode(errors="surrogatepass"))
        attack(tmp_path, {CONFIG}, lambda: read_recipe(path))
        attack(tmp_path, {CONFIG}, lambda: composer.translate(path))


# --- names, links and sizes -----------------------------------------------------------------------


@pytest.mark.fault(29)
def test_no_name_in_a_manifest_leaves_its_folder(tmp_path: Path, place: Path):
    folder = place / STEP
    data = place / "data/manifest.json"
    rows = data.read_bytes().rpartition(b',\n"xxh3"')[0]
    files = dict(verify(folder).files)
    path = tmp_path / "outside/secret"
    secret = FileEntry(6, hash_file(path))
    names = ["../../../../outside/secret", str(path), f"file://{path}", "..", ".", "", "secret\0"]
    names += ["a/../../../../../outside/secret", "~/secret", "..\\outside\\secret", "a\nb"]
    for name in names:
        manifest = CheckpointManifest(0, {}, files | {name: secret})
        (folder / MANIFEST).write_bytes(encode_manifest(manifest))
        attack(tmp_path, {CHECKPOINT}, lambda: load_pretrained(folder))
        attack(tmp_path, {CHECKPOINT}, lambda: fetch_model(f"local://{place}/run", str))
        body = rows.replace(b'"train_000000.bin"', json.dumps(name).encode())
        data.write_bytes(seal_json(body, bits=64))
        attack(tmp_path, {DATA}, lambda: load_dataset(data.parent))
    index = place / "hf/model.safetensors.index.json"
    index.write_text('{"metadata": {}, "weight_map": {"wte.weight": "../../outside/secret"}}')
    attack(tmp_path, {CHECKPOINT}, lambda: load_folder(index))


@pytest.mark.fault(29)
def test_links_are_not_followed_out_of_a_checkpoint(tmp_path: Path, place: Path):
    targets = {"config.yaml": "secret", "tokenizer": ".", "link": "secret"}
    for name, target in (*targets.items(), ("model.safetensors", "secret")):
        folder = shutil.copytree(place / STEP, place / f"linked-{name}")
        if (folder / name).exists():
            (folder / name).rename(place / f"before-{name}")
        (folder / name).symlink_to(tmp_path / "outside" / target)
        attack(tmp_path, {CHECKPOINT}, lambda folder=folder: verify(folder))
    os.mkfifo(place / STEP / "pipe")
    attack(tmp_path, {CHECKPOINT}, lambda: verify(place / STEP))


@pytest.mark.long
@pytest.mark.fault(29)
def test_archives_are_read_in_bounded_memory(tmp_path: Path, place: Path):
    """Read an endless line, NULs, one text many times, a compressed pickle, a sparse manifest."""
    spaces, nul = b" " * (1 << 20), bytes(1 << 20)
    bombs = {
        "bomb.jsonl.gz": gzip.compress(spaces) * 300,
        "bomb.jsonl.zst": pyarrow.compress(spaces, "zstd", asbytes=True) * 300,
        "nul.txt.gz": gzip.compress(nul) * 300,
        "bomb.parquet": b"",
    }
    for name, content in bombs.items():
        (place / name).write_bytes(content)
    index = pyarrow.array(np.zeros(300, np.int32))
    text = pyarrow.DictionaryArray.from_arrays(index, [spaces.decode()])
    parquet.write_table(pyarrow.table({"text": text}), place / "bomb.parquet", compression="zstd")
    for name in bombs:
        read = partial(prepare, place / name, place / f"out-{name}", tokenizer="bytes", workers=1)
        attack(tmp_path, {DATA}, read)
    archive = zipfile.ZipFile(place / "ckpt.pt", "w", zipfile.ZIP_DEFLATED)
    with archive, archive.open("archive/data.pkl", "w") as file:
        for _ in range(250):
            file.write(nul)
    attack(tmp_path, {CHECKPOINT}, lambda: load_pretrained(place / "ckpt.pt"))
    with (place / STEP / MANIFEST).open("wb") as file:
        file.truncate(1 << 40)
    attack(tmp_path, {CHECKPOINT}, lambda: load_pretrained(place / STEP))


@pytest.mark.fault(28, 29)
def test_tensors_of_a_pickle_take_no_more_memory_than_its_file(tmp_path: Path, place: Path):
    sizes = dict(n_layer=1, n_head=1, n_embd=8, vocab_size=10, block_size=8, bias=True)
    wide = torch.zeros(1).expand(1 << 40)
    for state in ({"lm_head.weight": wide}, {"x": torch.zeros(2, device="meta")}):
        torch.save({"model": OrderedDict(state), "model_args": sizes}, place / "ckpt.pt")
        attack(tmp_path, {CHECKPOINT}, lambda: load_pretrained(place / "ckpt.pt"))
    n_layer = 10**5  # 1 wide, in 10 MB of zeros
    header = np.zeros(256, "<i4")
    header[:8] = (20240326, 3, 1, 1, n_layer, 1, 1, 1)
    (place / "model.bin").write_bytes(header.tobytes() + bytes(4 * (4 + 25 * n_layer)))
    attack(tmp_path, {CHECKPOINT}, lambda: load_pretrained(place / "model.bin"))


REFUSED = ("nothing://bucket/run", "file:///dev/null/x", "gsx://a", "a\0b", "x" * 300, "", "file/a")
CONTAINED = ("~", "$HOME", "[/red]", "a\nb", "\x1b[2J", "caf\u00e9\u202e", "-x", "\udcff", " ")


@pytest.mark.fault(55)
def test_hostile_names_and_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", f"{tmp_path}/home")
    Path("file").write_text("words")
    command = "prepare file --tokenizer bytes"
    for line in (command, "train quickstart", "export x", "consolidate x"):
        for path in REFUSED:
            code, _, text = call(f"{line} --out={shlex.quote(path)}")
            assert code in (CONFIG, DATA, CHECKPOINT, STORAGE)
            assert text.count("\n") == 1
            assert text[:-1].isprintable()
    assert [path.name for path in Path().iterdir()] == ["file"]
    for path in CONTAINED:
        assert call(f"{command} --out={shlex.quote(path)}")[0] == 0, path
        assert (Path(path) / "manifest.json").is_file()
    assert len(list(Path().iterdir())) == len(CONTAINED) + 1
    assert [path.name for path in tmp_path.iterdir()] == ["work"]


@pytest.mark.fault(55)
@pytest.mark.parametrize("name", ["...yaml", "a\nb.yaml", "\x1b[2J.yaml"])
def test_a_recipe_whose_name_is_no_run_is_refused(tmp_path: Path, place: Path, name: str):
    (place / name).write_text("version: 1\n")
    attack(tmp_path, {CONFIG}, lambda: read_recipe(place / name))
