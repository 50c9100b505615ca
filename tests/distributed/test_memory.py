"""The memory formula against the dry run: the real step on fake tensors."""

import pytest

from megatoken.config.fields import parse_value
from megatoken.config.presets import PRESETS
from megatoken.config.schema import FIELDS, MachineConfig, build_config
from megatoken.distributed.env import DistEnv
from megatoken.distributed.memory import USABLE, choose_dims, estimate_memory, holds_low_precision
from megatoken.distributed.parallel_dims import build_dims
from megatoken.measure.dry_run import dry_run
from megatoken.system.gpus import GPUS

# Preset, micro-batch, sharding, activation checkpointing, precision, micro-batches of a step, more
# settings. Each part of the formula is the largest one somewhere.
CASES = """
gpt2-124m 1 none none bf16 2
gpt2-124m 16 none gelu bf16 1
gpt2-124m 4 zero2 gelu bf16 1
gpt2-124m 4 zero3 block bf16 1
gpt2-124m 16 zero3 none fp32 2
llama-110m 4 none block fp32 2
modern-124m 1 none none bf16 2
modern-124m 16 zero3 none fp32 2
gpt2-124m 1 zero3 none bf16 2 optim.name=muon
llama-110m 8 none none bf16 2 optim.name=muon model.lora_rank=16
llama-110m 4 zero1 none bf16 2 optim.name=muon model.lora_rank=16
gpt2-124m 4 zero3 none fp32 2 optim.name=muon model.lora_rank=16
gpt2-124m 8 zero1 none bf16 2 machine.tensor_parallel=4
llama-110m 8 none block bf16 2 machine.tensor_parallel=4
llama-110m 8 zero3 none bf16 2 machine.tensor_parallel=2
"""


@pytest.mark.parametrize("line", CASES.strip().splitlines())
def test_the_formula_agrees_with_the_dry_run_to_10_percent(line: str):
    preset, micro_batch, sharding, checkpointing, precision, micro_steps, *others = line.split()
    settings = [
        f"model.preset={preset}",
        "model.n_layer=2",
        "model.seq_len=1024",
        "budget.steps=1",
        f"machine.precision={precision}",
        f"machine.micro_batch={micro_batch}",
        f"machine.sharding={sharding}",
        f"machine.activation_checkpointing={checkpointing}",
    ]
    pairs = (setting.split("=") for setting in [*settings, *others])
    values = {key: parse_value(FIELDS[key], text) for key, text in pairs}
    tp = int(values.get("machine.tensor_parallel", 1))
    gpus = tp if sharding == "none" else max(8, 4 * tp)
    rows = int(micro_batch) * int(micro_steps)
    config = build_config({**values, "budget.batch_tokens": rows * gpus // tp * 1024})
    model = config.model.resolve(PRESETS[preset].vocab_size)
    dims = build_dims(sharding, tp, DistEnv(world_size=gpus, local_world_size=gpus))
    memory = estimate_memory(
        model,
        dims,
        precision=precision,
        micro_batch=int(micro_batch),
        accumulates=micro_steps != "1",
        checkpointing=checkpointing,
        optimizer=config.optim.name,
        masters=holds_low_precision(config.machine, dims, precision),
    )
    measured = dry_run(config, model, gpus).total_bytes
    assert memory.total_bytes == pytest.approx(measured, rel=0.1)


def test_the_simplest_sharding_with_which_the_micro_batch_fits():
    """On eight H100s, GPT-2 1558M."""
    for sharding, machine in (
        ("none", MachineConfig()),
        ("none", MachineConfig(micro_batch=8)),
        ("zero1", MachineConfig(micro_batch=18)),
        ("zero3", MachineConfig(micro_batch=64)),  # fits in none
        ("none", MachineConfig(micro_batch=64, activation_checkpointing="block")),
    ):
        dims = choose_dims(
            machine,
            PRESETS["gpt2-1558m"],
            "bf16",
            GPUS["H100"].memory_bytes,
            DistEnv(world_size=8, local_world_size=8),
        )
        assert dims.sharding == sharding


def test_published_runs_fit():
    """GPT-2 1558M with 16 x 1,024 on one H100, 124M with 64 x 1,024 and 1.3B on A100s of 40 GB."""
    for preset, gpu, gpus, micro_batch, sharding, checkpointing in (
        ("gpt2-1558m", "H100", 1, 16, "none", "none"),
        ("gpt2-124m", "A100-40GB", 8, 64, "zero1", "none"),
        ("gpt3-1.3b", "A100-40GB", 8, 4, "none", "block"),
    ):
        memory = estimate_memory(
            PRESETS[preset],
            build_dims(sharding, 1, DistEnv(world_size=gpus, local_world_size=gpus)),
            precision="bf16",
            micro_batch=micro_batch,
            accumulates=True,
            checkpointing=checkpointing,
        )
        assert memory.total_bytes <= USABLE * GPUS[gpu].memory_bytes
