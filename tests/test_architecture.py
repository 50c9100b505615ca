"""Rules of the project that a test can check, over all source files.

Each test lists all offenders.
"""

import ast
import re
import subprocess
import sys
import tokenize
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import megatoken
from megatoken.base.config.schema import FIELDS
from megatoken.base.rooms import CORE, find_rooms, list_entries

SOURCE = Path(megatoken.__file__).parent
FILES = {path.relative_to(SOURCE).as_posix(): path for path in sorted(SOURCE.rglob("*.py"))}
TOP = ("__init__.py", "__main__.py")  # above all layers
LONGEST_FUNCTION = 60
# Files that may do what others must not.
OWNERS = {
    r"os\.(environ|getenv)|from os import .*(environ|getenv)": {
        "base/system/environment.py",
        "distributed/env.py",
        "base/redact.py",
    },
    r"^\s*(import|from) subprocess": {"base/system/process.py"},
    r"^\s*(import|from) filelock": {"base/system/file_lock.py"},
    # Private names of torch.
    r"\btorch\._[a-z]|\btorch\.[\w.]*\._[a-z]|\btorch\.testing\._internal"
    r"|\._(foreach_\w+|found_inf_per_device|compiled_call_impl|orig_mod|local_tensor|cdata|schema)\b"
    r"|\b(active_fake_mode|FakeTensorMode|unset_fake_temporarily|fake_pg|fake_collectives)\b.* import "
    r"|\.(found_inf|grad_scale) = |\"_orig_mod\"|\"_is_\w+_supported\"": {
        "base/system/torch_compat.py"
    },
    # Its python_command starts Python without the current folder.
    r"sys\.executable": {"base/system/environment.py"},
    # They write the date, or tell when credentials expire. Durations come from monotonic clocks,
    # because the date may jump.
    r"time\.time\(|from time import|datetime\.(now|utcnow)|\.today\(": {
        "study/bench/report.py",
        "inference/protocol.py",
        "store/s3_ranges.py",
    },
}
# Imports inside functions are allowed anywhere for optional extras and for modules that a platform
# may lack ...
OPTIONAL = """
pyarrow matplotlib huggingface_hub datasets transformers lm_eval optuna shtab tensorboard trackio
wandb mlflow lzma resource triton fsspec gguf llama_cpp
"""
# ... and where a process starts or the API is entered, whatever brings one of HEAVY: a typo must
# not wait for torch. A process alone splits no model: torch's code for it, in distributed/, is a
# quarter of what a run loads. Readers take no lock.
STARTERS = """
__init__.py __main__.py study/bench/worker.py convert/recipes/llmc.py study/plots.py base/rooms.py
distributed/parallelize.py distributed/tensor_parallel.py plan/calibrate.py base/system/file_lock.py
"""
HEAVY = "torch numpy tokenizers rich yaml safetensors xxhash filelock"
# Quick to start, and testable without torch: the package, the commit protocol, the data order, the
# command line.
WITHOUT_TORCH = """
megatoken megatoken.__main__ megatoken.cli.main megatoken.base.config.load megatoken.base.system.environment
megatoken.text.prepare megatoken.data.dataset megatoken.data.permutation
megatoken.store.commit megatoken.base.system.metrics_log megatoken.distributed.preemption
megatoken.distributed.local_launch megatoken.study.commands.bench megatoken.study.bench.worker megatoken.plan.estimate
megatoken.study.plots
"""
EMPTY_NAMES = "utils util common helpers misc manager factory core"
# What runs code that a file brings: functions, and the arguments with which others do.
RUN_CODE = re.compile(
    r"(builtins\.)?(eval|exec|compile|__import__)|os\.(system|popen|exec\w+|spawn\w+)|(np|numpy)\.load"
    r"|yaml\.((unsafe_|full_)?load(_all)?|Loader|UnsafeLoader|FullLoader)|torch\.(hub|jit|package)\.\w+|.*\bread_pickle"
    r"|runpy\.\w+|.*\b(Unpickler|spec_from_file_location|load_module)"
)
NEEDED = {
    "torch.load": ("weights_only", "True"),
    "extractall": ("filter", "'data'"),
    "extract": ("filter", "'data'"),
}
FORBIDDEN = dict.fromkeys(("allow_pickle", "shell", "trust_remote_code"), "False")
FORBIDDEN["weights_only"] = "True"
UNPICKLING = re.compile(
    r"(pickle|marshal|shelve|dill|cloudpickle|joblib|runpy)\b.*|torch\.distributed\.checkpoint"
)


class Import(NamedTuple):
    module: str
    line: int
    in_function: bool


MODULES = {
    ".".join(("megatoken", *Path(file).with_suffix("").parts)).removesuffix(".__init__"): file
    for file in FILES
}


@cache
def parse(file: str) -> ast.Module:
    return ast.parse(FILES[file].read_text())


def functions_of(file: str) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    nodes = ast.walk(parse(file))
    return [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


@cache
def imports_of(file: str) -> tuple[Import, ...]:
    """Return every import of a file; `from megatoken.x import y` is megatoken.x.y if that is a
    module.
    """
    found = []
    nested = {id(inner) for function in functions_of(file) for inner in ast.walk(function)}
    for node in ast.walk(parse(file)):
        if isinstance(node, ast.Import):
            found += [Import(alias.name, node.lineno, id(node) in nested) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            names = {f"{base}.{alias.name}" for alias in node.names}
            names = {name if name in MODULES else base for name in names}
            found += [Import(name, node.lineno, id(node) in nested) for name in sorted(names)]
    return tuple(found)


@cache
def graph(*, in_functions: bool) -> dict[str, set[str]]:
    """Return the modules that each module imports."""
    return {
        module: {each.module for each in imports_of(file) if in_functions or not each.in_function}
        - {module}
        for module, file in MODULES.items()
    }


@cache
def find_imported(module: str) -> set[str]:
    """Return the module and all that importing it imports, but not the names of the package."""
    found, new = set(), {module}
    while new:
        found |= new
        imports = [graph(in_functions=False).get(name, set()) for name in new]
        new = set().union(*imports) - found - {"megatoken"}
    return found


def is_heavy(module: str) -> bool:
    """Return whether importing `module` imports one of HEAVY."""
    return bool({name.split(".")[0] for name in find_imported(module)} & {*HEAVY.split()})


def count_tokens(file: str) -> int:
    """Return the number of tokens without comments, docstrings and layout."""
    layout = {
        *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
        *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
    }
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = ast.walk(ast.parse(FILES[file].read_text()))
    docstrings = sum(
        isinstance(node, documented) and bool(ast.get_docstring(node)) for node in nodes
    )
    with FILES[file].open() as lines:
        tokens = tokenize.generate_tokens(lines.readline)
        return sum(token.type not in layout for token in tokens) - docstrings


def _is_starter(file: str) -> bool:
    return file in STARTERS.split() or file.startswith("cli/") or "/commands/" in file


def check(found: list[str]) -> None:
    """Fail with a line for each offender."""
    assert not found, "\n" + "\n".join(sorted(set(found)))


@pytest.mark.long
def test_imports_go_one_way():
    """A core room imports itself and earlier ones; another room also those in its NEEDS."""
    needs = {name: {*room.needs} for name, room in find_rooms().items()}
    found = []
    for file in FILES.keys() - TOP:
        own = Path(file).with_suffix("").parts[0]
        if own not in {*CORE, *needs}:
            found.append(f"{file}: {own} is no room")
            continue
        allowed = {*CORE[: CORE.index(own)]} if own in CORE else {*CORE, *needs[own]}
        if "/commands/" in file:
            allowed.add("cli")
        for module, line, _ in imports_of(file):
            if module.startswith("."):
                found.append(f"{file}:{line}: relative import")
            elif module.startswith("megatoken.") and module.split(".")[1] not in {own, *allowed}:
                found.append(f"{file} imports {module}")
    check(found)


@pytest.mark.long
def test_rooms_and_the_loop_keep_to_their_budgets():
    """Tokens of code, without comments and layout, against those in the map of the rooms."""
    chart = (SOURCE.parents[1] / "docs/architecture.md").read_text().split("```")[1]
    budgets = {
        room: int(f"{a}{b}") for room, a, b in re.findall(r"^(\w+) +(\d+),(\d+) ", chart, re.M)
    }
    assert budgets.keys() == {Path(file).parts[0] for file in FILES.keys() - TOP if "/" in file}
    sizes = {module: count_tokens(file) for module, file in MODULES.items()}
    used = dict.fromkeys(budgets, 0)
    for module, file in MODULES.items():
        if "/" in file:
            used[file.split("/")[0]] += sizes[module]
    check([f"{room}: {used[room]:,}" for room, most in budgets.items() if used[room] > most])
    assert sum(sizes.get(module, 0) for module in find_imported("megatoken.train.train")) <= 81_800


def test_no_import_cycles():
    below = {module: needed - {"megatoken"} for module, needed in graph(in_functions=True).items()}
    below.pop("megatoken")  # its names are imported when they are asked for
    try:
        TopologicalSorter(below).prepare()
    except CycleError as error:
        raise AssertionError(f"import cycle: {' -> '.join(error.args[1])}") from None


def test_imports_inside_functions_are_listed():
    found = []
    for file in FILES:
        for module, _, in_function in imports_of(file):
            optional = module.split(".")[0] in OPTIONAL.split()
            if in_function and not optional and not (_is_starter(file) and is_heavy(module)):
                found.append(f"{file} imports {module} inside a function")
    check(found)


def test_functions_are_short():
    functions = [(file, node) for file in FILES for node in functions_of(file)]
    check(
        [
            f"{file}: {node.name} is longer than {LONGEST_FUNCTION} lines"
            for file, node in functions
            if (node.end_lineno or 0) - node.lineno >= LONGEST_FUNCTION
        ]
    )


@pytest.mark.fault(52)
@pytest.mark.parametrize("pattern", OWNERS)
def test_what_only_named_modules_do(pattern: str):
    uses = re.compile(pattern, re.MULTILINE)
    others = FILES.keys() - OWNERS[pattern]
    check([file for file in others if uses.search(FILES[file].read_text())])


def list_code_paths(tree: ast.AST) -> list[str]:
    """Return calls and names by which reading a file could run code."""
    found = []
    for node in ast.walk(tree):
        is_used = isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load)
        if is_used and RUN_CODE.fullmatch(ast.unparse(node)):
            found.append(ast.unparse(node))
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            given = {each.arg: ast.unparse(each.value) for each in node.keywords if each.arg}
            argument, value = NEEDED.get(name) or NEEDED.get(name.rpartition(".")[2]) or ("", "")
            if argument and given.get(argument) != value:
                found.append(f"{name} without {argument}={value}")
            wrong = [key for key in FORBIDDEN.keys() & given if given[key] != FORBIDDEN[key]]
            found += [f"{name} with {key}" for key in wrong]
    return found


def test_no_file_is_unpickled_or_run():
    """Pickles are only exchanged between processes of a run, over pipes and torch's collectives."""
    pipes = {"text/encode_workers.py"}
    found = [f"{file}: {it}" for file in FILES for it in list_code_paths(parse(file))]
    for file in FILES.keys() - pipes:
        modules = {each.module for each in imports_of(file)}
        found += [f"{file} imports {it}" for it in modules if UNPICKLING.fullmatch(it)]
    check(found)


CODE_PATHS = """eval(x)
exec(x)
f = eval
builtins.exec(x)
compile(x, '', 'exec')
__import__(x)
os.system(x)
torch.load(x)
torch.load(x, weights_only=False)
np.load(x)
np.memmap(x, allow_pickle=True)
yaml.load(x, Loader=L)
yaml.load(x, yaml.Loader)
yaml.unsafe_load(x)
a.extractall(x)
t.extract(x, filter=f)
subprocess.run(x, shell=True)
M.from_pretrained(x, trust_remote_code=True)
pickle.Unpickler(x)
pandas.read_pickle(x)
torch.hub.load(x)
torch.jit.load(x)
runpy.run_path(x)"""
SAFE_CODE = """re.compile(x)
torch.compile(m)
model.eval()
yaml.compose(x, Loader=L)
torch.load(x, weights_only=True)
t.extractall(x, filter='data')
subprocess.run(x)"""


def test_code_paths_are_seen():
    missed = [line for line in CODE_PATHS.splitlines() if not list_code_paths(ast.parse(line))]
    assert (missed, list_code_paths(ast.parse(SAFE_CODE))) == ([], [])


def test_names_explain_something():
    empty = {*EMPTY_NAMES.split()}
    check([file for file in FILES if empty & {*Path(file).with_suffix("").parts}])


def test_modules_have_docstrings():
    check([file for file in FILES if not ast.get_docstring(parse(file))])


def test_every_config_field_has_a_reader():
    """A field is read as `.name` outside config/ and checks, or in a method of its dataclass."""
    others = (
        file for file in FILES if not re.match(r"base/config/|\w+/(check|settings)\.py", file)
    )
    trees = [parse(file) for file in others]
    settings = (file for file in FILES if re.fullmatch(r"\w+/settings\.py", file))
    for file in ("base/config/schema.py", "base/config/model_config.py", *settings):
        classes = [node for node in parse(file).body if isinstance(node, ast.ClassDef)]
        members = [node for each in classes for node in each.body]
        trees += [node for node in members if isinstance(node, ast.FunctionDef)]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    assert [key for key in FIELDS if key.rpartition(".")[2] not in read] == []


@pytest.mark.long
def test_torch_is_not_imported_where_it_is_not_needed():
    code = "import sys, importlib\nfor name in sys.argv[1:]:\n importlib.import_module(name)\n"
    code += " if 'torch' in sys.modules: sys.exit(name)\n"
    # A process alone splits no model.
    code += "import megatoken.train.train\nfor name in ('sympy', 'torch.distributed.tensor'):\n"
    code += " if name in sys.modules: sys.exit(name)"
    modules = [*WITHOUT_TORCH.split(), *list_entries("command").values()]
    command = [sys.executable, "-c", code, *modules]
    process = subprocess.run(command, capture_output=True, text=True)
    assert (process.returncode, process.stderr.strip()) == (0, "")
