"""Triton kernels compile for GPUs that this machine does not have, as fast as they should be.

The interpreter, in which tests/model/test_fused.py runs them, accepts kernels that do not compile.
"""

import json
import os
import subprocess
import sys

import pytest

from megatoken.model.kernels.fused_loss import HAS_TRITON, LOAD_BYTES


@pytest.mark.long
@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_kernels_compile_without_spills_barriers_or_narrow_loads():
    command = [sys.executable, "-W", "ignore", "-m", "tests.model.compile_kernels"]
    env = os.environ | {"TRITON_INTERPRET": "0"}
    output = subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout
    rows = [json.loads(line) for line in output.splitlines()]
    assert len(rows) == 18 + 4
    for row in rows:
        assert row["registers"] <= 64, row  # a block of 32 warps per multiprocessor
        assert (row["spilled_bytes"], row["barriers"]) == (0, 0), row
        assert set(row["load_bits"]) == {8 * LOAD_BYTES}, row
        fp8_bits = [8 * LOAD_BYTES // 2] * 2 * row["fp8"]  # FP8 has half of bf16's bits
        assert row["store_bits"] == fp8_bits + [8 * LOAD_BYTES] * 2 * row["overwrite"], row
