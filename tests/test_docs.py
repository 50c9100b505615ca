"""The Python of docs/ and of the notebooks under examples/ runs as printed; the commands of all pages parse."""

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
from megatoken.cli.arguments import parse
from megatoken.cli.main import COMMANDS, main
from megatoken.errors import ConfigError
from tests.ranks import start_process

ROOT = Path(__file__).parents[1]
TEXT = (
    "To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer.\n\n"
    * 200
)


def snippets(page: Path) -> str:
    """The Python blocks of a page as one program; those marked `no-run` are left out."""
    return "\n".join(
        re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    )


def cells(notebook: Path) -> str:
    """The code cells of a notebook as one program."""
    cells = json.loads(notebook.read_text())["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


def run(program: str, folder: Path) -> str:
    """What the program prints, run in a process of its own in `folder`."""
    (folder / "text.txt").write_text(TEXT)
    process = start_process(run_program, program, folder)
    process.join(280)
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


def test_python_page(tmp_path: Path) -> None:
    output = run(snippets(ROOT / "docs" / "python.md"), tmp_path)
    assert "20 " in output  # the summary's steps
    assert (tmp_path / "run-sgd" / "metrics.jsonl").is_file()


def test_hacking_page(tmp_path: Path) -> None:
    program = snippets(ROOT / "docs" / "hacking.md")
    check = "\nassert config.optim.name == 'signum'\nprint('ok')\n"
    assert run(program + check, tmp_path).splitlines()[-1] == "ok"


def commands(page: Path) -> list[list[str]]:
    """The `megatoken` commands of a page as words, from its blocks and backticks; without abbreviated ones."""
    text = page.read_text()
    blocks = "\n".join(re.findall(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    lines = re.findall(r"^(?:\$ )?(megatoken .*(?:\n {4}.*)*)", blocks, re.MULTILINE)
    found = []
    for line in [*lines, *re.findall(r"`(megatoken [^`]+)`", text)]:
        words = shlex.split(line, comments=True)
        words = list(takewhile(lambda word: word not in (">", "|", "&", "&&", "2>&1"), words))[1:]
        if words[0] in COMMANDS and len(words) > 1 and not re.search(r"\.\.\.|\[", line):
            found.append(words)
    return found


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


STANDS_FOR = {"N": "2", "ENGINE": "slurm", "LENGTH": "100steps", "W": "2", "NAME": "gemm"}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_commands_of_a_page_parse(page: Path) -> None:
    """In a sentence a command may leave out what it is about."""
    for words in commands(page):
        if "optim.lrr=1e-3" in words or "--help" in words:  # the example of a mistake
            continue
        try:
            parse([STANDS_FOR.get(word, word) for word in words], COMMANDS)
        except ConfigError as error:
            if "arguments are required" not in str(error):
                raise


def test_pages_name_files_that_exist() -> None:
    package = ROOT / "src" / "megatoken"
    for page in ("hacking.md", "architecture.md"):
        named = re.findall(r"`((?:\w+/)+\w+\.py)`", (ROOT / "docs" / page).read_text())
        missing = [
            name for name in named if not (package / name).is_file() and not (ROOT / name).is_file()
        ]
        assert missing == [], page


@pytest.mark.parametrize(
    "notebook", sorted((ROOT / "examples").glob("*.ipynb")), ids=lambda path: path.stem
)
def test_notebook(notebook: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run(cells(notebook), tmp_path)


def test_public_names_are_those_that_a_type_checker_sees() -> None:
    source = (
        (ROOT / "src" / "megatoken" / "__init__.py")
        .read_text()
        .split("if TYPE_CHECKING:")[1]
        .split("_MODULES")[0]
    )
    imported = re.findall(r"from megatoken\.([\w.]+) import \w+ as (\w+)", source)
    assert {name: module for module, name in imported} == megatoken._MODULES
    assert all(getattr(megatoken, name) is not None for name in megatoken.__all__)


@pytest.mark.parametrize(
    "page", [*PAGES, *(ROOT / f"{name}.md" for name in ("CONTRIBUTING", "CHANGELOG", "LOG"))]
)
def test_every_row_of_a_table_is_below_its_head(page: Path) -> None:
    """Rows after an empty line are shown as text."""
    lines = re.sub(
        r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL
    ).splitlines()
    heads = [
        i
        for i, line in enumerate(lines)
        if line.startswith("|") and not lines[i - 1].startswith("|")
    ]
    assert [lines[i] for i in heads if not re.fullmatch(r"\|[-:| ]+\|", lines[i + 1])] == []


def test_the_plan_that_a_page_shows_is_the_one_that_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = re.search(
        r"^    \$ megatoken (plan .*)\n((?:    .*\n)+)",
        (ROOT / "docs" / "scaling-up.md").read_text(),
        re.M,
    )
    assert shown is not None
    assert main(shown[1].split()) == 0
    assert capsys.readouterr().out.startswith(re.sub("^    ", "", shown[2], flags=re.MULTILINE))


def test_the_gallery_shows_every_picture_of_a_record_in_words_too() -> None:
    shown = dict(
        re.findall(r"!\[(.*)\]\(../records/(.*)\.png\)", (ROOT / "docs" / "gallery.md").read_text())
    )
    assert sorted(shown.values()) == sorted(path.stem for path in (ROOT / "records").glob("*.png"))
    assert all(len(text.split()) > 4 for text in shown)
