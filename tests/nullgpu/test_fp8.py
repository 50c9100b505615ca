"""A training step with an FP8 output layer: the number of matmuls, and no waits of the host."""

import pytest

from tests.nullgpu import counters
from tests.nullgpu.models import shrink
from tests.nullgpu.test_step import build, take_step

MICRO_BATCHES = 2
CHUNKS = 2  # of the output layer in a micro-batch of 8,192 tokens


def count(fp8: str, mode: str) -> counters.Counts:
    """Return the calls of a step after a warm-up."""
    sizes = {"batch_seqs": 16, "micro_batch": 16 // MICRO_BATCHES, "loss_chunk": 8192 // CHUNKS}
    workload = build(shrink("gpt2-124m", 2), mode, fp8=fp8, **sizes)
    for _ in range(2):
        take_step(workload)
    return counters.count_step(lambda: take_step(workload))


@pytest.mark.parametrize("mode", ["off", "blocks", "on", "graphs"])
def test_matmuls(mode: str):
    plain, head = count("off", mode), count("head", mode)
    assert head.syncs == plain.syncs  # for the copy of the batch
    matmuls = [each.find("[cublasLtMatmul]") for each in (plain, head)]
    assert matmuls[1] - matmuls[0] == MICRO_BATCHES * CHUNKS * 2  # logits and hidden gradients
