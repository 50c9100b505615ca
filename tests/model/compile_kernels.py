"""Compile every Triton kernel for GPUs, without one, and report what ptxas makes of it.

    python -m tests.model.compile_kernels

Prints a JSON line per kernel, GPU architecture, dtype and mode: registers per thread, spilled
bytes, the widths of global loads and stores in loops in bits, and barriers in loops.
"""

import itertools
import json
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from megatoken.model.kernels import fused_loss as softmax
from megatoken.model.kernels.fp8 import SOFTMAX_FACTOR

ARCHITECTURES = (80, 90, 100)
ITEM_BYTES = {"bf16": 2, "fp32": 4}  # fp16 runs use torch's loss
# softcap, overwrite (False: validation), whether the gradient is stored in FP8 too
MODES = ((0.0, True, False), (15.0, True, False), (0.0, False, False))
FP8_MODES = ((0.0, True, True), (15.0, True, True))
FP8_ARCHITECTURES = (90, 100)
ALIGNED = [["tt.divisibility", 16]]


def compile_all() -> Iterator[dict[str, Any]]:
    """Yield a row per variant of the kernel that a training run or a validation launches."""
    variants = [
        *itertools.product(ARCHITECTURES, ITEM_BYTES, MODES),
        *itertools.product(FP8_ARCHITECTURES, ("bf16",), FP8_MODES),
    ]
    for arch, dtype, (softcap, overwrite, fp8) in variants:
        kernel = compile_cross_entropy(arch, dtype, softcap, overwrite, fp8)
        yield {
            "kernel": "cross_entropy",
            "arch": f"sm_{arch}",
            "dtype": dtype,
            "softcap": softcap,
            "overwrite": overwrite,
            "fp8": fp8,
            **describe_ptx(kernel.asm["ptx"], arch),
        }


def compile_cross_entropy(arch: int, dtype: str, softcap: float, overwrite: bool, fp8: bool) -> Any:
    """Compile the kernel as a launch with GPT-2's vocabulary would.

    Pointers and the padded vocabulary are multiples of 16, the vocabulary is not.
    """
    signature = {"logits": f"*{dtype}", "targets": "*i64", "loss": "*fp32"}
    signature |= {"grad8": "*fp8e5" if fp8 else f"*{dtype}"}
    signature |= {"vocab_size": "i32", "V": "i32"}
    constants = {
        "OVERWRITE": overwrite,
        "FACTOR": SOFTMAX_FACTOR if fp8 else 0.0,
        "SOFTCAP": softcap,
        "THREADS": 32 * softmax.WARPS,
        "WIDTH": softmax.LOAD_BYTES // ITEM_BYTES[dtype],
    }
    source = ASTSource(
        fn=softmax._cross_entropy,
        signature=signature | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        attrs={(index,): ALIGNED for index in (0, 1, 2, 3, 5)},
    )
    target = GPUTarget("cuda", arch, 32)
    return triton.compile(source, target=target, options={"num_warps": softmax.WARPS})


def describe_ptx(ptx: str, arch: int) -> dict[str, Any]:
    """Return registers and spilled bytes of ptxas, and memory accesses and barriers of the loops."""
    target = re.findall(r"\.target (\w+)", ptx)[0]
    options = f"-v --gpu-name={target} /dev/stdin -o /dev/null"
    command = [get_ptxas(arch).path, *options.split()]
    output = subprocess.run(command, check=True, capture_output=True, text=True, input=ptx).stderr
    # From a label to the branch back to it.
    pattern = r"^(?=(\$\w+):(.*?)bra(?:\.uni)?\s+\1;)"
    loops = "".join(body for _, body in re.findall(pattern, ptx, re.MULTILINE | re.DOTALL))
    return {
        "registers": int(re.findall(r"Used (\d+) registers", output)[0]),
        "spilled_bytes": int(re.findall(r"(\d+) bytes spill stores", output)[0]),
        "load_bits": sorted(list_widths(loops, "ld")),
        "store_bits": sorted(list_widths(loops, "st")),
        "barriers": loops.count("bar.sync"),
    }


def list_widths(ptx: str, operation: str) -> list[int]:
    """Return the bits per thread of each global load ("ld") or store ("st")."""
    accesses = re.findall(rf"{operation}\.global(?:\.v(\d))?\.b(\d+)", ptx)
    return [int(count or 1) * int(bits) for count, bits in accesses]


if __name__ == "__main__":
    for row in compile_all():
        print(json.dumps(row), flush=True)
