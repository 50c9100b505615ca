"""Measure the power of the tests: how many seeded mutants of the core do they catch?

    python -m experiments.mutants --count 200 --seed 1 --out runs/mutants.json

Each mutant changes one operator, comparison, constant or statement of a core module in a copy of
the checkout. It runs the test file of the module, then the tests of its package and of packages
that use it, until the first failure. Tests that fail without a mutant are skipped.
"""

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = {  # package: test folders, the likeliest to fail first
    "model": ["model", "train"],
    "optim": ["optim", "train"],
    "distributed": ["distributed", "checkpoint"],
    "checkpoint": ["checkpoint", "train"],
    "objectives": ["objectives"],
    "train": ["train", "objectives"],
    "data": ["data", "train"],
}
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
TIMEOUT_SECONDS = 3600  # a mutant that hangs is caught


def list_files() -> list[Path]:
    """Return the core modules, relative to src/megatoken."""
    source = ROOT / "src" / "megatoken"
    files = []
    for package in TESTS:
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


def run_tests(folder: Path, arguments: list[str]) -> tuple[int, str]:
    """Run pytest in a copy of the checkout; return its exit code (-1: it hangs) and output."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    env = os.environ | {"PYTHONPATH": str(folder / "src")}
    try:
        done = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired:
        return -1, ""
    return done.returncode, done.stdout


def list_failing(folder: Path, workers: int) -> list[str]:
    """Return pytest's names of the tests that fail without a mutant."""
    folders = sorted({f"tests/{name}" for names in TESTS.values() for name in names})
    existing = [name for name in folders if (folder / name).is_dir()]
    _, output = run_tests(folder, ["-n", str(workers), *existing])
    return sorted(set(list_failures(output)))


def find_catching_test(folder: Path, file: Path, failing: list[str], workers: int) -> str:
    """Return the test that fails because of the mutant in `file`, or ""."""
    package = file.parts[0]
    own = f"tests/{package}/test_{file.stem}.py"
    folders = [f"tests/{name}" for name in TESTS[package]]
    for names, count in (([own], 0), (folders, workers)):
        existing = [name for name in names if (folder / name).exists()]
        skipped = [f"--deselect={name}" for name in failing]
        if existing:
            code, output = run_tests(folder, ["-x", "-n", str(count), *skipped, *existing])
            if code:
                return next(iter(list_failures(output)), f"exit code {code}")
    return ""


def list_failures(output: str) -> list[str]:
    """Return the tests that pytest's summary names."""
    return [line.split()[1] for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/mutants.json"))
    options = parser.parse_args()
    results: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary:
        copy = Path(temporary) / "checkout"
        skipped = shutil.ignore_patterns(".git", ".venv", "runs", "build", "__pycache__")
        shutil.copytree(ROOT, copy, ignore=skipped)
        failing = list_failing(copy, options.workers)
        print(f"{len(failing)} tests fail without a mutant: {' '.join(failing)}", flush=True)
        for file, line, description, source in draw_mutants(options.count, options.seed):
            target = copy / "src" / "megatoken" / file
            original = target.read_text()
            target.write_text(source)
            start = time.monotonic()
            test = find_catching_test(copy, file, failing, options.workers)
            target.write_text(original)
            results.append({"file": str(file), "line": line, "change": description, "test": test})
            verdict = f"caught by {test}" if test else "SURVIVED"
            seconds = time.monotonic() - start
            print(f"{file}:{line}: {description}: {verdict}, {seconds:.0f} s", flush=True)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(results, indent=1) + "\n")
    n_caught = sum(bool(result["test"]) for result in results)
    print(f"{n_caught} of {len(results)} caught")


if __name__ == "__main__":
    main()
