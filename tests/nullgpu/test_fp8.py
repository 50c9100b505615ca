"""A training step with FP8 matmuls: their number, no waits of the host, no recompilation."""

import pytest

from megatoken.plan.tuning.compilation import compile_forward
from tests.nullgpu import counters
from tests.nullgpu.models import shrink
from tests.nullgpu.test_step import build, take_step

LAYERS = 2
MICRO_BATCHES = 2
CHUNKS = 2  # of the output layer in a micro-batch of 8,192 tokens


def count(preset: str, fp8: str, mode: str, checkpointing: str = "none") -> counters.Counts:
    """Return the calls of a step after a warm-up."""
    workload = build(
        shrink(preset, LAYERS),
        "off",
        batch_seqs=16,
        micro_batch=16 // MICRO_BATCHES,
        activation_checkpointing=checkpointing,
        fp8=fp8,
    )
    if mode != "off":
        assert compile_forward(workload.state, workload.step_config, workload.device, mode) == ""
    for _ in range(2):
        take_step(workload)
    return counters.count_step(lambda: take_step(workload))


def count_matmuls(counts: counters.Counts) -> int:
    return counts.find("[cublasLtMatmul]")


@pytest.mark.parametrize("mode", ["off", "blocks"])
@pytest.mark.parametrize(("preset", "linears"), [("gpt2-124m", 2), ("llama-110m", 3)])
def test_matmuls(preset: str, linears: int, mode: str):
    counts = {fp8: count(preset, fp8, mode) for fp8 in ("off", "head", "all")}
    waits = {each.syncs for each in counts.values()}  # for the copy of the batch
    assert len(waits) == 1
    others = count_matmuls(counts["off"])  # cuBLASLt also adds biases
    head = count_matmuls(counts["head"]) - others
    mlp = count_matmuls(counts["all"]) - others - head
    assert head == MICRO_BATCHES * CHUNKS * 2  # logits and hidden gradients
    biased = linears * LAYERS * MICRO_BATCHES if others else 0  # now added outside the matmul
    assert mlp + biased == MICRO_BATCHES * LAYERS * linears * 3  # forward and two gradients
    reductions = ("triton triton_red_", "triton triton_per_")
    for name in counts["all"].calls:  # a reduction that stores a transpose would be slow
        assert not (name.startswith(reductions) and "_scaled_mm_" in name)


@pytest.mark.parametrize(
    ("mode", "checkpointing"),
    [("blocks", "gelu"), ("blocks", "block"), ("on", "none"), ("graphs", "none")],
)
def test_compiles_in_every_mode(mode: str, checkpointing: str):
    assert count_matmuls(count("gpt2-124m", "all", mode, checkpointing)) > 0
