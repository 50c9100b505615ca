"""Compare the AMX kernels with those for AVX512-BF16 on the same values, in milliseconds.

Inputs are in bf16. Matmuls multiply integers of 6 bits: sums of 4,000 products are exact in fp32,
whatever their order, so the results must be equal. Attention rounds weights and results to bf16,
each by up to 2^-8, and the libraries round differently: weights depend on the maximum over a block
of keys, and their blocks differ in size. With two roundings in each library, results may differ by
2^-6.
"""

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from megatoken.model.native.library import DTYPES, Library, describe_matmul, views

TOLERANCE = {torch.float32: 0.0, torch.bfloat16: 2**-6}  # of errors, over the largest result
SIZES = (
    (67, 45, 97),
    (19, 33, 3100),
    (3, 45, 97),
)  # (M, N, K): odd sizes; a K of two chunks; few rows
H, K, S, D = 4, 2, 149, 40  # attention: heads in groups, more keys than a block has


def find_fault(amx: Library, avx512: Library) -> str:
    """Return why the AMX kernels cannot be used; "" if all of their results are right."""
    if not amx.call("request_tiles"):
        return "Linux does not grant its tiles"
    for (case, result), (_, expected) in zip(_results(amx), _results(avx512), strict=True):
        largest_error = (result - expected).abs().max()
        if not largest_error <= TOLERANCE[result.dtype] * expected.abs().max():  # NaN fails, too
            return f"it failed its self-test at {case}"
    return ""


def _results(library: Library) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the result of each case."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randint(-63, 64, shape, generator=generator).bfloat16()

    for (M, N, depth), transposed in product(SIZES, ("nothing", "A", "B", "A and B")):
        a = draw(depth, M).t() if "A" in transposed else draw(M, depth)
        b = draw(N, depth).t() if "B" in transposed else draw(depth, N)
        bias = draw(N)
        out = draw(M, N).float()  # added to, unless nothing is transposed
        sums = torch.empty(M)
        added = None if transposed == "nothing" else out
        library.call("matmul", describe_matmul(a, b, out, bias, added, sums))
        case = f"matmul {M} x {N} x {depth}, {transposed} transposed"
        yield case, out
        yield f"{case}: row sums", sums
    for case, T in ("causal attention", S), ("attention to all keys", 37):
        q, k, v = (draw(1, heads, rows, D) / 32 for heads, rows in ((H, T), (K, S), (K, S)))
        y = torch.empty_like(q)
        lse = torch.empty(H, T)
        arguments = *views(q, k, v, y), lse, 1, H, K, T, S, D, T == S
        library.call("attention_forward", DTYPES[q.dtype], *arguments)
        yield case, y
        if T == S:
            gradients = [torch.empty_like(x) for x in (q, k, v)]
            # The gradient of y is y.
            arguments = *views(q, k, v, y, y), lse, *views(*gradients), 1, H, K, T, D
            library.call("attention_backward", DTYPES[q.dtype], *arguments)
            for name, gradient in zip("qkv", gradients, strict=True):
                yield f"{case}: gradient of {name}", gradient
