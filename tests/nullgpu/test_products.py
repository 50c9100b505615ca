"""Matrix products go to the BLAS library that was asked for, one call each."""

import pytest
import torch

from benchmarks.products import build_products, call_library, list_layers
from megatoken.base.config.presets import PRESETS
from megatoken.base.config.schema import MachineConfig
from megatoken.base.system.device import open_device
from tests.nullgpu import counters

CALLS = {"cublas": "[cublasGemmEx]", "cublaslt": "[cublasLtMatmul]"}


@pytest.mark.parametrize("library", CALLS)
def test_products_of_a_step(library: str):
    device = open_device(MachineConfig(device="cuda"))
    for layer in list_layers(PRESETS["gpt2-124m"], 512, [256]):
        for name, call in build_products(layer, device).items():
            counters.reset()
            call_library(library, call)
            # torch adds biases in cuBLASLt's epilogue.
            has_bias = layer.has_bias and name == "forward"
            expected = CALLS["cublaslt" if has_bias else library]
            assert counters.read().calls == {expected: 1}
    torch.backends.cuda.preferred_blas_library("cublas")
