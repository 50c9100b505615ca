"""Build the pages of docs/ as a site: `make docs` writes build/site, which opens without a server or a network.

All pages are copied into one folder, with README, CONTRIBUTING, LOG and records; the command reference is made from the
parser, the Python reference from docstrings.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

from megatoken import _MODULES
from megatoken.cli.arguments import build_parser
from megatoken.cli.completion import list_subparsers
from megatoken.cli.main import COMMANDS

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build"
SOURCE = BUILD / "site-source"
PAGES = ("CONTRIBUTING.md", "CHANGELOG.md", "LOG.md")


def main() -> int:
    shutil.rmtree(SOURCE, ignore_errors=True)
    shutil.copytree(ROOT / "docs", SOURCE, ignore=shutil.ignore_patterns("*.py"))
    shutil.copytree(ROOT / "records", SOURCE / "records")
    (SOURCE / "index.md").write_text(rewrite_links((ROOT / "README.md").read_text(), "docs/"))
    for name in PAGES:
        (SOURCE / name).write_text(rewrite_links((ROOT / name).read_text(), "docs/"))
    for page in (ROOT / "docs").glob("*.md"):
        (SOURCE / page.name).write_text(rewrite_links(page.read_text(), "../"))
    (SOURCE / "commands.md").write_text(list_commands())
    (SOURCE / "reference.md").write_text(list_api())
    return subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--clean"], cwd=ROOT
    ).returncode


def rewrite_links(text: str, prefix: str) -> str:
    """Links without the prefix, so that all pages stand in one folder; those to code and examples as plain text."""
    text = re.sub(r"\]\(" + re.escape(prefix), "](", text)
    return re.sub(
        r"\[([^\]]*)\]\((?:\.\./)?(?:src|tests|examples|records\)|LICENSE)[^)]*\)?", r"\1", text
    )


def list_commands() -> str:
    """The help of every command."""
    parts = ["# Commands\n", f"```\n{build_parser(COMMANDS).format_help()}```\n"]
    for _, parser in list_subparsers(build_parser(COMMANDS)):
        parts.append(f"## {parser.prog}\n\n```\n{parser.format_help()}```\n")
    return "\n".join(parts)


def list_api() -> str:
    """A page that mkdocstrings fills with the docstrings of the public names, each under the name that is imported."""
    own = {"load_run": "load_pretrained"}  # names that differ in their modules
    options = "    options:\n      heading: megatoken.{0}\n      toc_label: {0}\n"
    names = [
        f"::: megatoken.{module}.{own.get(name, name)}\n{options.format(name)}"
        for name, module in _MODULES.items()
    ]
    return (
        "# Python reference\n\nHow the names fit together: [python.md](python.md).\n\n"
        + "\n".join(names)
    )


if __name__ == "__main__":
    sys.exit(main())
