"""The text of `megatoken --help`."""

from megatoken.cli import GROUPS, load_command

FIRST = ("quickstart", "prepare", "train", "sample")  # commands whose examples are shown


def format_overview() -> str:
    """Return the commands by group, and some examples."""
    lines = [
        "Pre-train GPT, LLaMA, Qwen and similar models from raw text.",
        "",
        "usage: megatoken COMMAND ...",
    ]
    for title, names in GROUPS.items():
        lines += ["", f"{title}:"]
        lines += [f"  {name:<13}{load_command(name).HELP}" for name in names]
    lines += ["", "examples:", *(f"  {load_command(name).EXAMPLE}" for name in FIRST)]
    lines += ["", "See `megatoken COMMAND --help` for the options of a command."]
    return "\n".join(lines)
