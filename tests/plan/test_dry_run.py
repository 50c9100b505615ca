"""Compare dry runs with arithmetic, with the same step on real tensors, and with a real process."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatoken.base.config.model_config import ModelConfig
from megatoken.base.config.schema import Config, build_config
from megatoken.base.system.atomic_write import read_object
from megatoken.base.system.gpus import GPUS
from megatoken.data.dataloader import Batch
from megatoken.model.flops import count_parameters
from megatoken.model.gpt import GPT
from megatoken.optim.costs import count_optimizer_bytes
from megatoken.plan.commands.dryrun import find_card
from megatoken.plan.dry_run import dry_run
from megatoken.plan.memory_tracker import MemoryTracker
from megatoken.train.state import build_state, build_step_config
from megatoken.train.step import train_step_async
from tests.conftest import Ask
from tests.tiny_model import CPU

RECORDS = Path(__file__).parents[2] / "records"
SMALL = ModelConfig(n_layer=3, n_head=2, d_model=64, d_ff=256, vocab_size=256, seq_len=32)


def small_run(**machine: object) -> Config:
    values = {"budget.steps": 1, "budget.batch_tokens": 16 * 32, "model.seq_len": 32}
    machine = {"device": "cpu", "precision": "fp32"} | machine
    config = build_config(values | {f"machine.{key}": value for key, value in machine.items()})
    return replace(config, model=SMALL)


@pytest.mark.parametrize("micro_batch", [1, 8, 16])
def test_one_process_needs_the_memory_of_a_real_step(micro_batch: int):
    config = small_run(micro_batch=micro_batch)
    estimate = dry_run(config, 1)
    parameters = count_parameters(SMALL)
    assert estimate.parameter_bytes == estimate.gradient_bytes == 4 * parameters
    tensors = len(list(GPT(SMALL).parameters()))
    assert estimate.optimizer_bytes == 8 * parameters + 4 * tensors  # a step count each
    assert estimate.communication_bytes_per_step == 0
    assert estimate.micro_steps == 16 // micro_batch
    with MemoryTracker() as tracker:
        state = build_state(GPT(SMALL), config, CPU)
        step_config = build_step_config(config, epoch_tokens=1 << 20, micro_batch=micro_batch)
        ids = torch.zeros(min(16, 3 * micro_batch), 32, dtype=torch.int64)
        tracker.reset_peak()
        train_step_async(state, step_config, CPU, Batch(ids, ids))
    assert estimate.total_bytes == tracker.peak_bytes
    if micro_batch < 16:
        state_bytes = estimate.parameter_bytes + estimate.gradient_bytes + estimate.optimizer_bytes
        assert estimate.total_bytes == state_bytes + estimate.activation_bytes


@pytest.mark.parametrize("arguments", ["fp16 fused none", "fp16 foreach zero3", "bf16 loop none"])
def test_steps_that_the_host_checks_are_estimated(arguments: str):
    precision, adamw, sharding = arguments.split()
    config = small_run(precision=precision, adamw=adamw, sharding=sharding, micro_batch=8)
    estimate = dry_run(config, 2)
    assert 2 <= estimate.optimizer_bytes / estimate.parameter_bytes < 2.01
    assert estimate.activation_bytes > 0


@pytest.mark.parametrize(
    ("sharding", "parts", "collective", "rounds"),
    [("none", 1, "allgather", 1), ("zero3", 4, "alltoall", 2 / 4)],
)
def test_muon_keeps_one_momentum_and_sends_matrices_in_low_precision(
    sharding: str, parts: int, collective: str, rounds: float
):
    config = small_run(precision="bf16", sharding=sharding, micro_batch=4)
    adamw = dry_run(config, 4)
    muon = dry_run(replace(config, optim=replace(config.optim, name="muon")), 4)
    whole, matrices = count_optimizer_bytes("muon", SMALL), 3 * 12 * 64 * 64
    assert whole == 8 * count_parameters(SMALL) - 4 * matrices  # one number less in these
    assert 0 <= muon.optimizer_bytes - whole / parts < 0.02 * whole
    more = muon.communication[collective] - adamw.communication.get(collective, 0)
    # bf16, to or from three of four processes.
    assert more == pytest.approx(rounds * 2 * matrices * 3 // 4, rel=0.2)


def count_175b(layers: int, tensor: int, shards: int) -> int:
    """Count the parameters of the first of `shards` x `tensor` processes: whole heads and columns,
    rows rounded up.
    """
    width, vocabulary, context = 12_288, 50_304, 2_048

    def rows(whole):
        return -(-whole // shards)

    def two_products(columns, back):
        """Count the weights and biases of a product to `columns`, and of the product back to the
        width.
        """
        first, last = rows(columns * width // tensor), rows(width)
        return (first + last * back // tensor) * width + first + last

    embeddings = (rows(vocabulary // tensor) + rows(context)) * width
    return (
        embeddings
        + layers * (two_products(3, 1) + two_products(4, 4) + 4 * rows(width))
        + 2 * rows(width)
    )


def test_gpt3_175b_on_1024_gpus_equals_theory(ask: Ask):
    """Two of its 96 layers; all of them take two minutes."""
    arguments = "--gpus 1024 --tp 8 --shard zero3 model.n_layer=2 machine.micro_batch=1"
    result, count = ask(f"dryrun gpt3-175b {arguments}"), count_175b(2, 8, 128)
    assert result["parameter_bytes"] == result["gradient_bytes"] == 4 * count
    assert 0 <= result["optimizer_bytes"] - 8 * count < 1000  # step counts
    assert (result["readers"], result["shard"], result["tensor_parallel"]) == (128, "zero3", 8)
    assert result["micro_steps"] == 12  # of the recipe's batch, not of a preset's


def test_communication_of_each_sharding():
    """4 micro-batches on 4 processes, in fp32, so that weights are gathered as they are.

    DDP's reduction, once a step, sends twice as much as a gather or a scatter. ZeRO-3 gathers and
    scatters for every micro-batch, and gathers blocks twice."""
    whole = 4 * count_parameters(SMALL)
    blocks = whole - 4 * (SMALL.padded_vocab_size + SMALL.seq_len + 2) * SMALL.d_model
    once = whole * 3 / 4
    zero3 = {"allgather": 4 * (once + blocks * 3 / 4), "reducescatter": 4 * once}
    for sharding, kept, sent, tolerance in (
        ("none", whole, {"allreduce": 2 * once}, 0),
        ("zero1", whole / 4, {"allgather": once, "reducescatter": once}, 0.01),
        ("zero3", whole / 4, zero3, 0.01),
    ):
        estimate = dry_run(small_run(micro_batch=1, sharding=sharding), 4)
        assert estimate.micro_steps == 4
        assert estimate.parameter_bytes == pytest.approx(kept, rel=tolerance)
        found = {name: estimate.communication[name] for name in sent}
        assert found == pytest.approx(sent, rel=max(tolerance, 1e-3))


def test_gpt2_124m_needs_the_memory_of_an_h200(ask: Ask):
    settings = "machine.micro_batch=64 machine.loss_chunk=4096 budget.batch_tokens=65536"
    result = ask(f"dryrun gpt2-124m --gpu h200 {settings}")
    row, _ = read_object(RECORDS / "gpu-adamw-124m.json")["answer"]["rows"]
    assert result["total_bytes"] == pytest.approx(row["peak_memory_bytes"], rel=0.01)


@pytest.mark.long
@pytest.mark.parametrize(
    "arguments",
    [
        "gpt2-124m --gpus 1 --gpu T4 model.n_layer=2",
        "gpt2-124m --gpus 1 --gpu P100 model.n_layer=2",
        "modern-124m --gpus 8 --gpu A100-40GB model.n_layer=2",
        "llama-110m --gpus 8 --gpu RTX-3090 model.n_layer=2",
        "gpt3-1.3b --gpus 8 --gpu A100-40GB model.n_layer=2",
        "gpt3-13b --gpus 128 --gpu A100-40GB model.n_layer=2 machine.sharding=zero3 "
        "machine.activation_checkpointing=block",
        "gpt3-13b --gpus 64 --gpu L4 model.n_layer=4 machine.tensor_parallel=8",
    ],
)
def test_the_planned_layout_is_traced_and_fits(arguments: str, ask: Ask):
    name, _, count, _, gpu, *settings = arguments.split()
    planned = ask(f"plan {name} --gpus {count}x{gpu} {' '.join(settings)}")
    traced = ask(f"dryrun {arguments}")
    assert (planned["fits"], traced["fits"]) == (True, True)
    assert traced["total_bytes"] == pytest.approx(planned["memory_bytes"], rel=0.1)
    assert traced["shard"] == planned["sharding"]
    keys = ("micro_batch", "micro_steps", "tensor_parallel", "precision")
    assert {key: traced[key] for key in keys} == {key: planned[key] for key in keys}


def test_a_gpu_is_a_name_or_its_memory():
    assert find_card("96GB").memory_bytes == 96e9
    assert find_card("4090") == GPUS["RTX-4090"]
