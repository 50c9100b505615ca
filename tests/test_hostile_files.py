"""Files made to do harm: each reader of the package is given every one, and none runs code or leaves its folder.

The files are written here, nothing is stored. While a reader works, an audit hook notes every process that is started,
every name that a pickle asks for, and every file that is opened in the folder beside the one it was given.
"""

import builtins
import codecs
import copyreg
import functools
import gzip
import importlib
import io
import json
import marshal
import operator
import os
import pickle
import pty
import runpy
import shutil
import struct
import subprocess
import sys
import tarfile
import types
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet
from safetensors.torch import save_file

from megatoken.checkpoint.manifest import (
    MANIFEST,
    CheckpointManifest,
    FileEntry,
    encode_manifest,
    hash_file,
    verify,
)
from megatoken.checkpoint.tensor_files import consolidate
from megatoken.cli.main import main
from megatoken.config.load import load_config, resolve
from megatoken.convert.load_pretrained import load_pretrained
from megatoken.convert.recipes.composer import translate_composer
from megatoken.convert.recipes.nanogpt import translate_nanogpt
from megatoken.data.dataset import load_dataset
from megatoken.data.prepare import prepare
from megatoken.data.shard_format import hash_block
from megatoken.data.tokenizer import load_saved_tokenizer, load_tokenizer
from megatoken.errors import MegatokenError
from megatoken.eval.tasks import find_tasks, read_examples
from megatoken.system.atomic_write import read_object
from megatoken.system.metrics_log import read_metrics
from megatoken.train.run_folder import check_folder
from tests.convert.models import draw_model, save_run
from tests.data.small_dataset import write_dataset

CONFIG, DATA, CHECKPOINT = 2, 3, 4  # exit codes
LARGEST_GROWTH = 200 << 20  # bytes of memory
WATCHED = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "subprocess.Popen",
    "socket.connect",
    "pickle.find_class",
)
_events: list[str] = []
_outside = ""  # while a reader works: the folder that it must not touch


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if _outside and (
        event in WATCHED or (event == "open" and str(arguments[0]).startswith(_outside))
    ):
        _events.append(f"{event} {arguments}"[:200])


sys.addaudithook(_note)


def attack(tmp_path: Path, code: int | None, call: Callable[[], object]) -> str:
    """Call a reader; it must raise a one-line error with this exit code (None: nothing), and do nothing else.

    tmp_path / "outside" must not be opened or changed; memory may grow by LARGEST_GROWTH.
    """
    global _outside
    outside = tmp_path / "outside"
    before = peak_memory(reset=True)
    _outside, message = str(outside), ""
    _events.clear()
    try:
        call()
        found = None
    except MegatokenError as error:
        found, message = int(error.code), str(error)
    finally:
        _outside = ""
    assert _events == []
    assert [path.name for path in outside.iterdir()] == ["secret"]
    assert (outside / "secret").read_text() == "secret"
    assert found == code, message
    assert message.isprintable()
    assert peak_memory() - before < LARGEST_GROWTH
    return message


def peak_memory(*, reset: bool = False) -> int:
    """The most memory that this process has had, bytes; since now with `reset`. 0 where Linux's /proc is not."""
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) << 10
    except OSError:
        return 0


class Call:
    """Unpickling it calls a function, and sets a state if one is given."""

    def __init__(self, function: Callable[..., Any], *arguments: Any, state: Any = None) -> None:
        self.values = function, arguments, state

    def __reduce__(self) -> tuple[Any, ...]:
        return self.values if self.values[2] is not None else self.values[:2]


def list_payloads(canary: Path) -> dict[str, bytes]:
    """Bytes that make a file at `canary` when they are unpickled, or take all memory, or are JSON made to break it."""
    touch, python = f"touch {canary}", f"open({str(canary)!r}, 'w').close()"
    calls = {
        "system": Call(os.system, touch),
        "popen": Call(os.popen, touch),
        "spawn": Call(os.posix_spawn, "/bin/sh", ["sh", "-c", touch], {}),
        "execv": Call(os.execv, "/bin/sh", ["sh", "-c", touch]),
        "call": Call(subprocess.call, touch, None, None),
        "check_output": Call(subprocess.check_output, ["touch", str(canary)]),
        "pty": Call(pty.spawn, ["touch", str(canary)]),
        "eval": Call(builtins.eval, f"[{python}]"),
        "exec": Call(builtins.exec, python),
        "compile": Call(builtins.exec, Call(builtins.compile, python, "x", "exec")),
        "import": Call(builtins.__import__, "antigravity"),
        "import_module": Call(importlib.import_module, "antigravity"),
        "run_path": Call(runpy.run_path, str(canary.parent / "secret")),
        "open": Call(builtins.open, str(canary), "w"),
        "FileIO": Call(io.FileIO, str(canary), "w"),
        "touch": Call(Path.touch, canary),
        "rmtree": Call(shutil.rmtree, str(canary.parent)),
        "symlink": Call(os.symlink, "/etc/passwd", str(canary)),
        "getattr": Call(builtins.getattr, Call(importlib.import_module, "os"), "system"),
        "attrgetter": Call(operator.methodcaller("touch"), canary),
        "partial": Call(functools.partial(os.system, touch)),
        "map": Call(builtins.list, Call(builtins.map, os.system, [touch])),
        "marshal": Call(
            builtins.exec, Call(marshal.loads, marshal.dumps(compile(python, "x", "exec")))
        ),
        "setstate": Call(functools.partial, print, state=(os.system, (touch,), {}, {})),
        "reconstructor": Call(copyreg._reconstructor, Path, object, None),  # type: ignore[attr-defined]
        "codecs": Call(builtins.eval, Call(codecs.decode, codecs.encode(python, "rot13"), "rot13")),
        "numpy": Call(np.load, str(canary.parent / "secret")),
        "torch": Call(torch.load, str(canary.parent / "secret")),
        "hub": Call(torch.hub.load, str(canary.parent), "secret"),
        "tensor": Call(torch.Tensor, 2**40),
        "bytearray": Call(builtins.bytearray, 2**34),
        "namespace": Call(
            types.SimpleNamespace, state={"__class__": os.system, "config": os.system}
        ),
    }
    payloads = {name: pickle.dumps(call, 2) for name, call in calls.items()}
    payloads |= {f"protocol {n}": pickle.dumps({"model": calls["system"]}, n) for n in range(6)}
    text = touch.encode()
    return payloads | {
        "inst": b"(S'" + text + b"'\nios\nsystem\n.",
        "obj": b"(cos\nsystem\nS'" + text + b"'\no.",
        "stack global": b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c"
        + bytes([len(text)])
        + text
        + b"\x85R.",
        "persistent": b"Pcos\nsystem\n.",
        "extension": b"\x80\x02\x82\x01.",
        "two": pickle.dumps({}, 2) + pickle.dumps(calls["system"], 2),
        "mark bomb": b"\x80\x02" + b"(" * 100_000,
        "deep": b"[" * 100_000,
        "deep objects": b'{"a":' * 100_000,
        "long number": b"9" * 100_000,
        "infinite": b'{"step": 1e999, "files": {"a": {"bytes": 1e999, "xxh3_128": ""}}, "eot": 1e999}',
        "doubled": b'{"format": 1, "format": "megatoken dataset", "version": 1, "version": [], "name": 1, "name": 2}',
        "null": b"null",
        "list": b"[[], {}]",
        "ansi": b"\x1b[2J\x1b]0;owned\x07",
    }


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of one checkpoint, and a dataset, which the attacks copy and spoil."""
    folder = tmp_path_factory.mktemp("good")
    save_run(folder / "run", draw_model())
    write_dataset(folder / "data", {"train": [100]})
    for path in ("run", "data"):  # everything is imported before the first attack
        assert (
            load_pretrained(folder / path) if path == "run" else load_dataset(folder / path)
        ) is not None
    return folder


@pytest.fixture
def place(tmp_path: Path, good: Path) -> Path:
    """A folder to put hostile files in, beside another that they try to reach."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("secret")
    shutil.copytree(good, tmp_path / "place")
    return tmp_path / "place"


def checkpoint_of(place: Path) -> Path:
    return place / "run" / "checkpoints" / "step-00000000"


def seal(folder: Path, meta: dict[str, Any] | None = None) -> None:
    """Give a checkpoint a manifest that fits its files, as its author would."""
    files = {
        path.relative_to(folder).as_posix(): FileEntry(path.stat().st_size, hash_file(path))
        for path in folder.rglob("*")
        if path.is_file() and path.name != MANIFEST
    }
    before = json.loads((folder / MANIFEST).read_text())["meta"]
    (folder / MANIFEST).write_bytes(
        encode_manifest(CheckpointManifest(0, before | (meta or {}), files))
    )


def in_checkpoint(
    name: str, *, sealed: bool = True
) -> Callable[[Path, bytes], Callable[[], object]]:
    """A file of a checkpoint, whose manifest says that it belongs there, or not."""

    def spoil(place: Path, payload: bytes) -> Callable[[], object]:
        (checkpoint_of(place) / name).write_bytes(payload)
        if sealed:
            seal(checkpoint_of(place))
        return lambda: load_pretrained(checkpoint_of(place))

    return spoil


def in_file(
    name: str, read: Callable[[Path], object]
) -> Callable[[Path, bytes], Callable[[], object]]:
    """A file of its own, given to a reader."""

    def spoil(place: Path, payload: bytes) -> Callable[[], object]:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(payload)
        return lambda: read(place / name)

    return spoil


def in_torch_zip(place: Path, payload: bytes) -> Callable[[], object]:
    """The pickles of a file of torch.save; a decoy stands first."""
    with zipfile.ZipFile(place / "ckpt.pt", "w") as archive:
        archive.writestr("decoy/data.pkl", pickle.dumps({}, 2))
        archive.writestr("archive/data.pkl", payload)
        archive.writestr("archive/DATA.PKL", payload)
        archive.writestr("archive/version", "3\n")
    return lambda: load_pretrained(place / "ckpt.pt")


def in_torch_tar(place: Path, payload: bytes) -> Callable[[], object]:
    """torch's first format: a tar of pickles, here with names that leave the folder, too."""
    with tarfile.open(place / "ckpt.pt", "w") as archive:
        for name in (
            "pickle",
            "storages",
            "tensors",
            "sys_info",
            "../outside/canary",
            str(place.parent / "outside/canary"),
        ):
            entry = tarfile.TarInfo(name)
            entry.size = len(payload)
            archive.addfile(entry, io.BytesIO(payload))
    return lambda: load_pretrained(place / "ckpt.pt")


def in_torch_stream(place: Path, payload: bytes) -> Callable[[], object]:
    """torch's second format: pickles one after the other."""
    head = [
        pickle.dumps(value, 2) for value in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})
    ]
    (place / "ckpt.pt").write_bytes(b"".join(head) + payload)
    return lambda: load_pretrained(place / "ckpt.pt")


def in_hf(name: str) -> Callable[[Path, bytes], Callable[[], object]]:
    """A file of a Hugging Face folder, beside a good config.json."""

    def spoil(place: Path, payload: bytes) -> Callable[[], object]:
        sizes = {"n_layer": 1, "n_head": 1, "n_embd": 8, "vocab_size": 10, "n_positions": 8}
        (place / "hf").mkdir(exist_ok=True)
        (place / "hf" / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
        (place / "hf" / name).write_bytes(payload)
        return lambda: load_pretrained(place / "hf")

    return spoil


def in_npy(place: Path, payload: bytes) -> Callable[[], object]:
    """A .npy file that says it holds Python objects."""
    header = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(117) + b"\n"
    (place / "npy").mkdir(exist_ok=True)
    (place / "npy" / "train.npy").write_bytes(b"\x93NUMPY\x01\x00v\x00" + header + payload)
    return lambda: load_dataset(place / "npy")


def read_progress(path: Path) -> object:
    (path.parent / "text.txt").write_text("words")
    return prepare(path.parent / "text.txt", path.parent, tokenizer="bytes", workers=1)


def read_log(path: Path) -> object:
    path.write_bytes(path.read_bytes() + b"\n")  # without it, a last line is taken for half-written
    return read_metrics(path.parent, warn=lambda text: None)


def read_eval(path: Path) -> object:
    return read_examples(find_tasks("hellaswag"), path)


PLACES: dict[str, tuple[int | None, Callable[[Path, bytes], Callable[[], object]]]] = {
    "torch zip": (CHECKPOINT, in_torch_zip),
    "torch tar": (CHECKPOINT, in_torch_tar),
    "torch stream": (CHECKPOINT, in_torch_stream),
    "ckpt.pt": (CHECKPOINT, in_file("ckpt.pt", load_pretrained)),
    "ckpt.pt of a folder": (
        CHECKPOINT,
        in_file("nano/ckpt.pt", lambda path: load_pretrained(path.parent)),
    ),
    "llm.c": (CHECKPOINT, in_file("model.bin", load_pretrained)),
    "pytorch_model.bin": (CHECKPOINT, in_hf("pytorch_model.bin")),
    "consolidated.00.pth": (CHECKPOINT, in_hf("consolidated.00.pth")),
    "model.safetensors": (CHECKPOINT, in_hf("model.safetensors")),
    "config.json": (CHECKPOINT, in_hf("config.json")),
    "manifest of a checkpoint": (CHECKPOINT, in_checkpoint(MANIFEST, sealed=False)),
    ".metadata of a checkpoint": (CHECKPOINT, in_checkpoint(".metadata", sealed=False)),
    "__0_0.distcp of a checkpoint": (CHECKPOINT, in_checkpoint("__0_0.distcp", sealed=False)),
    "sealed tensors": (CHECKPOINT, in_checkpoint("model.safetensors")),
    "sealed tokenizer": (DATA, in_checkpoint("tokenizer/tokenizer.json")),
    "sealed description": (DATA, in_checkpoint("tokenizer/megatoken_tokenizer.json")),
    "sealed .metadata": (None, in_checkpoint(".metadata")),  # never opened
    ".npy": (DATA, in_file("npy/train.npy", lambda path: load_dataset(path.parent))),
    ".npy of objects": (DATA, in_npy),
    "shard": (DATA, in_file("bin/fineweb_train.bin", lambda path: load_dataset(path.parent))),
    "manifest of a dataset": (
        DATA,
        in_file("data/manifest.json", lambda path: load_dataset(path.parent)),
    ),
    "tokenizer.json": (DATA, in_file("tokenizer.json", lambda path: load_tokenizer(str(path)))),
    "vocab.json": (
        DATA,
        in_file(
            "bpe/vocab.json",
            lambda path: [(path.parent / "merges.txt").touch(), load_tokenizer(str(path.parent))],
        ),
    ),
    "tokenizer's description": (
        DATA,
        in_file("t/megatoken_tokenizer.json", lambda path: load_saved_tokenizer(path.parent)),
    ),
    "progress of prepare": (DATA, in_file("out/progress.json", read_progress)),
    "metrics": (None, in_file("metrics.jsonl", read_log)),  # other lines are left out
    "examples": (DATA, in_file("hellaswag.jsonl", read_eval)),
    "examples in parquet": (DATA, in_file("hellaswag.parquet", read_eval)),
    "provenance.json": (
        CONFIG,
        in_file(
            "new/provenance.json", lambda path: check_folder(path.parent, load_config("quickstart"))
        ),
    ),
    "machine.json, status.json": (
        None,
        in_file("machine.json", read_object),
    ),  # taken for lost, measured again
    "recipe": (CONFIG, in_file("recipe.yaml", lambda path: resolve(str(path)))),
    "Composer's recipe": (CONFIG, in_file("composer.yaml", translate_composer)),
    "nanoGPT's recipe": (CONFIG, in_file("config.py", lambda path: translate_nanogpt(str(path)))),
}


@pytest.mark.fault(28, 29)
@pytest.mark.parametrize("name", PLACES)
def test_no_file_runs_code(tmp_path: Path, place: Path, name: str) -> None:
    code, spoil = PLACES[name]
    payloads = list_payloads(tmp_path / "outside" / "canary")
    assert len(payloads) >= 50
    for payload in payloads.values():
        attack(tmp_path, code, spoil(place, payload))


def test_an_attack_that_succeeds_is_noticed(tmp_path: Path, place: Path) -> None:
    payloads = list_payloads(tmp_path / "outside" / "canary")
    for name in ("system", "touch", "inst", "stack global"):
        with pytest.raises(AssertionError):
            attack(tmp_path, None, lambda name=name: pickle.loads(payloads[name]))
        (tmp_path / "outside" / "canary").unlink(missing_ok=True)
    with pytest.raises(AssertionError):
        attack(tmp_path, None, (tmp_path / "outside" / "secret").read_text)


YAMLS = (
    *(
        "!!python/object/apply:os.system ['touch CANARY']",
        "!!python/object/new:os.system ['touch CANARY']",
    ),
    *(
        "!!python/name:os.system",
        "!!python/module:os",
        "!!python/object:os.system {}",
        "!<tag:yaml.org,2002:python/none>",
    ),
    *("!!map {}", "!!binary aGVsbG8=", "!custom x", "!!python/tuple [1]"),
    "&a [x, x]",
    "\n  a: &a {x: 1}\n  b: *a",
    "\n  a: &a {x: 1}\n  <<: *a",
    "\n"
    + "".join(
        f"  {b}: &{b} [*{a}, *{a}, *{a}, *{a}]\n"
        for a, b in zip("abcdefgh", "bcdefghi", strict=True)
    ),
    "[" * 500,
    "{a: " * 500,
    "\n".join(" " * level + "a:" for level in range(400)),
    "- " * 500,
    "'" + "x" * (1 << 20),
    "\n  ? [a, b]\n  : c",
    "\x00",
    "\ud800",
)


@pytest.mark.fault(28, 29)
@pytest.mark.parametrize("number", range(len(YAMLS)))
def test_no_recipe_runs_code(tmp_path: Path, place: Path, number: int) -> None:
    text = YAMLS[number].replace("CANARY", str(tmp_path / "outside" / "canary"))
    path = place / "recipe.yaml"
    for whole in (f"model: {text}\n", text + "\n", f"{text}: 1\n", f"include: {text}\n"):
        path.write_bytes(whole.encode(errors="surrogatepass"))
        attack(tmp_path, CONFIG, lambda: resolve(str(path)))
        attack(tmp_path, CONFIG, lambda: translate_composer(path))


def make_safetensors(header: Any, data: bytes = bytes(32), size: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if size is None else size) + raw + data


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


SAFETENSORS = (
    *(
        make_safetensors({}, size=size)
        for size in (1 << 40, 1 << 63, (1 << 64) - 1, 100_000_001, 33)
    ),
    make_safetensors({"a": entry([8], 0, 1 << 40)}),
    make_safetensors({"a": entry([8], 32, 0)}),
    make_safetensors({"a": entry([8], -32, 0)}),
    make_safetensors({"a": entry([-8], 0, 32)}),
    make_safetensors({"a": entry([1 << 62, 1 << 62], 0, 32)}),
    make_safetensors({"a": entry([4], 0, 16), "b": entry([4], 0, 16)}),
    make_safetensors({"a": entry([4], 0, 16), "b": entry([6], 8, 32)}),
    make_safetensors({"a": entry([4], 0, 16)}),
    make_safetensors({"a": entry([8], 0, 32, "PICKLE")}),
    make_safetensors({"a": entry([8], 0, 32), "__metadata__": {"format": {"x": 1}}}),
    make_safetensors(b"[" * 100_000),
    make_safetensors(b'{"a":' * 100_000),
    make_safetensors({"../outside/canary": entry([8], 0, 32)}),
    make_safetensors({"\x1b[2J": entry([8], 0, 32)}),
    make_safetensors({"transformer.wte.weight": entry([8], 0, 32)}),
    make_safetensors({"transformer.wte.weight": entry([4], 0, 32, "I64")}),
    b"",
    b"\x00" * 7,
)
HEADERS = (  # of a checkpoint's own files: what `parts` and `sizes` say of tensor x, which holds 2 x 4 numbers
    *(
        {"parts": parts, "sizes": {"x": [2, 4]}}
        for parts in (7, {"x": 1}, {"x": []}, {"x": [[[0, "a"]], None]})
    ),
    *(
        {"parts": {"x": parts}, "sizes": {"x": [2, 4]}}
        for parts in ([[[0, 9]], [0, 4]], [[[0, 2]], [0, 9]], [[[2, 0]], [0, 4]])
    ),
    *(
        {"parts": {"x": [[[0, 2]], [0, 4]]}, "sizes": {"x": sizes}}
        for sizes in ([1 << 40, 4], [1 << 40, 1 << 40], ["a"], [[]])
    ),
    {"parts": {}, "sizes": {"x": [1 << 40, 4]}},
    {"parts": {"x": [[[1 << 40, (1 << 40) + 2]], [0, 4]]}, "sizes": {"x": [1 << 41, 4]}},
)


@pytest.mark.fault(29)
def test_hostile_tensor_headers_are_one_error(tmp_path: Path, place: Path) -> None:
    for content in SAFETENSORS:
        attack(tmp_path, CHECKPOINT, in_hf("model.safetensors")(place, content))
        attack(tmp_path, CHECKPOINT, in_checkpoint("model.safetensors")(place, content))
    folder = checkpoint_of(place)
    for header in HEADERS:
        save_file(
            {"x": torch.ones(2, 4)},
            folder / "model.safetensors",
            {key: json.dumps(it) for key, it in header.items()},
        )
        seal(folder)
        attack(tmp_path, CHECKPOINT, lambda: load_pretrained(folder))
        attack(tmp_path, CHECKPOINT, lambda: consolidate(folder, place / "merged", pytest.fail))
    save_file({"x": torch.ones(2, 4)}, folder / "model.safetensors", {"parts": "[" * 100_000})
    seal(folder)
    attack(tmp_path, CHECKPOINT, lambda: load_pretrained(folder))


SHAPES: tuple[Any, ...] = (
    *(None, [], "x", 7, {"n_layer": 10**9}, {"n_layer": -1}, {"n_layer": 2.5}, {"n_layer": 1e300}),
    *(
        {"d_model": 10**15},
        {"d_model": 10**30},
        {"vocab_size": 10**18},
        {"seq_len": 10**12},
        {"n_head": 0},
        {"n_head": 3},
    ),
    *(
        {"vocab_multiple": 0},
        {"vocab_multiple": 10**18},
        {"vocab_multiple": "x"},
        {"mlp": "os.system"},
        {"mlp": []},
    ),
    *({"norm_eps": []}, {"bias": "x"}, {"unknown": 1}, {"__class__": "x"}, {"d_ff": 10**17}),
)


@pytest.mark.fault(29)
def test_hostile_manifests_of_checkpoints_are_one_error(tmp_path: Path, place: Path) -> None:
    folder = checkpoint_of(place)
    shape = json.loads((folder / MANIFEST).read_text())["meta"]["shape"]
    for change in SHAPES:
        seal(folder, {"shape": shape | change if isinstance(change, dict) else change})
        attack(tmp_path, CHECKPOINT, lambda: load_pretrained(folder))
    for attention in ("os.system", ["flash"], {"a": 1}):
        seal(folder, {"shape": shape, "attention": attention})
        attack(tmp_path, CHECKPOINT, lambda: load_pretrained(folder))
    with (folder / MANIFEST).open("wb") as file:
        file.truncate(1 << 40)
    attack(tmp_path, CHECKPOINT, lambda: load_pretrained(folder))


def outside_names(tmp_path: Path) -> list[str]:
    secret = tmp_path / "outside" / "secret"
    return [
        *(
            "../../../../outside/secret",
            str(secret),
            f"file://{secret}",
            "a/../../../../../outside/secret",
            "..",
            ".",
            "",
        ),
        *(
            "secret\0",
            "~/secret",
            "$HOME/secret",
            "..\\outside\\secret",
            "//outside/secret",
            "a\nb",
            "\x1b[2J",
        ),
    ]


@pytest.mark.fault(29)
def test_no_name_in_a_manifest_leaves_its_folder(tmp_path: Path, place: Path) -> None:
    folder, data = checkpoint_of(place), place / "data"
    rows = (data / "manifest.json").read_bytes().rpartition(b',\n"xxh3"')[0]
    files = dict(verify(folder).files)
    secret = FileEntry(6, hash_file(tmp_path / "outside" / "secret"))
    index = {"metadata": {}, "weight_map": dict.fromkeys(["wte.weight"], "../../outside/secret")}
    for name in outside_names(tmp_path):
        (folder / MANIFEST).write_bytes(
            encode_manifest(CheckpointManifest(0, {}, files | {name: secret}))
        )
        attack(tmp_path, CHECKPOINT, lambda: load_pretrained(folder))
        body = rows.replace(b'"train_000000.bin"', json.dumps(name).encode())
        seal = f',\n"xxh3": "{hash_block(body)}"\n}}\n'.encode()
        (data / "manifest.json").write_bytes(body + seal)
        attack(tmp_path, DATA, lambda: load_dataset(data))
    attack(
        tmp_path,
        CHECKPOINT,
        in_hf("model.safetensors.index.json")(place, json.dumps(index).encode()),
    )
    auto = {
        "model_type": "gpt2",
        "auto_map": {"AutoModel": "secret.Model"},
        "trust_remote_code": True,
    }
    attack(tmp_path, CHECKPOINT, in_hf("config.json")(place, json.dumps(auto).encode()))
    template = {
        "chat_template": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "tokenizer_class": "os.system",
    }
    attack(
        tmp_path, CHECKPOINT, in_hf("tokenizer_config.json")(place, json.dumps(template).encode())
    )


@pytest.mark.fault(29)
def test_links_are_not_followed_out_of_a_checkpoint(tmp_path: Path, place: Path) -> None:
    for name, target in (
        ("config.yaml", "secret"),
        ("tokenizer", "."),
        ("link", "secret"),
        ("model.safetensors", "secret"),
    ):
        folder = Path(shutil.copytree(checkpoint_of(place), place / f"linked-{name}"))
        if (folder / name).exists():
            (folder / name).rename(place / f"before-{name}")
        (folder / name).symlink_to(tmp_path / "outside" / target)
        message = attack(tmp_path, CHECKPOINT, lambda folder=folder: verify(folder))
        assert "it is a link or a device, not a file" in message
    os.mkfifo(checkpoint_of(place) / "pipe")
    attack(tmp_path, CHECKPOINT, lambda: verify(checkpoint_of(place)))


NPY_HEADERS = (
    *(
        "{'descr': '<u2', 'fortran_order': False, 'shape': (SHAPE,), }".replace("SHAPE", shape)
        for shape in ("-1", "1<<40", "'a'")
    ),
    "{'descr': '<u2', 'fortran_order': False, 'shape': (1099511627776,), }",
    "{'descr': '<u2', 'fortran_order': False, 'shape': (99999999999999999999999,), }",
    "{'descr': [('a', '|O')], 'fortran_order': False, 'shape': (1,), }",
    "{'descr': ('<u2', (1099511627776,)), 'fortran_order': False, 'shape': (1,), }",
    "{'descr': '<u2', 'fortran_order': __import__('os').system('touch CANARY'), 'shape': (1,), }",
    "[x for x in ().__class__.__base__.__subclasses__()]",
    "(" * 9000,
    "-" * 9000 + "1",
    "{" + "'a': 1, " * 1000 + "}",
    "\x00",
    "'" * 101,
    "  \n\t 1L",
)


@pytest.mark.fault(29)
def test_hostile_npy_headers_are_one_error(tmp_path: Path, place: Path) -> None:
    (place / "npy").mkdir()
    for version, size in ((1, "<H"), (2, "<I"), (3, "<I"), (9, "<I")):
        for header in NPY_HEADERS:
            text = header.replace("CANARY", str(tmp_path / "outside" / "canary")).encode() + b"\n"
            raw = (
                b"\x93NUMPY" + bytes([version, 0]) + struct.pack(size, len(text)) + text + bytes(64)
            )
            (place / "npy" / "train.npy").write_bytes(raw)
            attack(tmp_path, DATA, lambda: load_dataset(place / "npy"))


def make_tokenizer(**parts: Any) -> bytes:
    model = {"type": "BPE", "vocab": {"a": 0, "</s>": 1}, "merges": []}
    empty = dict.fromkeys(
        ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    )
    return json.dumps(
        {"version": "1.0", "added_tokens": [], "model": model, **empty, **parts}
    ).encode()


def split_by(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def add_token(id: int) -> list[dict[str, Any]]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return [{"id": id, "content": "x", **flags}]


BPE = {"type": "BPE", "vocab": {"a": 0, "</s>": 1}, "merges": []}
TOKENIZERS = (
    *(
        make_tokenizer(pre_tokenizer=split_by(regex))
        for regex in ("(", "(?<n>a\\g<n>)", "a{100001}", "[" * 10_000)
    ),
    *(
        make_tokenizer(normalizer={"type": "Precompiled", "precompiled_charsmap": it})
        for it in ("AAAA", "/////wAA", "!")
    ),
    *(make_tokenizer(added_tokens=add_token(id)) for id in (-1, 1 << 40, 10**30)),
    make_tokenizer(model=BPE | {"vocab": {"a": 0, "</s>": (1 << 32) - 1}}),
    make_tokenizer(model=BPE | {"vocab": {"a": 0, "</s>": 1 << 24}}),
    make_tokenizer(model=BPE | {"vocab": {}}),
    make_tokenizer(model=BPE | {"merges": ["a b"]}),
    make_tokenizer(
        model=BPE
        | {
            "merges": [["a", "##b"]],
            "vocab": {"a": 0, "##b": 1},
            "continuing_subword_prefix": "#" * 20,
        }
    ),
    make_tokenizer(model=BPE | {"dropout": 5.0}),
    make_tokenizer(model={"type": "Unigram", "unk_id": 5, "vocab": []}),
    make_tokenizer(model={"type": "Pickle", "vocab": "x"}),
    make_tokenizer(pre_tokenizer={"type": "os.system"}),
)


@pytest.mark.fault(29)
def test_hostile_tokenizers_are_one_error(tmp_path: Path, place: Path) -> None:
    for content in TOKENIZERS:
        attack(
            tmp_path,
            DATA,
            in_file("tokenizer.json", lambda path: load_tokenizer(str(path)))(place, content),
        )
    slow = make_tokenizer(
        pre_tokenizer=split_by("(a+)+$")
    )  # the engine gives up after ten million tries
    attack(
        tmp_path,
        DATA,
        in_file("tokenizer.json", lambda path: load_tokenizer(str(path)).encode("a" * 40 + "!"))(
            place, slow
        ),
    )
    description = {"name": "x", "vocab_size": 2, "eot": 1, "fingerprint": ""}
    (place / "saved").mkdir()
    (place / "saved" / "tokenizer.json").write_bytes(make_tokenizer())
    for change in (
        {"eot": -1},
        {"eot": 2},
        {"eot": 10**30},
        {"eot": []},
        {"fingerprint": None},
        {"name": 5},
    ):
        (place / "saved" / "megatoken_tokenizer.json").write_text(json.dumps(description | change))
        attack(tmp_path, DATA, lambda: load_saved_tokenizer(place / "saved"))


@pytest.mark.fault(29)
def test_archives_are_read_in_bounded_memory(tmp_path: Path, place: Path) -> None:
    """Much from little: an endless line, NULs, a dictionary of one long text, a pickle that is compressed."""
    spaces, nul = b" " * (1 << 20), bytes(1 << 20)
    (place / "bomb.jsonl.gz").write_bytes(gzip.compress(spaces) * 1000)
    (place / "bomb.jsonl.zst").write_bytes(pyarrow.compress(spaces, "zstd", asbytes=True) * 1000)
    (place / "nul.txt.gz").write_bytes(gzip.compress(nul) * 1000)
    text = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array(np.zeros(300, np.int32)), [" " * (1 << 20)]
    )
    parquet.write_table(pyarrow.table({"text": text}), place / "bomb.parquet", compression="zstd")
    for name in ("bomb.jsonl.gz", "bomb.jsonl.zst", "nul.txt.gz", "bomb.parquet"):
        attack(
            tmp_path,
            DATA,
            lambda name=name: prepare(place / name, place / name[:9], tokenizer="bytes", workers=1),
        )
    zipped = zipfile.ZipFile(place / "ckpt.pt", "w", zipfile.ZIP_DEFLATED)
    with zipped, zipped.open("archive/data.pkl", "w") as file:
        for _ in range(250):
            file.write(nul)
    attack(tmp_path, CHECKPOINT, lambda: load_pretrained(place / "ckpt.pt"))


@pytest.mark.fault(28, 29)
def test_tensors_of_a_pickle_take_no_more_memory_than_its_file(tmp_path: Path, place: Path) -> None:
    sizes = {
        "n_layer": 1,
        "n_head": 1,
        "n_embd": 8,
        "vocab_size": 10,
        "block_size": 8,
        "bias": True,
    }
    wide = torch.zeros(1).expand(1 << 40)
    for state in (
        {"transformer.wte.weight": wide, "lm_head.weight": wide},
        {"lm_head.weight": wide},
        {"x": torch.zeros(2, device="meta")},
    ):
        torch.save({"model": OrderedDict(state), "model_args": sizes}, place / "ckpt.pt")
        attack(tmp_path, CHECKPOINT, lambda: load_pretrained(place / "ckpt.pt"))
    header = np.zeros(256, "<i4")
    header[:8] = (
        20240326,
        3,
        1,
        1,
        10**5,
        1,
        1,
        1,
    )  # a hundred thousand layers, 1 wide, in 10 MB of zeros
    numbers = 2 + 10**5 * 25 + 2
    (place / "model.bin").write_bytes(header.tobytes() + bytes(4 * numbers))
    attack(tmp_path, CHECKPOINT, lambda: load_pretrained(place / "model.bin"))


HOSTILE_PATHS = (
    *(
        "nothing://bucket/run",
        "file:///dev/null/x",
        "gsx://a",
        "httpx://host/x",
        "a\0b",
        "x" * 300,
        "",
        "file",
        "file/below",
    ),
)
CONTAINED = (
    "~",
    "$HOME",
    "[/red]",
    "a\nb",
    "\x1b[2J",
    "caf\u00e9\u202e",
    "-x",
    "\udcff",
    " ",
    "..x",
)


@pytest.mark.fault(55)
def test_hostile_names_and_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    Path("file").write_text("words")
    Path("text.txt").write_text("some words")

    def run(*words: str) -> tuple[int, str]:
        code = main([*words])
        text = capsys.readouterr().err
        return code, text

    for path in HOSTILE_PATHS:
        for words in (
            ["prepare", "text.txt", "--tokenizer", "bytes"],
            ["train", "quickstart"],
            ["export", "x"],
            ["consolidate", "x"],
        ):
            code, text = run(*words, f"--out={path}")
            assert code in (2, 3, 4, 5), (words, path, code)
            assert text.startswith("error: "), (words, path, text)
            assert text.count("\n") == 1, (words, path, text)
            assert text[:-1].isprintable()
    assert sorted(path.name for path in Path().iterdir()) == ["file", "text.txt"]
    for path in CONTAINED:
        code, text = run("prepare", "text.txt", "--tokenizer", "bytes", f"--out={path}")
        assert (code, text) == (0, ""), path
        assert (Path(path) / "manifest.json").is_file()
    assert len(list(Path().iterdir())) == len(CONTAINED) + 2
    assert [path.name for path in tmp_path.iterdir()] == ["work"]


@pytest.mark.fault(55)
@pytest.mark.parametrize("name", ["...yaml", "a\nb.yaml", "\x1b[2J.yaml"])
def test_a_recipe_whose_name_is_no_run_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("version: 2\n")
    with pytest.raises(MegatokenError, match="cannot name a run") as caught:
        resolve(str(tmp_path / name))
    assert caught.value.code == CONFIG
    assert str(caught.value).isprintable()
