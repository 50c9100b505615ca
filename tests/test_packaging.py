"""The wheel and the sdist: what is in them, and that an unpacked wheel runs outside the checkout."""

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

import megatoken
from megatoken.base.system.machine import find_compiler
from megatoken.model.native.build import INSTRUCTION_SETS, library_name

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src/megatoken"
if find_spec("hatchling") is None:
    pytest.skip("hatchling, of the dev extra, is not installed", allow_module_level=True)


COPIED = ("pyproject.toml", "README.md", "LICENSE", "hatch_build.py")
# A compiler without AVX512-BF16 that writes no code, and only checks the sources for AMX.
COMPILER = """#!/bin/sh
for output; do :; done
case "$*" in
    *-march=cooperlake*) exit 1;;
    *-march=sapphirerapids*) COMPILER "$@" -fsyntax-only || exit 1;;
esac
echo x > "$output"
"""


def build(kind: str, folder: Path, root: Path = ROOT, **variables: str) -> Path:
    """Build a folder's wheel or sdist with the backend that pyproject.toml names, without a
    network.
    """
    code = f"import sys, hatchling.build as backend; backend.build_{kind}(sys.argv[1])"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = [sys.executable, "-c", code, folder]
    environment = {**os.environ, "PATH": path, **variables}
    subprocess.run(command, cwd=root, env=environment, check=True, capture_output=True)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy what a wheel is built from, because the build leaves its libraries there."""
    root = tmp_path_factory.mktemp("sources")
    for name in COPIED:
        shutil.copy(ROOT / name, root)
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "src", root / "src", ignore=ignored)
    return root


@pytest.fixture(scope="module")
def wheel(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    compiler = sources / "compiler"
    compiler.write_text(COMPILER.replace("COMPILER", find_compiler() or "true"))
    compiler.chmod(0o755)
    return build("wheel", folder, sources, CXX=str(compiler))


@pytest.mark.long
def test_wheel_holds_the_package_and_nothing_else(wheel: Path, sources: Path, tmp_path: Path):
    """It lacks instruction sets that the compiler does not know; without any, it is for all
    machines.
    """
    has_kernels = (platform.machine(), sys.platform) == ("x86_64", "linux")
    known = [name for name in INSTRUCTION_SETS if name != "avx512_bf16" and has_kernels]
    libraries = {f"megatoken/model/native/{library_name(name)}" for name in known}
    stem = f"megatoken-{megatoken.__version__}"
    shutil.rmtree(sources / "build", ignore_errors=True)
    bare = build("wheel", tmp_path, sources, CXX="false")
    assert bare.name == f"{stem}-py3-none-any.whl"
    assert wheel.name == (bare.name.replace("any", "linux_x86_64") if has_kernels else bare.name)
    paths = (path for path in SOURCE.rglob("*") if path.is_file() and path.suffix != ".so")
    names = {path.relative_to(SOURCE.parent).as_posix() for path in paths}
    files = {name for name in names if "__pycache__" not in name}
    assert {"megatoken/py.typed", "megatoken/base/config/recipes/quickstart.yaml"} <= files
    for built, compiled in ((wheel, libraries), (bare, set())):
        with zipfile.ZipFile(built) as archive:
            names = {name for name in archive.namelist() if ".dist-info/" not in name}
            assert names == files | compiled
            entry_points = archive.read(f"{stem}.dist-info/entry_points.txt").decode()
            assert archive.read(f"{stem}.dist-info/licenses/LICENSE")
    assert entry_points.startswith("[console_scripts]\nmegatoken = megatoken.__main__:main\n")


def test_unpacked_wheel_runs_outside_the_checkout(wheel: Path, tmp_path: Path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}/site"}
    for line, printed in (
        ("-m megatoken --version", f"megatoken {megatoken.__version__}"),
        ("-m megatoken quickstart --help", "usage: megatoken quickstart"),
        ("-m megatoken config quickstart", "version: 2"),
        ("-m megatoken launch k8s quickstart --nproc 2", "quickstart"),
        ("-c 'import megatoken; print(megatoken.__file__)'", f"{tmp_path}/site"),
    ):
        command = [sys.executable, *shlex.split(line)]
        options = {"cwd": elsewhere, "env": environment}
        done = subprocess.run(command, **options, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), line
        assert printed in done.stdout


def test_sdist_holds_tests_and_docs(tmp_path: Path):
    with tarfile.open(build("sdist", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    added = {"Dockerfile", "Makefile", "examples/text_to_samples.ipynb", "tests/conftest.py"}
    assert {*COPIED, *added, "src/megatoken/py.typed"} <= names


def test_dockerfile_copies_and_installs_what_exists():
    """Its lines are read, because a build needs Docker; the RUN lines must be valid shell."""
    text = (ROOT / "Dockerfile").read_text()
    kept = re.findall("^!(.*)$", (ROOT / ".dockerignore").read_text(), re.M)
    assert {*kept} == {*COPIED, "src"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r'whl\)\[(.*)\]"', text)
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()
    (torch,) = re.findall(r'"(torch>=.*)"', text)
    assert torch in project["dependencies"]
    for command in re.findall("^RUN (.*)$", text, re.M):
        subprocess.run(["sh", "-n", "-c", command], check=True)
    assert "\nUSER 1000\n" in text
