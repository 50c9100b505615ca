"""The house rules that a machine can check."""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import megatoken
from megatoken.config import KNOBS

SOURCE = Path(megatoken.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
LARGEST_FILE, LARGEST_FUNCTION, MOST_KNOBS = 400, 60, 80
READERS_OF_ENVIRONMENT = {"hardware.py", "parallel/topology.py"}
# Imports inside functions: optional extras, what a platform may lack, and the commands that bring torch.
OPTIONAL = {
    "pyarrow",
    "matplotlib",
    "huggingface_hub",
    "datasets",
    "transformers",
    "tiktoken",
    "tiktoken_ext",
    "resource",
    "litgpt",
}
LAZY_COMMANDS = {
    "megatoken.data.prepare",
    "megatoken.progress",
    "megatoken.pretrain",
    "megatoken.doctor",
    "megatoken.plan.dryrun",
    "megatoken.plan.fit",
    "megatoken.writing",
    "megatoken.judging",
    "megatoken.harness",
    "megatoken.interop.foreign",
    "megatoken.interop.export",
    "megatoken.checkpoint.consolidate",
    "megatoken.verify",
    "megatoken.plot",
    "megatoken.bench.program",
    "megatoken.bench.rivals",
}
STARTERS = {"cli.py", "bench/contender.py"}  # processes begin there, with settings made before torch is loaded
# The protocol and the data order must be testable, and fast to start, without torch.
WITHOUT_TORCH = [
    "data.prepare",
    "data.dataset",
    "data.order",
    "checkpoint.store",
    "train.journal",
    "train.guard",
    "bench.options",
    "bench.contender",
    "cli",
]


def name_of(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def stage_of(module: str) -> str:
    return module.split(".")[1]


def imports_of(path: Path) -> Iterator[tuple[str, int, bool]]:
    """(module, line, inside a function) of every import."""
    tree = ast.parse(path.read_text())
    nested = {
        id(node) for function in ast.walk(tree) if isinstance(function, ast.FunctionDef) for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, id(node) in nested
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            base = node.module or ""
            modules = [f"megatoken.{alias.name}" for alias in node.names] if base == "megatoken" else [base]
            for module in modules:
                yield module, node.lineno, id(node) in nested


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_go_one_way(path: Path) -> None:
    stages = megatoken.STAGES
    parts = path.relative_to(SOURCE).with_suffix("").parts
    if parts == ("__init__",):
        return
    own = stages.index(parts[0])
    for module, line, _ in imports_of(path):
        if module.startswith("megatoken.") and stage_of(module) in stages:
            there = stages.index(stage_of(module))
            assert there <= own, f"{name_of(path)}:{line} imports {module}, a later stage"
        elif module.startswith("megatoken."):
            assert module == "megatoken.__version__", f"{name_of(path)}:{line}: {module} is in no stage"


def test_no_cycles_between_modules() -> None:
    names = {".".join(("megatoken", *p.relative_to(SOURCE).with_suffix("").parts)) for p in FILES}
    graph = {
        ".".join(("megatoken", *p.relative_to(SOURCE).with_suffix("").parts)): {
            m for m, _, _ in imports_of(p) if m in names
        }
        for p in FILES
    }
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, f"import cycle: {' -> '.join([*trail, module])}"
        if module not in done:
            for needed in sorted(graph[module]):
                visit(needed, (*trail, module))
            done.add(module)

    for module in sorted(graph):
        visit(module, ())
    assert done == set(graph)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_inside_functions_are_listed(path: Path) -> None:
    for module, line, inside in imports_of(path):
        if inside:
            allowed = module.split(".")[0] in OPTIONAL or (name_of(path) in STARTERS and module in LAZY_COMMANDS)
            assert allowed, f"{name_of(path)}:{line} imports {module} inside a function"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_sizes(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= LARGEST_FILE, f"{name_of(path)} has {text.count(chr(10))} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            assert lines <= LARGEST_FUNCTION, f"{name_of(path)}:{node.lineno}: {node.name} has {lines} lines"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_only_named_modules_read_the_environment(path: Path) -> None:
    if name_of(path) in READERS_OF_ENVIRONMENT:
        return
    reads = re.search(r"os\.(environ|getenv)|from os import .*(environ|getenv)", path.read_text())
    assert reads is None, f"{name_of(path)} reads the environment"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_nothing_is_unpickled(path: Path) -> None:
    loads = r"torch\.load\((?!.*weights_only=True)|allow_pickle=True|yaml\.(unsafe_)?load\("
    runs_code = rf"\bpickle\.|{loads}|(?<!\.)\b(eval|exec)\("
    assert not re.search(runs_code, path.read_text())


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_names_explain_something(path: Path) -> None:
    assert path.stem not in {"utils", "common", "helpers", "base", "misc", "manager", "factory", "registry"}


def test_every_field_has_a_reader() -> None:
    declared = {"architecture.py", "config.py", "recipe.py"}
    text = "\n".join(p.read_text() for p in FILES if name_of(p) not in declared)
    own = (SOURCE / "config.py").read_text().split("class Run:")[1]  # properties of Run read fields too
    shape = (SOURCE / "architecture.py").read_text().split("def shape")[1].split("def find_misfits")[0]
    for key in KNOBS:
        name = key.rpartition(".")[2]
        assert re.search(rf"\.{name}\b", text + own + shape), f"nobody reads {key}"
    assert len(KNOBS) <= MOST_KNOBS


def test_stages_exist() -> None:
    for stage in megatoken.STAGES:
        assert importlib.import_module(f"megatoken.{stage}").__doc__, f"{stage} says nothing of itself"


def test_torch_is_not_needed_where_it_must_not_be() -> None:
    import subprocess
    import sys

    code = (
        "import sys\n" + "\n".join(f"import megatoken.{m}" for m in WITHOUT_TORCH) + "\nprint('torch' in sys.modules)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "False"
