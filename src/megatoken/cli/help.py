"""The help of `megatoken` alone: every command by what it is for, and an example of each."""

import textwrap
from collections.abc import Mapping

GROUPS = {
    "start": {
        "quickstart": "megatoken quickstart",
        "doctor": "megatoken doctor",
        "completion": "megatoken completion bash",
    },
    "data": {"prepare": "megatoken prepare texts/ --out data/mine", "verify": "megatoken verify data/mine"},
    "train": {
        "train": "megatoken train gpt2-124m --out runs/mine data.path=data/mine optim.lr=1e-3",
        "runs": "megatoken runs --sort val_loss",
        "sweep": "megatoken sweep quickstart optim.lr=log:1e-4..1e-2 --trials 12",
        "race": "megatoken race quickstart 'quickstart optim.lr=8e-3' --tokens 2M",
        "config": "megatoken config gpt2-124m optim.lr=1e-3",
        "describe": "megatoken describe gpt2-124m",
        "plan": "megatoken plan gpt3-1.3b --gpus 8xA100-40GB --tokens chinchilla --deadline 24h",
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


def format_overview(docs: Mapping[str, str]) -> str:
    """The text of `megatoken` and `megatoken --help`. docs: one line for each command."""
    lines = ["Pre-train GPT-2, GPT-3 and LLaMA models from raw text.", "", "usage: megatoken COMMAND ..."]
    for title, commands in GROUPS.items():
        lines += ["", f"{title}:"]
        for command in commands:
            indent = " " * (COLUMN + 2)
            lines.append(textwrap.fill(f"  {command:<{COLUMN}}{docs[command]}", WIDTH, subsequent_indent=indent))
    lines += ["", "examples:", *(f"  {EXAMPLES[command]}" for command in FIRST), f"  {RESUME:<40}# go on with a run"]
    lines += ["", "`megatoken COMMAND --help` shows its options and an example; `megatoken --version` the version."]
    return "\n".join(lines) + "\n"


def format_example(command: str) -> str:
    """The end of a command's help."""
    return f"example:\n  {EXAMPLES[command]}"
