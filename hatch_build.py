"""Compiles the CPU kernels into a wheel, for every instruction set; an editable install compiles by `make` instead."""

import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).parent / "src"))
from megatoken.base.system.machine import find_compiler
from megatoken.model.native.build import (
    INSTRUCTION_SETS,
    CompilerError,
    compile_library,
    library_name,
)


class NativeKernels(BuildHookInterface):  # type: ignore[type-arg]
    """An instruction set that the compiler does not know is left out.

    Without a compiler, or on another processor than x86-64, the wheel is for all machines, without
    kernels.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        if version == "editable" or platform != "linux_x86_64" or not find_compiler():
            return
        folder = (
            Path(self.root) / "build" / "native"
        )  # where tests/model/native/conftest.py compiles, too
        for name in INSTRUCTION_SETS:
            library = folder / library_name(name)
            if not library.exists():
                try:
                    compile_library(name, folder)
                except CompilerError:
                    self.app.display_warning(
                        f"no native kernels for {name}: the compiler does not make them"
                    )
                    continue
            build_data["pure_python"] = False
            build_data["force_include"][str(library)] = f"megatoken/model/native/{library.name}"
            build_data["tag"] = f"py3-none-{platform}"
