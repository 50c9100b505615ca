"""Documentation: Python blocks and notebooks run, commands parse, links lead somewhere."""

import json
import os
import re
import shlex
import traceback
import warnings
from contextlib import redirect_stderr, redirect_stdout
from itertools import takewhile
from pathlib import Path

import pytest

import megatoken
from megatoken.base.errors import ConfigError
from megatoken.cli import COMMANDS
from megatoken.cli.arguments import parse
from tests.conftest import Call
from tests.ranks import start_process

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src/megatoken"
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY")),
    *sorted((ROOT / "docs").glob("*.md")),
]
PLACEHOLDERS = {"ENGINE": "slurm", "LENGTH": "100steps", "N": "2", "NAME": "ladder", "W": "2"}
# Of a program: fewer steps, layers, files and tokens.
SHORT = {
    r"budget\.steps=\d+": "budget.steps=4",
    r'load_config\("gpt2-124m"': r'\g<0>, "model.n_layer=2"',
    r"budget\.batch_tokens=\d+": "budget.batch_tokens=256",
    r'"evaluate.every=0"': r'\g<0>, "evaluate.tokens=512"',
    r"\[a-d\]": "as",
    "bpe:512": "bpe:300",
}
TEXT = (
    "To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer.\n\n"
    * 200
)


def run(program: str, folder: Path) -> str:
    """Run a program, its runs shortened, in a process in `folder` and return its output."""
    (folder / "text.txt").write_text(TEXT)
    for pattern, replacement in SHORT.items():
        program = re.sub(pattern, replacement, program)
    process = start_process(run_program, program, folder)
    process.join()
    output = (folder / "output").read_text()
    assert process.exitcode == 0, output[-3000:]
    return output


def run_program(program: str, folder: Path) -> None:
    os.chdir(folder)
    os.environ["MPLBACKEND"] = "Agg"
    warnings.simplefilter("ignore")
    with (
        open("output", "w", encoding="utf-8") as output,
        redirect_stdout(output),
        redirect_stderr(output),
    ):
        try:
            exec(program, {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc()
            raise


@pytest.mark.long
def test_python_page(tmp_path: Path):
    """Its blocks are one program, without those marked `no-run`."""
    page = (ROOT / "docs/python.md").read_text()
    program = "\n".join(re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S))
    output = run(program, tmp_path)
    assert "4 " in output  # the summary's steps
    assert (tmp_path / "run-sgd/metrics.jsonl").is_file()


@pytest.mark.long
@pytest.mark.parametrize(
    "notebook", sorted((ROOT / "examples").glob("*.ipynb")), ids=lambda path: path.stem
)
def test_notebook(notebook: Path, tmp_path: Path):
    """Each cell prints and draws if it did when its outputs were stored."""
    pytest.importorskip("matplotlib")
    cells = [c for c in json.loads(notebook.read_text())["cells"] if c["cell_type"] == "code"]
    sources = ["".join(cell["source"]) for cell in cells]
    texts = run("\nprint('\\f')\n".join(sources), tmp_path).split("\f")
    for cell, source, text in zip(cells, sources, texts, strict=True):
        kinds = {kind for output in cell["outputs"] for kind in output}
        assert (bool(text.strip()), "plt.show" in source) == ("text" in kinds, "data" in kinds)


def read_commands(page: Path) -> list[list[str]]:
    """Return the arguments of the `megatoken` commands of a page, without abbreviated ones."""
    text = page.read_text().replace("\\\n", "")
    blocks = "\n".join(re.findall(r"^```\n(.*?)^```$", text, re.M | re.S))
    lines = re.findall(r"^megatoken .*(?:\n {4}.*)*", blocks, re.M)
    lines += [line.replace("\n", " ") for line in re.findall(r"`(megatoken [^`]+)`", text)]
    commands = []
    for line in lines:
        arguments = shlex.split(line, comments=True)[1:]
        arguments = list(takewhile(lambda argument: argument not in (">", "|", "&&"), arguments))
        if arguments[0] in COMMANDS and len(arguments) > 1 and "..." not in line:
            commands.append(arguments)
    return commands


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_commands_parse(page: Path):
    """A command in a sentence may leave out required arguments."""
    for arguments in read_commands(page):
        if "--help" in arguments:
            continue
        try:
            parse([PLACEHOLDERS.get(argument, argument) for argument in arguments])
        except ConfigError as error:
            if "arguments are required" not in str(error):
                raise


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_links_lead_to_files_and_headings(page: Path):
    text = page.read_text()
    broken = []
    for link in re.findall(r"\]\((?!http)([^)\s]+)\)|^\[[^\]]+\]: (\S+)$", text, re.M):
        name, _, heading = "".join(link).partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (heading and heading not in read_anchors(target)):
            broken.append("".join(link))
    names = re.findall(r"`((?:\w+/)+\w+\.\w+)`", text) if page.stem == "hacking" else []
    assert broken + [name for name in names if not (PACKAGE / name).is_file()] == []


def read_anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub derives them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_plan_on_page_has_the_printed_numbers(call: Call):
    page = (ROOT / "docs/plan.md").read_text()
    shown = re.search(r"^    \$ megatoken (plan .*)\n((?:    .*\n)+)", page, re.M)
    printed, expected = (re.findall(r"\d[\d.,]*", text) for text in (call(shown[1])[1], shown[2]))
    assert printed[: len(expected)] == expected


def test_public_names_are_those_that_a_type_checker_sees():
    source = (PACKAGE / "__init__.py").read_text()
    typed = source.split("if TYPE_CHECKING:")[1].split("_MODULES")[0]
    imports = re.findall(r"from megatoken\.([\w.]+) import \w+ as (\w+)", typed)
    assert {name: module for module, name in imports} == megatoken._MODULES
    assert all(getattr(megatoken, name) is not None for name in megatoken.__all__)
