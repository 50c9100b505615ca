"""Build the pages of docs/ as a site: `make docs` writes build/site, which opens without a server or a network.

Copies all pages into one folder, with README, CONTRIBUTING, CHANGELOG, SECURITY and records. The
command reference comes from the parser, the Python reference from docstrings.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks import pages
from megatoken import _MODULES

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build"
SOURCE = BUILD / "site-source"
PAGES = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")


def main() -> int:
    pages.main()
    shutil.rmtree(SOURCE, ignore_errors=True)
    shutil.copytree(ROOT / "docs", SOURCE, ignore=shutil.ignore_patterns("*.py"))
    shutil.copytree(ROOT / "records", SOURCE / "records")
    (SOURCE / "index.md").write_text(rewrite_links((ROOT / "README.md").read_text(), "docs/"))
    for name in PAGES:
        (SOURCE / name).write_text(rewrite_links((ROOT / name).read_text(), "docs/"))
    for page in (ROOT / "docs").glob("*.md"):
        (SOURCE / page.name).write_text(rewrite_links(page.read_text(), "../"))
    (SOURCE / "commands.md").write_text(pages.list_commands(with_options=True))
    (SOURCE / "reference.md").write_text(list_api())
    return subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--clean"], cwd=ROOT
    ).returncode


def rewrite_links(text: str, prefix: str) -> str:
    """Remove the prefix from links, and turn links to code, examples and tests into plain text."""
    text = re.sub(r"\]\(" + re.escape(prefix), "](", text)
    return re.sub(
        r"\[([^\]]*)\]\((?:\.\./)?(?:src|tests|examples|benchmarks|experiments|records\)|LICENSE)[^)]*\)?",
        r"\1",
        text,
    )


def list_api() -> str:
    """Return a page that mkdocstrings fills with the docstrings of the public names."""
    names_in_module = {"load_run": "load_pretrained"}
    options = "    options:\n      heading: megatoken.{0}\n      toc_label: {0}\n"
    names = [
        f"::: megatoken.{module}.{names_in_module.get(name, name)}\n{options.format(name)}"
        for name, module in _MODULES.items()
    ]
    return (
        "# Python reference\n\nHow the names fit together: [python.md](python.md).\n\n"
        + "\n".join(names)
    )


if __name__ == "__main__":
    sys.exit(main())
