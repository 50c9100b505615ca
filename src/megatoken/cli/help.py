"""The help of `megatoken` alone: every command by what it is for, and an example of each; that of a command as wide
as the terminal."""

import argparse
import re
import shutil
import textwrap
from collections.abc import Mapping
from typing import Any

GROUPS = {
    "start": {
        "quickstart": "megatoken quickstart",
        "doctor": "megatoken doctor",
        "completion": "megatoken completion bash",
    },
    "data": {
        "prepare": "megatoken prepare texts/ --out data/mine",
        "verify": "megatoken verify data/mine",
    },
    "train": {
        "train": "megatoken train gpt2-124m --out runs/mine data.path=data/mine optim.lr=1e-3",
        "runs": "megatoken runs --sort val_loss",
        "sweep": "megatoken sweep quickstart optim.lr=log:1e-4..1e-2 --trials 12",
        "race": "megatoken race quickstart 'quickstart optim.lr=8e-3' --tokens 2M",
        "config": "megatoken config gpt2-124m optim.lr=1e-3",
        "describe": "megatoken describe gpt2-124m",
        "plan": "megatoken plan gpt3-1.3b --gpus 8xH100 --tokens chinchilla --deadline 24h",
        "dryrun": "megatoken dryrun gpt2-1558m --gpus 8 --gpu h100",
        "launch": "megatoken launch slurm gpt2-1558m --nodes 4 --write job.sh",
    },
    "measure": {
        "eval": "megatoken eval runs/mine --tasks hellaswag",
        "plot": "megatoken plot runs/mine runs/other",
        "report": "megatoken report runs/mine runs/other --out report.html",
        "sync": "megatoken sync runs/mine --to tensorboard",
        "scaling": "megatoken scaling runs/size-*",
        "bench": "megatoken bench ladder",
    },
    "models": {
        "sample": 'megatoken sample runs/mine "Once upon a time" --tokens 100',
        "chat": "megatoken chat runs/sft",
        "serve": "megatoken serve runs/mine --port 8000",
        "export": "megatoken export runs/mine --to hf --out models/mine",
        "consolidate": "megatoken consolidate runs/mine --out merged",
    },
}
EXAMPLES = {command: example for group in GROUPS.values() for command, example in group.items()}
FIRST = ("quickstart", "prepare", "train", "sample")  # the examples that `megatoken` alone shows
RESUME = "megatoken train runs/mine"
COLUMN, WIDTH = 13, 80
DOC = re.compile(r"  \S+ +(free|guarded|fatal) +")  # before the meaning of a config field


class HelpFormatter(argparse.HelpFormatter):
    """argparse's help with usage, description and epilog wrapped at spaces; lines that are short enough stay."""

    def _format_usage(
        self, usage: str | None, actions: Any, groups: Any, prefix: str | None
    ) -> str:
        if usage is None:
            return super()._format_usage(usage, actions, groups, prefix)
        whole, depth = "", 0  # options in brackets stay together
        for letter in usage:
            depth += (letter in "[(") - (letter in ")]")
            whole += "\0" if letter == " " and depth else letter
        return wrap(f"usage: {whole}", self._width, " " * 7).replace("\0", " ") + "\n\n"

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        rows = []
        for line in text.splitlines():
            found = DOC.match(line)
            rows.append(
                wrap(line, width, " " * (found.end() if found else len(line) - len(line.lstrip())))
            )
        return "\n".join(rows)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrap(
            " ".join(text.split()), width, ""
        ).splitlines()  # names with a hyphen stay whole


def wrap(line: str, width: int, indent: str) -> str:
    """A line as several, those after the first behind `indent`; its own blanks stay."""
    return textwrap.fill(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def format_overview(docs: Mapping[str, str]) -> str:
    """The text of `megatoken` and `megatoken --help`. docs: one line for each command."""
    width = min(WIDTH, shutil.get_terminal_size().columns)
    lines = [
        "Pre-train GPT-2, GPT-3 and LLaMA models from raw text.",
        "",
        "usage: megatoken COMMAND ...",
    ]
    for title, commands in GROUPS.items():
        lines += ["", f"{title}:"]
        for command in commands:
            lines.append(wrap(f"  {command:<{COLUMN}}{docs[command]}", width, " " * (COLUMN + 2)))
    lines += [
        "",
        "examples:",
        *(f"  {EXAMPLES[command]}" for command in FIRST),
        f"  {RESUME:<40}# go on with a run",
    ]
    rest = "`megatoken COMMAND --help` shows its options and an example; `megatoken --version` the version."
    lines += ["", wrap(rest, width, "")]
    return "\n".join(lines) + "\n"


def format_example(command: str) -> str:
    """The end of a command's help."""
    return f"example:\n  {EXAMPLES[command]}"
