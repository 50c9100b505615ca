"""The memory formula against the dry run: the real step on fake tensors."""

from dataclasses import replace

import pytest

from megatoken.base.config.fields import parse_value
from megatoken.base.config.presets import PRESETS
from megatoken.base.config.schema import FIELDS, MachineConfig, build_config
from megatoken.base.system.gpus import GPUS
from megatoken.distributed.env import DistEnv
from megatoken.distributed.memory import (
    choose_dims,
    count_state_bytes,
    estimate_memory,
    holds_low_precision,
)
from megatoken.distributed.parallel_dims import build_dims
from megatoken.model.flops import count_padded_parameters
from megatoken.plan.dry_run import dry_run

NODE = DistEnv(world_size=8, local_world_size=8)

# Preset, micro-batch, sharding, activation checkpointing, precision, micro-batches of a step, more
# settings. Each part of the formula is the largest one somewhere.
CASES = """\
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


@pytest.mark.parametrize("line", CASES.splitlines())
def test_the_formula_agrees_with_the_dry_run_to_10_percent(line: str):
    preset, micro_batch, sharding, checkpointing, precision, micro_steps, *others = line.split()
    settings = f"""model.preset={preset} model.n_layer=2 model.seq_len=1024 budget.steps=1
        machine.precision={precision} machine.micro_batch={micro_batch}
        machine.sharding={sharding} machine.activation_checkpointing={checkpointing}"""
    pairs = (setting.split("=") for setting in [*settings.split(), *others])
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
        uses_master_weights=holds_low_precision(config.machine, dims, precision),
    )
    assert memory.total_bytes == pytest.approx(
        dry_run(replace(config, model=model), gpus).total_bytes, rel=0.1
    )


# As figure 1 of ZeRO (arXiv 1910.02054), but with masters and gradients in fp32: weights, gathered
# copies, gradients and moments, in bytes of a parameter on each of eight ranks.
STATE = {
    "none": 4 + 0 + 4 + 8,
    "zero1": 4 / 8 + 2 + 4 + 8 / 8,
    "zero2": 4 / 8 + 2 + 4 / 8 + 8 / 8,
    "zero3": (4 + 0 + 4 + 8) / 8,
}


@pytest.mark.parametrize("sharding", STATE)
def test_bytes_of_a_parameter_are_those_of_zero(sharding: str):
    model = PRESETS["gpt2-124m"]
    found = count_state_bytes(build_dims(sharding, 1, NODE), model, "adamw", "bf16")
    assert found == pytest.approx(STATE[sharding] * count_padded_parameters(model), rel=1e-6)


def test_the_simplest_sharding_with_which_the_micro_batch_fits():
    """On eight H100s, GPT-2 1558M."""
    for sharding, machine in (
        ("none", MachineConfig()),
        ("none", MachineConfig(micro_batch=8)),
        ("zero1", MachineConfig(micro_batch=18)),
        ("zero3", MachineConfig(micro_batch=64)),  # fits in none
        ("none", MachineConfig(micro_batch=64, activation_checkpointing="block")),
    ):
        gpu = GPUS["H100"].memory_bytes
        dims = choose_dims(machine, PRESETS["gpt2-1558m"], "bf16", gpu, NODE)
        assert dims.sharding == sharding
