"""On every NVIDIA GPU of the planner: the micro-batch that is tuned trains, in the planned memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatoken.base.config.presets import PRESETS
from megatoken.base.errors import ExitCode
from megatoken.base.system.gpus import GPUS, Gpu
from megatoken.cli.main import main
from megatoken.distributed.memory import estimate_memory
from megatoken.distributed.parallel_dims import ParallelDims
from tests.tables import read_table
from tests.tiny_run import TEXT, write_shards

CAPABILITIES = read_table("""
pascal 60
volta 70
turing 75
ampere 80
ampere-graphics 86
ada 89
hopper 90
blackwell 100
""")
PRESET = "gpt2-124m"
BATCH_SEQS = 1024
BF16 = "machine.master_weights=on machine.fused=on"  # which real cards choose
# Cards of one size and architecture compute alike.
CARDS = {(gpu.memory_bytes, gpu.architecture): gpu for gpu in GPUS.values()}
TESTED = [gpu for gpu in CARDS.values() if gpu.architecture in CAPABILITIES]


@pytest.mark.parametrize("gpu", TESTED, ids=lambda gpu: gpu.name)
def test_the_tuned_micro_batch_trains_in_the_planned_memory(gpu: Gpu, tmp_path: Path):
    card = {
        "NULLGPU_NAME": gpu.driver,
        "NULLGPU_BYTES": str(gpu.memory_bytes),
        "NULLGPU_CAPABILITY": CAPABILITIES[gpu.architecture],
        "NULLGPU_MULTIPROCESSORS": str(gpu.multiprocessors),
    }
    command = [sys.executable, "-m", "tests.nullgpu.test_cards", tmp_path]
    subprocess.run(command, env=os.environ | card, check=True)
    files = (tmp_path / "run" / f"{name}.json" for name in ("machine", "provenance"))
    machine, provenance = (json.loads(file.read_text()) for file in files)
    micro_batch = machine["micro_batch"]
    planned = estimate_memory(
        PRESETS[PRESET],
        ParallelDims(),
        precision=provenance["precision"],
        micro_batch=micro_batch,
        accumulates=micro_batch < BATCH_SEQS,
        uses_master_weights=machine["forms"]["kernels"]["mixed"] == "masters",
    )
    peak = int((tmp_path / "peak").read_text())
    assert peak == pytest.approx(planned.total_bytes, rel=0.05)
    assert peak > 0.4 * gpu.memory_bytes  # twice the micro-batch would not fit


def train(folder: Path) -> None:
    """Train two steps on this process's card, and write the peak of the allocated bytes."""
    data = write_shards(folder / "data", train=TEXT * 60_000)
    bf16 = BF16 if torch.cuda.get_device_capability() >= (8, 0) else ""
    batch_tokens = BATCH_SEQS * PRESETS[PRESET].seq_len
    line = f"train {PRESET} {data} {bf16} data.tokenizer=bytes machine.device=cuda"
    line += f" machine.compile=off budget.steps=2 budget.batch_tokens={batch_tokens}"
    line += f" evaluate.tasks= sample.every=0 log.plots=false --out {folder}/run"
    assert main(line.split()) == ExitCode.DONE
    (folder / "peak").write_text(str(torch.cuda.max_memory_allocated()))


if __name__ == "__main__":
    train(Path(sys.argv[1]))
