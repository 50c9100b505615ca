"""`megatoken quickstart`: prepare the default corpus or your text, train a small GPT on it, measure it, sample from it.

Each command is printed before it runs; finished ones are skipped when it is run again.
"""

import gzip
import re
import shlex
import shutil
import sys
from argparse import Namespace
from collections.abc import Mapping
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

from megatoken.cli.arguments import Command, parse
from megatoken.config.load import prepare_words, resolve
from megatoken.errors import ConfigError, ExitCode

RECIPE = "quickstart"
EVAL_TOKENS = 250_000  # to measure at most; the default corpus holds out fewer
SAMPLES = 3


def quickstart(options: Namespace, commands: Mapping[str, Command]) -> tuple[int, dict[str, Any]]:
    """Run `prepare`, `train`, `eval` and `sample`. commands: the function of each command by name.

    Returns the exit code of `train`, and the answer of each command by name; "compressors" is the bits per byte that
    they need for the text of `eval`.
    """
    from megatoken.data.dataset import load_dataset
    from megatoken.data.shard_format import MANIFEST_NAME

    console, overrides, own = options.console, list(options.overrides), options.data
    if own == "":
        raise ConfigError(
            "--data is empty",
            "--data",
            "name a text, or leave it out for this machine's Python files",
        )
    name = RECIPE if own is None else re.sub(r"[^\w.-]+", "-", Path(own).stem).strip("-.") or "mine"
    out, answers = str(options.out or Path("runs") / name), dict[str, Any]()

    def run(*words: str) -> int:
        console.print(f"\n$ megatoken {shlex.join(words)}")
        command = parse([*words], commands)
        command.json, command.console = options.json, console
        code, answers[words[0]] = command.call(command)
        return int(code)

    is_dataset = own is not None and (Path(own) / MANIFEST_NAME).is_file()
    if own is not None:
        overrides.insert(0, f"data.path={own if is_dataset else Path('data') / name}")
    data, default = resolve(RECIPE, overrides).config.data.path, resolve(RECIPE).config.data.path
    # The default corpus is not read again: a dataset that an earlier version or another Python made is used as it is.
    if not is_dataset and (own is not None or not (Path(data) / MANIFEST_NAME).is_file()):
        _, source, *how = prepare_words(default, data)
        run("prepare", own or source, *how)
    dataset = load_dataset(data)
    config, prompt = resolve(RECIPE, overrides).config, options.prompt
    if prompt is None:
        is_chosen = own is None or any(word.startswith("sample.prompt=") for word in overrides)
        prompt = config.sample.prompt if is_chosen else find_prompt(dataset)
    if config.sample.every.value and prompt != config.sample.prompt:
        overrides.insert(0, f"sample.prompt={prompt}")
    if code := run("train", RECIPE, "--out", out, *overrides):
        return code, answers
    if len(dataset.val) > 1:
        limit = ["--limit", str(EVAL_TOKENS)] if len(dataset.val) > EVAL_TOKENS else []
        run("eval", out, "--data", data, "--split", "val", *limit)
        answers["compressors"] = measure_compressors(dataset, config.model.seq_len)
    run("sample", out, prompt, "-n", str(SAMPLES))
    console.print("")
    console.table(describe_end(out, answers, prompt if own else "class", is_own=own is not None))
    return ExitCode.DONE, answers


def find_prompt(dataset: Any) -> str:
    """The first words of the held-out text, of all text where nothing is held out, from one with a letter on.

    Without a blank at the end: the tokens of a word begin with the blank before it.
    """
    tokens = dataset.val if len(dataset.val) else dataset.train
    ids = tokens.read(0, min(32, len(tokens))).tolist()
    document = dataset.tokenizer.decode([*takewhile(lambda id: id != dataset.tokenizer.eot, ids)])
    words = re.search(r"\S*\w\S*(?:[ \t]+\S+){0,2}", document)
    return words[0] if words else document.strip()


def measure_compressors(dataset: Any, seq_len: int) -> dict[str, float]:
    """Bits per byte that gzip -9 and, where this Python has it, xz -9 need for the text that `eval` measures."""
    from megatoken.data.dataloader import evaluation_windows

    ids = dataset.val.read(1, len(dataset.val) - 1)
    if len(dataset.val) > EVAL_TOKENS:
        windows = evaluation_windows(dataset.val, seq_len=seq_len, limit_tokens=EVAL_TOKENS)
        ids = windows.rows(0, len(windows))[:, 1:].reshape(-1)
    text = dataset.tokenizer.decode(ids[ids != dataset.tokenizer.eot]).encode()
    sizes = {"gzip -9": len(gzip.compress(text, 9))}
    with suppress(ImportError):
        import lzma

        sizes["xz -9"] = len(lzma.compress(text, preset=9))
    return {name: 8 * size / len(text) for name, size in sizes.items()}


def describe_end(
    out: str, answers: dict[str, Any], prompt: str, *, is_own: bool
) -> list[tuple[str, str]]:
    """(name, value) for the user: what was made, how good it is, what to type next."""
    curves, program = Path(out) / "plots" / "curves.png", name_program()
    rows = [
        ("run folder", out),
        (
            "curves",
            str(curves)
            if curves.is_file()
            else f"pip install matplotlib, then: {program} plot {shlex.quote(out)}",
        ),
        ("next", f"{program} sample {shlex.join([out, prompt])}"),
    ]
    if not is_own:
        rows.append(
            ("your text", f'{program} quickstart --data FOLDER_OR_FILE --prompt "Once upon a time"')
        )
    if "eval" in answers:
        others = ", ".join(f"{name} {bits:.3f}" for name, bits in answers["compressors"].items())
        rows.insert(
            1,
            ("held out", f"{answers['eval']['bits_per_byte']:.3f} bits per byte of text; {others}"),
        )
    return rows


def name_program() -> str:
    """How this program is started from a shell."""
    if Path(sys.argv[0]).name == "__main__.py":
        return "python -m megatoken"
    return (
        sys.argv[0]
        if Path(sys.argv[0]).stem == "megatoken" and not shutil.which("megatoken")
        else "megatoken"
    )
