"""Execute notebooks and store their outputs, without what differs between machines and runs.

python -m experiments.run_notebooks [NOTEBOOK ...]; needs nbclient and ipykernel
"""

import argparse
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[1] / "examples"
COLORS = re.compile(r"\x1b\[[\d;]*m")
NOISE = re.compile(
    r"tokens/s|/tmp/|^(machine|kernels|steps took|warning|Summary)"
)  # lines to leave out


def run_notebook(path: Path) -> None:
    """Execute a notebook in an empty folder and replace its outputs."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=600, resources={"metadata": {"path": folder}}).execute()
    notebook.nbformat_minor = 4  # in 5, each cell has a random id
    for cell in notebook.cells:
        cell.pop("id", None)
        cell.metadata.clear()
        if cell.cell_type == "code":
            cell.outputs = list_outputs(cell.outputs)
    notebook.metadata.pop("language_info", None)
    nbformat.write(notebook, path)


def list_outputs(outputs: Sequence[Any]) -> list[Any]:
    """Return what a cell printed as one text, without NOISE, then its pictures."""
    texts = [each.get("text") or each["data"].get("text/plain", "") for each in outputs]
    pictures = ["image/png" in each.get("data", {}) for each in outputs]
    printed = "".join(
        text for text, is_picture in zip(texts, pictures, strict=True) if not is_picture
    )
    printed = COLORS.sub("", printed)
    lines = [line for line in printed.splitlines(keepends=True) if not NOISE.search(line)]
    shown = [each for each, is_picture in zip(outputs, pictures, strict=True) if is_picture]
    text = nbformat.v4.new_output("stream", name="stdout", text="".join(lines))
    return [text] * bool(lines) + shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("notebooks", nargs="*", type=Path, default=sorted(EXAMPLES.glob("*.ipynb")))
    for path in parser.parse_args().notebooks:
        run_notebook(path)


if __name__ == "__main__":
    main()
