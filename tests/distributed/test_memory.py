"""The memory formula against the dry run: the real step on fake tensors."""

from dataclasses import replace

import pytest

from megatoken.config.presets import PRESETS
from megatoken.config.schema import MachineConfig, build_config
from megatoken.distributed.env import DistEnv
from megatoken.distributed.memory import (
    USABLE,
    Memory,
    choose_dims,
    estimate_memory,
    holds_low_precision,
)
from megatoken.distributed.parallel_dims import build_dims
from megatoken.measure.dry_run import dry_run
from megatoken.system.gpus import GPUS

# Preset, layers, context. Each part of the formula is the largest one somewhere.
GPT2 = ("gpt2-124m", 3, 1024)
MODELS = [GPT2, ("llama-110m", 4, 1024), ("modern-124m", 3, 1024)]
# Micro-batch, sharding, activation checkpointing, precision, micro-batches of a step.
ROWS = [
    (1, "none", "none", "bf16", 2),
    (16, "none", "gelu", "bf16", 1),
    (4, "none", "block", "fp32", 2),
    (16, "zero3", "none", "fp32", 2),
]
SHARDED = [  # of one model, because sharding divides its sums
    (16, "zero1", "none", "bf16", 2),
    (1, "zero1", "block", "fp32", 2),
    (4, "zero2", "gelu", "bf16", 1),
    (4, "zero3", "block", "bf16", 1),
]
CASES = [(*row, *model) for model in MODELS for row in ROWS] + [(*row, *GPT2) for row in SHARDED]


def predict(values: dict[str, object], gpus: int) -> tuple[Memory, float]:
    """Return what the formula says of a preset with settings, and the bytes of the dry run."""
    config = build_config({"budget.steps": 1, **values})
    machine, precision = config.machine, config.machine.precision
    assert isinstance(machine.micro_batch, int)
    model = config.model.resolve(PRESETS[config.model.preset].vocab_size)
    rows = config.budget.batch_tokens // config.model.seq_len * machine.tensor_parallel // gpus
    dims = build_dims(
        machine.sharding, machine.tensor_parallel, DistEnv(world_size=gpus, local_world_size=gpus)
    )
    memory = estimate_memory(
        model,
        dims,
        precision=precision,
        micro_batch=machine.micro_batch,
        accumulates=rows > machine.micro_batch,
        checkpointing=machine.activation_checkpointing,
        optimizer=config.optim.name,
        masters=holds_low_precision(machine, dims, precision),
    )
    return memory, dry_run(config, model, gpus).total_bytes


def check_layout(
    micro_batch: int, sharding: str, checkpointing: str, precision: str, micro_steps: int,
    preset: str, n_layer: int, seq_len: int, others: dict[str, object],
) -> None:  # fmt: skip
    """Check that the formula agrees with the dry run to 10 percent. others: more settings."""
    gpus = 1 if sharding == "none" else 8
    values = {
        "model.preset": preset,
        "model.n_layer": n_layer,
        "model.seq_len": seq_len,
        "budget.batch_tokens": micro_batch * micro_steps * gpus * seq_len,
        "machine.precision": precision,
        "machine.micro_batch": micro_batch,
        "machine.sharding": sharding,
        "machine.activation_checkpointing": checkpointing,
        **others,
    }
    memory, measured = predict(values, gpus)
    assert memory.total_bytes == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(
    ("micro_batch", "sharding", "checkpointing", "precision", "micro_steps", "preset", "n_layer", "seq_len"),
    CASES,
)  # fmt: skip
def test_the_formula_agrees_with_the_dry_run_to_10_percent(
    micro_batch: int, sharding: str, checkpointing: str, precision: str, micro_steps: int,
    preset: str, n_layer: int, seq_len: int,
):  # fmt: skip
    check_layout(
        micro_batch, sharding, checkpointing, precision, micro_steps, preset, n_layer, seq_len, {}
    )


@pytest.mark.parametrize("sharding", ["none", "zero3"])
def test_the_formula_counts_the_state_of_muon(sharding: str):
    gpus = 1 if sharding == "none" else 8
    values = {
        "model.preset": "gpt2-124m",
        "model.n_layer": 3,
        "model.seq_len": 1024,
        "machine.sharding": sharding,
        "budget.batch_tokens": 2 * gpus * 1024,
        "machine.precision": "bf16",
        "machine.micro_batch": 1,
    }
    muon, measured = predict({**values, "optim.name": "muon"}, gpus)
    adamw, _ = predict(values, gpus)
    hidden = 3 * 12 * 768 * 768
    assert adamw.moments - muon.moments == pytest.approx(4 * hidden / gpus, abs=1)
    assert muon.total_bytes == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(
    ("micro_batch", "sharding", "checkpointing", "precision", "preset", "n_layer"),
    [
        (1, "none", "none", "bf16", "gpt2-124m", 3),
        (8, "none", "none", "bf16", "llama-110m", 4),
        (4, "none", "block", "fp32", "gpt2-124m", 3),
        (4, "zero1", "none", "bf16", "llama-110m", 4),
        (4, "zero3", "none", "fp32", "gpt2-124m", 3),
    ],
)
def test_the_formula_counts_lora(
    micro_batch: int, sharding: str, checkpointing: str, precision: str, preset: str, n_layer: int
):
    others = {"model.lora_rank": 16, "optim.name": "muon"}
    check_layout(micro_batch, sharding, checkpointing, precision, 2, preset, n_layer, 1024, others)


def choose(gpus: int, **machine: object) -> str:
    """Sharding that is chosen for GPT-2 1558M on H100s."""
    config = build_config({f"machine.{key}": value for key, value in machine.items()})
    dist_env = DistEnv(world_size=gpus, local_world_size=gpus)
    memory_bytes = GPUS["H100"].memory_bytes
    return choose_dims(
        config.machine, PRESETS["gpt2-1558m"], "bf16", memory_bytes, dist_env
    ).sharding


def test_the_simplest_sharding_with_which_the_micro_batch_fits():
    assert choose(8) == choose(8, micro_batch=8) == "none"
    assert choose(8, micro_batch=18) == "zero1"
    assert choose(8, micro_batch=64) == "zero3"  # fits in none
    assert choose(8, micro_batch=64, activation_checkpointing="block") == "none"


def test_published_runs_fit():
    """GPT-2 1558M with 16 x 1,024 on one H100, 124M with 64 x 1,024 and 1.3B on A100s of 40 GB."""
    for preset, gpu, gpus, machine in (
        ("gpt2-1558m", "H100", 1, MachineConfig(micro_batch=16)),
        ("gpt2-124m", "A100-40GB", 8, MachineConfig(micro_batch=64, sharding="zero1")),
        (
            "gpt3-1.3b",
            "A100-40GB",
            8,
            MachineConfig(micro_batch=4, activation_checkpointing="block"),
        ),
    ):
        memory_bytes = GPUS[gpu].memory_bytes
        dist_env = DistEnv(world_size=gpus, local_world_size=gpus)
        dims = choose_dims(machine, PRESETS[preset], "bf16", memory_bytes, dist_env)
        assert isinstance(machine.micro_batch, int)
        memory = estimate_memory(
            PRESETS[preset],
            dims,
            precision="bf16",
            micro_batch=machine.micro_batch,
            accumulates=True,
            checkpointing=machine.activation_checkpointing,
        )
        assert memory.total_bytes <= USABLE * memory_bytes
        assert dims == replace(
            dims, sharding=machine.sharding if machine.sharding != "auto" else "none"
        )


@pytest.mark.parametrize(
    ("preset", "tp", "sharding", "checkpointing"),
    [
        ("gpt2-124m", 2, "none", "none"),
        ("gpt2-124m", 4, "zero1", "none"),
        ("llama-110m", 4, "none", "block"),
        ("llama-110m", 2, "zero3", "none"),
    ],
)
def test_the_formula_counts_tensor_parallel(
    preset: str, tp: int, sharding: str, checkpointing: str
):
    gpus = tp if sharding == "none" else 4 * tp
    values = {
        "model.preset": preset,
        "model.n_layer": 4,
        "model.seq_len": 1024,
        "budget.batch_tokens": 16 * gpus // tp * 1024,
        "machine.precision": "bf16",
        "machine.micro_batch": 8,
        "machine.sharding": sharding,
        "machine.activation_checkpointing": checkpointing,
        "machine.tensor_parallel": tp,
    }
    memory, measured = predict(values, gpus)
    assert memory.total_bytes == pytest.approx(measured, rel=0.1)
