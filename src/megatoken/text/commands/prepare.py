"""`megatoken prepare SOURCE`: tokenize text, or conversations, into shards."""

import shlex
import time
from argparse import Namespace
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatoken.base.console import (
    SEPARATOR,
    Console,
    format_count,
    format_duration,
    format_quantity,
)
from megatoken.base.errors import ConfigError
from megatoken.base.system.address import is_address
from megatoken.cli import Data

if TYPE_CHECKING:
    from megatoken.text.output_folder import PrepareResult
    from megatoken.text.prepare import Progress
    from megatoken.text.sources import Source
    from megatoken.text.tokenizer import Tokenizer

HELP = "tokenize text into shards"
EXAMPLE = "megatoken prepare texts/ --out data/mine"
COMMON = ("val_fraction", "shard_tokens", "invalid")  # options of text and of conversations
# By the kind of examples.
RECIPES = {"chat": "sft", "preference": "dpo", "kto": "kto", "prompt": "grpo"}


def run(options: Namespace, console: Console) -> Data:
    from megatoken.store.datasets import begin_upload, upload_dataset
    from megatoken.text.chat_formats import peek_format
    from megatoken.text.prepare import prepare
    from megatoken.text.sources import HUB, describe_skipped, find_corpus

    exclude = None if is_address(options.out) else options.out
    source = find_corpus(options.source, options.root, exclude, options.val)
    if source.skipped:
        hint = "a pattern such as '**/*.py' reads any files, a folder only text and rows"
        console.print(f"files skipped: {describe_skipped(source.skipped)} ({hint})")
    row_format = None if options.source in HUB else peek_format(source, options.text_key)
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
    name = Path(options.out).name
    print_summary(console, options.out, prepared, f"quickstart --out runs/{shlex.quote(name)}")
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
    console: Console, out: Path | str, prepared: "PrepareResult", train_arguments: str
) -> None:
    """Print what was prepared, and the next command: `megatoken train` with `train_arguments`."""
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
            label = name if " " in name else name.replace("_", " ")
            label = label.replace("val from tail tokens", "tokens held out at the text's end")
            console.print(f"  {label}: {number:,}")
    for split, sizes in prepared.bytes.items():
        text, decoded, lost = (sizes[size] for size in ("text", "decoded", "lost"))
        if text != decoded or lost:
            loss = f"{lost:,} lost ({lost / max(1, text):.2%})"
            console.warn(f"{split}: {text:,} bytes of text, {decoded:,} after decoding, {loss}")
    setting = shlex.quote(f"data.path={out}")
    console.print(f"dataset: {out}; next: megatoken train {train_arguments} {setting}")
