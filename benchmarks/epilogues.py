"""Compare epilogues of cuBLASLt's matmuls with torch's kernels, on a CUDA card.

    PYTHONPATH=src python benchmarks/epilogues.py

For GPT-2 124M and 64 sequences of 1,024, prints median milliseconds and relative errors against
fp64 of a compiled block, of GELU and its gradient in epilogues (model/kernels/cublaslt.py), and of
an epilogue that training does not use: bias gradients, also with GELU's gradient. A failure is
printed and the next case runs.
"""

import argparse
import contextlib
import itertools
import json
import statistics
from collections.abc import Callable, Iterator
from ctypes import byref, c_float, c_int, c_size_t, c_uint64, c_void_p, sizeof
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatoken.base.config.presets import PRESETS
from megatoken.model.gpt import GPT, add_term, set_block_kernels
from megatoken.model.kernels import cublaslt

WIDTH, FF_WIDTH = 768, 3072
DGELU_BGRAD, BGRADB = 208, 512  # epilogues
ALGORITHMS = 4  # timed, of those that cuBLASLt recommends with a workspace
WORKSPACE_BYTES = 32 << 20
Tensors = tuple[Tensor, ...]


def draw(*shape: int) -> Tensor:
    """Return bf16 normal random numbers, divided by the square root of the last size."""
    return (torch.randn(shape, device="cuda") / shape[-1] ** 0.5).bfloat16()


def error(values: Tensor, exact: Tensor) -> float:
    """Return the relative error in the L2 norm."""
    exact = exact.double()
    return float(((values.double() - exact).norm() / exact.norm()).detach())


def median_ms(call: Callable[[], object], repeats: int) -> float:
    """Return the median time of a call on the device."""
    for _ in range(3):
        call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
    return round(statistics.median(times), 4)


def create(name: str, *arguments: int) -> c_void_p:
    """Return a new descriptor, because `cublaslt._create` returns shared ones."""
    return cublaslt._create.__wrapped__(name, *arguments)


@contextlib.contextmanager
def use_algorithm(number: int) -> Iterator[None]:
    """Call cuBLASLt with an algorithm that it recommends with a workspace; 0 is the first."""
    plain = cublaslt._call
    preference = create("cublasLtMatmulPreferenceCreate")
    limit = c_uint64(WORKSPACE_BYTES)
    plain("cublasLtMatmulPreferenceSetAttribute", preference, 1, byref(limit), sizeof(limit))
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    known: dict[tuple[Any, ...], Any] = {}

    def call(name: str, *arguments: Any) -> None:
        if name != "cublasLtMatmul":
            return plain(name, *arguments)
        handle, matmul, _, _, a, _, b, _, _, c, _, d, *_ = arguments
        key = tuple(described.value for described in (matmul, a, b, d))
        if key not in known:
            known[key] = ((c_uint64 * 12) * ALGORITHMS)()
            query = handle, matmul, a, b, c, d, preference, ALGORITHMS, known[key], byref(c_int())
            plain("cublasLtMatmulAlgoGetHeuristic", *query)
        used = known[key][number], workspace.data_ptr(), WORKSPACE_BYTES
        return plain(name, *arguments[:12], *used, arguments[15])

    cublaslt._call = call
    try:
        yield
    finally:
        cublaslt._call = plain


def multiply(
    left: Tensor, right: Tensor, *, transposed: bool, attributes: dict[int, Any]
) -> Tensor:
    """Return left @ right, or left^T @ right, after an epilogue. cuBLASLt takes `left` as its right
    operand.
    """
    out = left.new_empty(left.shape[transposed], right.shape[1])
    matmul = create("cublasLtMatmulDescCreate", cublaslt.COMPUTE_FP32, cublaslt.FP32)
    for attribute, value in {4: c_int(transposed), **attributes}.items():
        name = "cublasLtMatmulDescSetAttribute"
        cublaslt._call(name, matmul, attribute, byref(value), sizeof(value))
    a, b, c = (
        create("cublasLtMatrixLayoutCreate", cublaslt.BF16, t.shape[1], t.shape[0], t.shape[1])
        for t in (right, left, out)
    )
    cublaslt._call(
        *("cublasLtMatmul", torch.cuda.current_blas_handle(), matmul, byref(c_float(1))),
        *(right.data_ptr(), a, left.data_ptr(), b, byref(c_float(0)), out.data_ptr(), c),
        *(out.data_ptr(), c, None, None, 0, torch.cuda.current_stream().cuda_stream),
    )
    return out


def dgelu_bgrad(dy: Tensor, weight: Tensor, up: Tensor) -> Tensors:
    """Return the gradients of GELU's input and of the bias in it."""
    bias = up.new_empty(up.shape[1])
    attributes = {
        cublaslt.EPILOGUE: c_int(DGELU_BGRAD),
        cublaslt.BIAS: c_size_t(bias.data_ptr()),
        cublaslt.AUX: c_size_t(up.data_ptr()),
        cublaslt.AUX_STRIDE: c_size_t(up.shape[1]),
    }
    return multiply(dy, weight, transposed=False, attributes=attributes), bias


def weight_and_bias_gradient(dy: Tensor, x: Tensor) -> Tensors:
    """Return the gradients of a linear layer's weight and bias."""
    bias = dy.new_empty(dy.shape[1])
    attributes = {cublaslt.EPILOGUE: c_int(BGRADB), cublaslt.BIAS: c_size_t(bias.data_ptr())}
    return multiply(dy, x, transposed=True, attributes=attributes), bias


def torch_linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensors:
    up = F.linear(x, weight, bias)
    return F.gelu(up, approximate="tanh"), up


def dgelu(*inputs: Tensor) -> Tensors:
    return (cublaslt.gelu_gradient(*inputs),)


def torch_dgelu(dy: Tensor, weight: Tensor, up: Tensor) -> Tensors:
    return (torch.ops.aten.gelu_backward(dy @ weight, up, approximate="tanh"),)


def torch_dgelu_bgrad(dy: Tensor, weight: Tensor, up: Tensor) -> Tensors:
    (dup,) = torch_dgelu(dy, weight, up)
    return dup, dup.sum(0)


def matmul(dy: Tensor, weight: Tensor, _: Tensor) -> Tensor:
    return dy @ weight


def torch_weight_and_bias_gradient(dy: Tensor, x: Tensor) -> Tensors:
    return dy.T @ x, dy.sum(0)


def list_cases(tokens: int) -> Iterator[tuple[str, Any, Any, Any, list[Tensor]]]:
    """Yield name, cuBLASLt's operation, torch's, its matmul alone, and inputs."""
    gelu = "GELU", cublaslt.linear_gelu, torch_linear_gelu, F.linear
    yield *gelu, [draw(3001, 1600), draw(6400, 1600), draw(6400)]
    yield *gelu, [draw(tokens, WIDTH), draw(FF_WIDTH, WIDTH), draw(FF_WIDTH)]
    gradients = weight_and_bias_gradient, torch_weight_and_bias_gradient, lambda dy, x: dy.T @ x
    for out, width in ((3 * WIDTH, WIDTH), (WIDTH, FF_WIDTH)):
        yield "bias gradient", *gradients, [draw(tokens, out), draw(tokens, width)]
    inputs = [draw(tokens, WIDTH), draw(WIDTH, FF_WIDTH), draw(tokens, FF_WIDTH)]
    yield "GELU gradient", dgelu, torch_dgelu, matmul, inputs
    yield "GELU and bias gradients", dgelu_bgrad, torch_dgelu_bgrad, matmul, inputs


def measure_case(row: dict[str, Any], case: tuple[Any, ...], repeats: int) -> None:
    """Add the errors and milliseconds of a case to a row, as far as they can be measured."""
    _, ours, plain, matmul, inputs = case
    exact = plain(*(t.double() for t in inputs))
    row["torch errors"] = [error(y, z) for y, z in zip(plain(*inputs), exact, strict=True)]
    row["matmul alone ms"] = median_ms(partial(matmul, *inputs), repeats)
    row["torch ms"] = median_ms(partial(plain, *inputs), repeats)
    row["errors"] = [error(y, z) for y, z in zip(ours(*inputs), exact, strict=True)]
    row["ms"] = median_ms(partial(ours, *inputs), repeats)
    row["ms with a workspace"] = []
    for number in range(ALGORITHMS):
        with use_algorithm(number):
            row["ms with a workspace"].append(median_ms(partial(ours, *inputs), repeats))


def measure_block(row: dict[str, Any], seqs: int, repeats: int) -> None:
    """Add the milliseconds of a compiled block's forward and backward, and largest difference."""
    config = replace(PRESETS["gpt2-124m"], n_layer=1)
    block = GPT(config).blocks[0].to("cuda", torch.bfloat16)
    x = draw(seqs, config.seq_len, config.d_model).requires_grad_()
    ids = torch.zeros(seqs, config.seq_len, dtype=torch.int64, device="cuda")
    dy = torch.randn_like(x)
    compiled = torch.compile(block, dynamic=False)

    def step() -> Tensors:
        y = add_term(*compiled(x, ids, None, None, None))
        return torch.autograd.grad(y, [x, *block.parameters()], dy)

    exact = step()
    row["torch ms"] = median_ms(step, repeats)
    set_block_kernels(block, cublaslt.KERNELS)
    row["difference"] = max(map(error, step(), exact))
    row["ms"] = median_ms(step, repeats)
    with use_algorithm(0):
        row["ms with a workspace"] = median_ms(step, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seqs", type=int, default=64, help="sequences of 1,024 (default 64)")
    parser.add_argument("--repeats", type=int, default=20, help="timed calls (default 20)")
    options = parser.parse_args()
    torch.manual_seed(0)
    rows: dict[str, Any] = {}

    def attempt(name: str, measure: Callable[..., None], *arguments: Any) -> None:
        rows[name] = {}
        try:
            measure(rows[name], *arguments, options.repeats)
        except Exception as failure:
            rows[name]["failed"] = repr(failure)[:300]
        print(name, rows[name], flush=True)

    attempt("block", measure_block, options.seqs)
    with torch.no_grad():
        for case in list_cases(1024 * options.seqs):
            shapes = " x ".join(str(tuple(t.shape)) for t in case[-1])
            attempt(f"{case[0]} {shapes}", measure_case, case)
    print(json.dumps({"device": torch.cuda.get_device_name(), **rows}))


if __name__ == "__main__":
    main()
