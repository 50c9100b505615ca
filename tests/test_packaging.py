"""The wheel and the sdist: what is in them, and that an unpacked wheel runs outside the checkout."""

import os
import platform
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import megatoken
from megatoken.native.build import INSTRUCTION_SETS, CompilerError, library_name
from megatoken.system.machine import find_compiler

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "megatoken"
if find_spec("hatchling") is None:
    pytest.skip("hatchling, of the dev extra, is not installed", allow_module_level=True)


def build(kind: str, folder: Path) -> Path:
    """The wheel or sdist of this checkout, built by the backend that pyproject.toml names, without a network."""
    code = f"import sys, hatchling.build as backend; backend.build_{kind}(sys.argv[1])"
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    }
    subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        cwd=ROOT,
        env=environment,
        check=True,
        capture_output=True,
        timeout=250,
    )
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", tmp_path_factory.mktemp("wheel"))


def test_wheel_holds_the_package_and_nothing_else(wheel: Path):
    libraries = {f"megatoken/native/{library_name(name)}" for name in INSTRUCTION_SETS}
    has_kernels = (
        platform.machine() == "x86_64" and sys.platform == "linux" and find_compiler() != ""
    )
    assert (
        wheel.name
        == f"megatoken-{megatoken.__version__}-py3-none-{'linux_x86_64' if has_kernels else 'any'}.whl"
    )
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        info = f"megatoken-{megatoken.__version__}.dist-info"
        assert archive.read(f"{info}/entry_points.txt").decode().split("\n")[:2] == [
            "[console_scripts]",
            "megatoken = megatoken.__main__:main",
        ]
        metadata = archive.read(f"{info}/METADATA").decode()
    assert f"\nVersion: {megatoken.__version__}\n" in metadata
    about = {
        f"{info}/{name}"
        for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")
    }
    files = {
        f"megatoken/{path.relative_to(SOURCE).as_posix()}"
        for path in SOURCE.rglob("*")
        if path.is_file()
    }
    expected = {file for file in files if "__pycache__" not in file and not file.endswith(".so")}
    assert names - about == expected | (libraries if has_kernels else set())
    assert {"megatoken/py.typed", "megatoken/config/recipes/quickstart.yaml"} <= names


def test_instruction_sets_that_the_compiler_does_not_know_are_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.syspath_prepend(str(ROOT))
    hook_module: Any = import_module("hatch_build")

    def compile_some(name: str, folder: Path) -> None:
        if name not in known:
            raise CompilerError("g++")

    monkeypatch.setattr(hook_module.sysconfig, "get_platform", lambda: "linux-x86_64")
    monkeypatch.setattr(hook_module, "find_compiler", lambda: "g++")
    monkeypatch.setattr(hook_module, "compile_library", compile_some)
    hook = hook_module.NativeKernels(str(tmp_path), {}, None, None, str(tmp_path), "wheel")
    for known in ["avx2", "portable"], []:
        build_data: dict[str, Any] = {"force_include": {}}
        hook.initialize("standard", build_data)
        libraries = [f"megatoken/native/{library_name(name)}" for name in known]
        assert list(build_data.pop("force_include").values()) == libraries
        assert build_data == (
            {"pure_python": False, "tag": "py3-none-linux_x86_64"} if known else {}
        )


def test_unpacked_wheel_runs_outside_the_checkout(wheel: Path, tmp_path: Path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    for words, printed in (
        (["--version"], f"megatoken {megatoken.__version__}"),
        (["quickstart", "--help"], "usage: megatoken quickstart"),
        (["config", "quickstart"], "version: 2"),
        *(
            (["launch", engine, "quickstart", "--nproc", "2"], "quickstart")
            for engine in ("torchrun", "slurm", "k8s")
        ),
    ):
        command = [sys.executable, "-m", "megatoken", *words]
        done = subprocess.run(
            command, cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=250
        )
        assert (done.returncode, done.stderr) == (0, ""), words
        assert printed in done.stdout
    code = "import megatoken; print(megatoken.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=elsewhere, env=environment, capture_output=True, text=True
    )
    assert Path(done.stdout.strip()).is_relative_to(tmp_path / "site")


def test_sdist_holds_tests_and_docs(tmp_path: Path):
    with tarfile.open(build("sdist", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "README.md",
        "CHANGELOG.md",
        "LICENSE",
        "Makefile",
        "pyproject.toml",
        "tests/conftest.py",
    } <= names
    assert {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} <= names
    assert {
        f"src/megatoken/{path.relative_to(SOURCE).as_posix()}" for path in SOURCE.rglob("*.py")
    } <= names


def test_dockerfile_copies_and_installs_what_exists():
    """Its lines are read, not built, which takes Docker; the RUN lines are shell."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", "")
    steps = [
        line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")
    ]
    copied = {word for step, words in steps if step == "COPY" for word in words.split()[:-1]}
    kept = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    assert copied == kept == {"pyproject.toml", "README.md", "LICENSE", "src"}
    assert all((ROOT / name).exists() for name in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r'install --no-cache-dir "\.\[(.*)\]"', text)
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()
    assert re.findall(r'"(torch>=.*)"', text) == [
        name for name in project["dependencies"] if name.startswith("torch>")
    ]
    for step, words in steps:
        if step == "RUN":
            subprocess.run(["sh", "-n", "-c", words], check=True)
    assert ["USER", "1000"] in steps
