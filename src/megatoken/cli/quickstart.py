"""`megatoken quickstart`: prepare the default corpus, train a small GPT on it, sample from it.

Each command is printed before it runs; finished ones are skipped when it is run again.
"""

import shlex
import shutil
import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatoken.cli.arguments import Command, parse
from megatoken.config.load import prepare_words, resolve
from megatoken.errors import ExitCode

RECIPE, PROMPT = "quickstart", "def "


def quickstart(options: Namespace, commands: Mapping[str, Command]) -> tuple[int, dict[str, Any]]:
    """Run `prepare`, `train` and `sample`. commands: the function of each command by name.

    Returns the exit code of the first command that did not end with DONE, and the answer of each by name.
    """
    from megatoken.data.shard_format import MANIFEST_NAME

    console, out = options.console, str(options.out)
    data = resolve(RECIPE, options.overrides).config.data.path
    steps = [["train", RECIPE, "--out", out, *options.overrides], ["sample", out, PROMPT, "--tokens", "100"]]
    if not (Path(data) / MANIFEST_NAME).is_file():
        steps.insert(0, prepare_words(resolve(RECIPE).config.data.path, data))
    answers: dict[str, Any] = {}
    for words in steps:
        console.print(f"\n$ megatoken {shlex.join(words)}")
        command = parse(words, commands)
        command.json, command.console = options.json, console
        code, answers[words[0]] = command.call(command)
        if code != ExitCode.DONE:
            return code, answers
    curves, program = Path(out) / "plots" / "curves.png", name_program()
    rows = [
        ("run folder", out),
        ("curves", str(curves) if curves.is_file() else f"pip install matplotlib, then: {program} plot {out}"),
        ("next", f'{program} sample {out} "class "'),
        ("your text", f"{program} prepare FOLDER --out data/mine --tokenizer bpe:4096"),
        ("", f"{program} train {RECIPE} --out runs/mine data.path=data/mine"),
    ]
    console.print("")
    console.table(rows)
    return ExitCode.DONE, answers


def name_program() -> str:
    """How this program is started from a shell."""
    if Path(sys.argv[0]).name == "__main__.py":
        return "python -m megatoken"
    return sys.argv[0] if Path(sys.argv[0]).stem == "megatoken" and not shutil.which("megatoken") else "megatoken"
