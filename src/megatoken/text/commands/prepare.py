"""`megatoken prepare SOURCE`: tokenize text, or conversations, into shards."""

import re
import shlex
import shutil
import sys
import time
from argparse import Namespace
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from megatoken.base.console import (
    SEPARATOR,
    Console,
    format_count,
    format_duration,
    format_quantity,
)
from megatoken.base.errors import ConfigError, DataError
from megatoken.base.system.address import is_address
from megatoken.cli import Data

if TYPE_CHECKING:
    from megatoken.store.objects import ObjectStore
    from megatoken.text.output_folder import PrepareResult
    from megatoken.text.prepare import OnProgress, Progress
    from megatoken.text.sources import Source
    from megatoken.text.tokenizer import Tokenizer

HELP = "tokenize text into shards"
EXAMPLE = "megatoken prepare texts/ --out data/mine"
COMMON = ("val_fraction", "shard_tokens", "invalid")  # options of text and of conversations
LABELS = {
    "empty": "documents without text",
    "replaced": "documents with invalid UTF-8, replaced",
    "binary_files": "binary files",
    "seams": "cuts inside documents, which may change ids",
    "val_from_tail_tokens": "tokens held out at the text's end",
}
# By the kind of examples.
RECIPES = {"chat": "sft", "preference": "dpo", "kto": "kto", "prompt": "grpo"}


def run(options: Namespace, console: Console) -> Data:
    from megatoken.store.datasets import begin_upload, upload_dataset
    from megatoken.text.chat_formats import peek_format
    from megatoken.text.prepare import prepare
    from megatoken.text.sources import HUB, describe_skipped, find_corpus

    if options.join:
        return join(options.join, console)
    if options.source is None or options.out is None:
        raise ConfigError("no SOURCE or no --out", "prepare", "see `megatoken prepare --help`")
    exclude = None if is_address(options.out) else options.out
    source = find_corpus(options.source, options.root, exclude, options.val)
    if source.skipped:
        hint = "a pattern such as '**/*.py' reads any files, a folder only text and rows"
        console.print(f"files skipped: {describe_skipped(source.skipped)} ({hint})")
    row_format = None if options.source in HUB else peek_format(source, options.text_key)
    if row_format and options.part:
        raise ConfigError("conversations have no parts", "--part", "leave it out")
    if options.part:
        return prepare_parts(options, source, console)
    if row_format:
        return prepare_rows(options, source, RECIPES[row_format.kind], console)
    folder = begin_upload(options.out) if is_address(options.out) else options.out
    with closing(console):
        prepared = prepare(
            source,
            folder,
            **select(options, "tokenizer", "workers", "text_key", *COMMON),
            on_progress=PrepareBar(console).update,
        )
    if folder != options.out:
        upload_dataset(folder, options.out, console.print)
        console.print(f"uploaded; local copy in {folder}")
    print_summary(console, options.out, prepared)
    return asdict(prepared)


def prepare_parts(options: Namespace, corpus: "Source", console: Console) -> Data:
    """Prepare every Nth part of a corpus from part I on, each in its own folder of --out."""
    from megatoken.data.shard_format import MANIFEST_NAME
    from megatoken.store.datasets import begin_upload, upload_dataset
    from megatoken.store.objects import ObjectStore
    from megatoken.text.parts import divide
    from megatoken.text.prepare import prepare

    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", options.part)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise ConfigError(f"cannot read {options.part!r}", "--part", "write I/N, such as 3/16")
    is_remote = is_address(options.out)
    root = begin_upload(options.out) if is_remote else options.out
    settings = select(options, "tokenizer", "workers", "text_key", *COMMON)
    settings["on_progress"] = PrepareBar(console).update
    results = dict[str, Any]()
    with closing(console):
        if options.tokenizer.startswith("bpe:"):
            trainer = corpus if match[1] == "1" else None
            settings["tokenizer"] = find_trained(options, root, trainer, settings["on_progress"])
        for name, files, part in divide(corpus)[int(match[1]) - 1 :: int(match[2])]:
            target = f"{options.out}/{name}"
            if is_remote and ObjectStore(target).size(MANIFEST_NAME) is not None:
                console.print(f"{name} of {part.total:,}: already uploaded")
                continue
            folder = begin_upload(target) if is_remote else root / name
            prepared = prepare(files, folder, part=part, **settings)
            if is_remote:
                upload_dataset(folder, target, console.print)
                shutil.rmtree(folder)
            results[name] = asdict(prepared)
            console.print(f"{name} of {part.total:,}: {format_count(prepared.tokens, 'token')}")
    command = f"{name_program()} prepare --join {shlex.quote(str(options.out))}"
    console.print(f"when all parts are prepared: {command}")
    return results


def find_trained(
    options: Namespace, root: Path, corpus: "Source | None", on_progress: "OnProgress"
) -> str:
    """Return the folder in `root` with the tokenizer bpe:N of all parts.

    corpus: to train it on if it is not there, or None. Raises DataError if it is not there or has
    another size.
    """
    from megatoken.base.system.atomic_write import hash_file
    from megatoken.data.shard_format import DESCRIPTION_NAME
    from megatoken.store.objects import ObjectStore
    from megatoken.text.parts import train_tokenizer
    from megatoken.text.tokenizer import load_tokenizer

    folder, spec = root / "tokenizer", options.tokenizer
    store = ObjectStore(f"{options.out}/tokenizer") if is_address(options.out) else None
    if store:
        fetch_all(store, folder)
    if corpus and not (folder / DESCRIPTION_NAME).exists():
        train_tokenizer(corpus, root, spec, options.text_key, on_progress)
    if not (folder / DESCRIPTION_NAME).exists():
        fix = f"start --part 1/{options.part.partition('/')[2]} first, which trains it"
        raise DataError(f"{spec} is not trained yet", str(options.out), fix)
    if (name := load_tokenizer(str(folder)).name) != spec:
        raise DataError(f"the tokenizer here is {name}", str(options.out), "choose another --out")
    if store and corpus:
        names = {path.name for path in folder.iterdir()} - {DESCRIPTION_NAME}
        store.commit(folder, {name: hash_file(folder / name) for name in names}, DESCRIPTION_NAME)
    return str(folder)


def fetch_all(store: "ObjectStore", folder: Path, pattern: str = ".*") -> None:
    """Download small files whose names match a pattern; another process may do the same."""
    from megatoken.base.system.atomic_write import replace_file

    for name in store.list():
        if re.fullmatch(pattern, name):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, store.read(name))


def join(out: Path | str, console: Console) -> Data:
    """Make the parts at `out` one dataset."""
    from megatoken.store.datasets import upload_dataset
    from megatoken.store.objects import ObjectStore
    from megatoken.text.parts import join_parts

    with TemporaryDirectory(prefix="megatoken-") as temporary:
        folder = Path(temporary) if is_address(out) else Path(out)
        if is_address(out):
            files = r"part-\d+/manifest\.json|part-00001/tokenizer/.*"
            fetch_all(ObjectStore(str(out)), folder, files)
        prepared = join_parts(folder, out)
        if is_address(out):
            upload_dataset(folder, str(out), console.print)
    print_summary(console, out, prepared)
    return asdict(prepared)


def select(options: Namespace, *names: str) -> dict[str, Any]:
    """Return the options with these names."""
    return {name: getattr(options, name) for name in names}


def prepare_rows(options: Namespace, source: "Source", recipe: str, console: Console) -> Data:
    """Prepare conversations, preferences or prompts. recipe: name of a recipe that uses them."""
    from megatoken.text.prepare_chats import prepare_chats

    if is_address(options.out):
        raise ConfigError("conversations need a local folder", str(options.out), "copy it later")
    tokenizer, seq_len, init = load_tokenizer_and_context(options, console)
    prepared = prepare_chats(
        source, options.out, tokenizer, seq_len=seq_len, **select(options, "long", *COMMON)
    )
    print_summary(console, options.out, prepared, f"{recipe} --init {shlex.quote(init)}")
    return asdict(prepared)


def load_tokenizer_and_context(
    options: Namespace, console: Console
) -> "tuple[Tokenizer, int, str]":
    """Return the tokenizer, the context length, and the name of the model to use in messages.

    --tokenizer names a model or a tokenizer. A model also sets the context length, unless --context
    is given. Without a model, the name is "RUN".
    """
    from megatoken.data.shard_format import MANIFEST_NAME
    from megatoken.text.tokenizer import load_tokenizer

    path = Path(options.tokenizer)
    is_tokenizer = any((path / name).is_file() for name in ("tokenizer.json", MANIFEST_NAME))
    is_model = any((path / name).is_file() for name in ("config.json", "adapter_config.json"))
    if (path.is_dir() and not is_tokenizer) or is_model:
        from megatoken.text.load_pretrained import load_pretrained

        loaded = load_pretrained(options.tokenizer, console.warn)
        seq_len = options.context or loaded.model.config.seq_len
        return loaded.tokenizer, seq_len, options.tokenizer
    if not options.context and (path.exists() or options.tokenizer in ("gpt2", "bytes")):
        fix = "give the model as --tokenizer RUN, or a tokenizer and --context N"
        raise ConfigError("conversations are prepared for a model", "--tokenizer", fix)
    return load_tokenizer(options.tokenizer), options.context, "RUN"


class PrepareBar:
    """Shows a progress line if the output is a terminal."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._starts: dict[str, float] = {}  # of stages

    def update(self, progress: "Progress") -> None:
        """Show the fraction of bytes read, the time left and the speed."""
        if not self.console.is_live:
            return
        now = time.monotonic()
        seconds = max(now - self._starts.setdefault(progress.stage, now), 1e-6)
        share = min(progress.done_bytes / max(progress.total_bytes, 1), 1.0)
        parts = (
            f"{100 * share:3.0f}%",
            f"left {format_duration(seconds / share - seconds) if share else 'unknown'}",
            "training the tokenizer" if progress.stage == "vocabulary" else "tokenizing",
            f"{progress.tokens:,} tokens",
            f"{progress.tokens / seconds:,.0f} tokens/s",
        )
        self.console.step(SEPARATOR.join(parts), share=share)


def print_summary(
    console: Console, out: Path | str, prepared: "PrepareResult", train_arguments: str = ""
) -> None:
    """Print what was prepared, and the next command: `train` with `train_arguments`.

    By default, it trains the quickstart's recipe.
    """
    train_arguments = train_arguments or shlex.join(
        ["quickstart", "--out", f"runs/{Path(out).name}"]
    )
    documents = format_count(prepared.documents, "document")
    shards = format_count(prepared.shards, "shard")
    summary = f"{format_count(prepared.tokens, 'token')} of {documents} in {shards}"
    if prepared.unchanged:
        console.print(f"{summary}: already prepared, unchanged")
    else:
        rate = format_quantity(prepared.tokens / max(prepared.seconds, 1e-9))
        console.print(f"{summary}, {format_duration(prepared.seconds)} ({rate} tokens/s)")
    for name, number in prepared.counts.items():
        if number:
            console.print(f"  {LABELS.get(name, name)}: {number:,}")
    for split, sizes in prepared.bytes.items():
        text, decoded, lost = (sizes[size] for size in ("text", "decoded", "lost"))
        if text != decoded or lost:
            loss = f"{lost:,} lost ({lost / max(1, text):.2%})"
            console.warn(f"{split}: {text:,} bytes of text, {decoded:,} after decoding, {loss}")
    setting = shlex.quote(f"data.path={out}")
    console.print(f"dataset: {out}; next: {name_program()} train {train_arguments} {setting}")


def name_program() -> str:
    """Return the command by which a user starts this program in a shell."""
    path = Path(sys.argv[0])
    if path.name == "__main__.py":
        return "python -m megatoken"
    if path.stem == "megatoken" and not shutil.which("megatoken"):
        return shlex.quote(sys.argv[0])
    return "megatoken"
