"""Measure the power of the tests: how many seeded mutants of the core do they catch?

    python -m experiments.mutants --count 200 --seed 1 --out runs/mutants.json
    python -m experiments.mutants --tests OLD_CHECKOUT --of runs/mutants.json --out runs/old.json

Each mutant changes one operator, comparison, constant or statement of a core module in a copy of
the checkout. It runs the test file of the module, then others that import it, then the rest of its
package, until the first failure. Tests that fail without a mutant are skipped. --tests: run the
tests of another checkout. --of: try only the mutants that survived in these results.
"""

import argparse
import ast
import importlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import Any

FORK = multiprocessing.get_context("fork")
ROOT = Path(__file__).parents[1]
PACKAGES = ("model", "optim", "distributed", "store", "posttrain", "train", "data")
DATA_ORDER = ("dataloader.py", "window_order.py", "permutation.py", "mixture.py", "dataset.py")
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
PRELOADED = ("hypothesis", "torch._dynamo", "torch.distributed.fsdp", "transformers")
IGNORED_WARNING = "ignore::pytest.PytestAssertRewriteWarning"  # for preloaded pytest plugins
HANG_SECONDS = 1800  # a mutant that hangs is caught

CHECKOUT = ROOT  # this worker's copy


def list_files() -> list[Path]:
    """Return the core modules, relative to src/megatoken."""
    source = ROOT / "src" / "megatoken"
    files = []
    for package in PACKAGES:
        for file in sorted((source / package).rglob("*.py")):
            if package != "data" or file.name in DATA_ORDER:
                files.append(file.relative_to(source))
    return files


def list_sites(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the nodes that can be mutated inside functions."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            yield from filter(is_site, ast.walk(function))


def is_site(node: ast.AST) -> bool:
    """Return whether `mutate` can change a node."""
    if isinstance(node, ast.BinOp | ast.BoolOp):
        return type(node.op) in SWAPS
    if isinstance(node, ast.Compare):
        return type(node.ops[0]) in SWAPS
    if isinstance(node, ast.Constant):
        return type(node.value) in (int, float, bool)
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)


def mutate(node: ast.AST) -> str:
    """Change a node in place and describe the change."""
    old = ast.unparse(node)
    if isinstance(node, ast.BinOp | ast.BoolOp):
        node.op = SWAPS[type(node.op)]()  # type: ignore[assignment]
    elif isinstance(node, ast.Compare):
        node.ops[0] = SWAPS[type(node.ops[0])]()  # type: ignore[assignment]
    elif isinstance(node, ast.Constant):
        node.value = not node.value if isinstance(node.value, bool) else node.value + 1  # type: ignore[operator]
    elif isinstance(node, ast.Expr):
        node.value = ast.Constant(None)
    return f"{old} -> {ast.unparse(node)}"


def draw_mutants(count: int, seed: int) -> Iterator[tuple[Path, int, str, str]]:
    """Yield (file, line, description, mutated source); sites are drawn uniformly over all files."""
    sites = [
        (file, number)
        for file in list_files()
        for number, _ in enumerate(
            list_sites(ast.parse((ROOT / "src" / "megatoken" / file).read_text()))
        )
    ]
    for file, number in random.Random(seed).sample(sites, count):
        tree = ast.parse((ROOT / "src" / "megatoken" / file).read_text())
        node = list(list_sites(tree))[number]
        line = getattr(node, "lineno", 0)
        description = mutate(node)
        yield file, line, description, ast.unparse(tree)


def run_tests(folder: Path, arguments: list[str]) -> tuple[int | None, str]:
    """Run pytest in a copy of the checkout; return its exit code (None: it hangs) and output."""
    output = folder / "output.txt"
    process = FORK.Process(target=_run_pytest, args=(folder, arguments, output))
    process.start()
    process.join(HANG_SECONDS)
    for end in (signal.SIGTERM, signal.SIGKILL) if process.exitcode is None else ():
        os.killpg(process.pid or 0, end)
        process.join(10)
    return process.exitcode, output.read_text()


def _run_pytest(folder: Path, arguments: list[str], output: Path) -> None:
    """Run pytest in this process, which has imported libraries but no module of the checkout."""
    import pytest

    os.setsid()
    os.chdir(folder)
    os.environ["PYTHONPATH"] = f"{folder}/src"
    sys.path[:0] = [f"{folder}/src", str(folder)]
    for number in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    options = ["-p", "no:cacheprovider", "-p", "no:xdist", "-W", IGNORED_WARNING]
    code = pytest.main([*options, *arguments])
    sys.stdout.flush()
    os._exit(int(code))


def list_tests(folder: Path, module: Path) -> list[str]:
    """Return the test files of a module, the likeliest to fail first."""
    name = "megatoken." + ".".join(module.with_suffix("").parts)
    own = folder / "tests" / module.parts[0] / f"test_{module.stem}.py"
    of_package = {*own.parent.rglob("test_*.py")}
    importing = {file for file in (folder / "tests").rglob("test_*.py") if name in file.read_text()}
    files = sorted(
        of_package | importing, key=lambda file: (file != own, file not in importing, file)
    )
    return [str(file.relative_to(folder)) for file in files]


def try_mutant(failing: list[str], mutant: tuple[Path, int, str, str]) -> dict[str, Any]:
    """Return a mutant with the test that fails because of it, or ""."""
    file, line, description, source = mutant
    start = time.monotonic()
    target = CHECKOUT / "src" / "megatoken" / file
    original = target.read_text()
    target.write_text(source)
    deselected = [f"--deselect={name}" for name in failing]
    code, output = run_tests(CHECKOUT, ["-x", *deselected, *list_tests(CHECKOUT, file)])
    target.write_text(original)
    test = next(iter(list_failures(output)), f"exit code {code}") if code != 0 else ""
    seconds = round(time.monotonic() - start)
    return {
        "file": str(file),
        "line": line,
        "change": description,
        "test": test,
        "seconds": seconds,
    }


def list_failures(output: str) -> list[str]:
    """Return the tests that pytest's summary names."""
    return [line.split()[1] for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]


def copy_checkout(parent: str, tests: Path) -> None:
    """Give this worker a copy of the checkout with these tests."""
    global CHECKOUT
    CHECKOUT = Path(parent) / str(os.getpid())
    skipped = shutil.ignore_patterns(".git", ".venv", "runs", "build", "__pycache__", "tests")
    shutil.copytree(ROOT, CHECKOUT, ignore=skipped)
    shutil.copytree(tests / "tests", CHECKOUT / "tests")
    with suppress(FileExistsError):
        (CHECKOUT.parent / "shared").symlink_to(ROOT.parent / "shared")


def list_failing(folder: str) -> list[str]:
    """Return pytest's names of a folder's tests that fail without a mutant."""
    return list_failures(run_tests(CHECKOUT, [folder])[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--tests", type=Path, default=ROOT)
    parser.add_argument("--of", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/mutants.json"))
    options = parser.parse_args()
    os.environ["GOMP_SPINCOUNT"] = "0"
    os.environ["TRITON_INTERPRET"] = "1"
    for name in PRELOADED:
        importlib.import_module(name)
    mutants = list(draw_mutants(options.count, options.seed))
    if options.of:
        survivors = {
            (each["file"], each["line"], each["change"])
            for each in json.loads(options.of.read_text())
            if not each["test"]
        }
        mutants = [each for each in mutants if (str(each[0]), *each[1:3]) in survivors]
    results: list[dict[str, Any]] = []
    options.out.parent.mkdir(parents=True, exist_ok=True)
    folders = [f"tests/{name}" for name in PACKAGES]
    with (
        tempfile.TemporaryDirectory(prefix="mutants-") as parent,
        ProcessPoolExecutor(
            options.workers, FORK, initializer=copy_checkout, initargs=(parent, options.tests)
        ) as pool,
    ):
        failing = [name for part in pool.map(list_failing, folders) for name in part]
        print(f"{len(failing)} tests fail without a mutant: {' '.join(failing)}", flush=True)
        tries = [pool.submit(try_mutant, failing, each) for each in mutants]
        for done in as_completed(tries):
            results.append(done.result())
            print("{file}:{line}: {change}: {test}, {seconds} s".format(**results[-1]), flush=True)
            options.out.write_text(json.dumps(results, indent=1) + "\n")
    n_caught = sum(bool(result["test"]) for result in results)
    print(f"{n_caught} of {len(results)} caught")


if __name__ == "__main__":
    main()
