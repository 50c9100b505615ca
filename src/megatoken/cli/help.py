"""The text of `megatoken --help`."""

from megatoken.cli import COMMANDS, load_command

GROUPS = {  # commands of other rooms follow under "more"
    "start": "quickstart doctor completion",
    "data": "prepare verify",
    "train": "train runs sweep race config describe plan dryrun launch",
    "measure": "eval plot report sync scaling bench reproduce",
    "models": "sample chat serve export consolidate",
}
FIRST = ("quickstart", "prepare", "train", "sample")  # commands whose examples are shown


def format_overview() -> str:
    """Return the commands by group, and some examples."""
    lines = [
        "Pre-train GPT, LLaMA, Qwen and similar models from raw text.",
        "",
        "usage: megatoken COMMAND ...",
    ]
    grouped = " ".join(GROUPS.values()).split()
    more = " ".join(name for name in COMMANDS if name not in grouped)
    for title, names in {**GROUPS, "more": more}.items():
        shown = [name for name in names.split() if name in COMMANDS]
        lines += ["", f"{title}:"] * bool(shown)
        lines += [f"  {name:<13}{load_command(name).HELP}" for name in shown]
    examples = [load_command(name).EXAMPLE for name in FIRST if name in COMMANDS]
    lines += ["", "examples:", *(f"  {example}" for example in examples)]
    lines += ["", "See `megatoken COMMAND --help` for the options of a command."]
    return "\n".join(lines)
