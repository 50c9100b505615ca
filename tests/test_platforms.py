"""Train without Linux's own calls, as on macOS, and on an Apple GPU, in shapes."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatoken.base.config.schema import MachineConfig
from megatoken.base.system.device import choose_device
from megatoken.base.system.machine import find_compiler
from megatoken.data.dataloader import Batch
from megatoken.model.gpt import GPT
from megatoken.train.state import build_state
from megatoken.train.step import train_step
from tests.ranks import run_ranks
from tests.tiny_model import CPU, TINY_MODERN, tiny_config, tiny_step_config
from tests.tiny_run import TINY, newest_step, write_shards

# Python runs a module of this name at the start of each process.
HIDE = """
import mmap, os, platform, sys, sysconfig

for module, names in ((os, "sched_getaffinity posix_fadvise"), (mmap, "MADV_HUGEPAGE")):
    for name in names.split():
        delattr(module, name)
sysconfig.get_config_vars()  # from a file that is named after the platform
sys.platform = "bsd"  # for "darwin", torch loads other files
platform.libc_ver = lambda *_: ("", "")

def hide(event, arguments):
    if event == "open" and str(arguments[0]).startswith(("/proc", "/sys")):
        raise FileNotFoundError(2, "hidden", arguments[0])
    if event == "ctypes.dlsym" and arguments[1] in ("prctl", "mallopt", "sync_file_range"):
        raise AttributeError(arguments[1])

sys.addaudithook(hide)
"""


START = """
import shlex
from megatoken.cli.main import main
for line in {lines}:
    assert main(shlex.split(line)) == 0
"""


@pytest.mark.long
def test_a_run_needs_no_call_of_linux(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(HIDE)
    out = tmp_path / "run"
    data = write_shards(tmp_path / "data")
    lines = [
        f"train {TINY} {data} budget.steps=3 machine.attention=auto --out {out} --nproc 2",
        f"train {out} --extend 2steps",
        f"sample {out} --tokens 4",
        "doctor",
    ]
    done = subprocess.run(
        [sys.executable, "-c", START.format(lines=lines)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert newest_step(out) == 5


class AppleGPU(TorchDispatchMode):
    """Refuse fp64, which the device lacks; the host reads each number as 0."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None):
        if operation is torch.ops.aten._local_scalar_dense.default:
            return 0.0
        result = operation(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        assert torch.float64 not in [tensor.dtype for tensor in tensors], operation
        return result


def train_in_shapes(_: int, library: Path, precision: str) -> None:
    torch.ops.load_library(library)
    auto = [choose_device(MachineConfig(), local_world_size=count).type for count in (1, 2)]
    assert auto == ["mps", "cpu"]
    torch.nn.Module.to = lambda self, *_: self  # the model is built on the device
    attend = torch.ops.aten._scaled_dot_product_attention_math
    F.scaled_dot_product_attention = lambda *args, attn_mask, **options: attend(
        *args, attn_mask, **options
    )[0]
    device = replace(CPU, torch_device=torch.device("mps"), precision=precision)
    with FakeTensorMode(), AppleGPU(), torch.device("mps"):
        state = build_state(GPT(TINY_MODERN, seed=None), tiny_config(), device)
        ids = torch.zeros(8, 16, dtype=torch.int64)
        train_step(state, tiny_step_config(), device, Batch(ids, ids))


@pytest.mark.long
def test_a_step_on_an_apple_gpu_needs_no_fp64(tmp_path: Path):
    compiler = find_compiler() or pytest.skip("no C++ compiler")
    source = Path(__file__).with_name("mps.cc")
    library = tmp_path / "mps.so"
    folder = Path(torch.__file__).parent
    command = f"{compiler} -std=c++20 -w -shared -fPIC {source} -o {library}"
    command += f" -I{folder}/include -L{folder}/lib -lc10 -ltorch_cpu"
    subprocess.run(command.split(), check=True)
    for precision in ("fp32", "bf16", "fp16"):
        run_ranks(train_in_shapes, library, precision, nprocs=1)
