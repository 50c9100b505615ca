"""Plan the software ladder: the same model with one more optimization on each rung."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatoken.base.config.presets import PRESETS
from megatoken.base.config.schema import Config
from megatoken.base.published import CONTEXT, LADDER, PublishedRung
from megatoken.base.system.gpus import GPUS, Gpu
from megatoken.base.system.table import read_table
from megatoken.plan.estimate import plan_run
from megatoken.plan.speed import ARCHITECTURES

# Machine settings by rung; published rungs that are not listed change none.
SWITCHES = read_table(__file__)
LARGE_BATCH = 64  # sequences


def list_rungs(gpu: Gpu) -> list[PublishedRung]:
    """Return the rungs for a GPU: those published for it, our kernels, the large batch, 8 GPUs.

    A GPU with fewer than two published rungs gets those of the T4 if fp16 is its fastest precision,
    else those of the H100.
    """
    rungs = [rung for rung in LADDER if rung.device == gpu.name]
    if len(rungs) < 2:
        is_fp16 = ARCHITECTURES[gpu.architecture]["precision"] == "fp16"
        return list_rungs(GPUS["T4" if is_fp16 else "H100"])
    small = [rung for rung in rungs if rung.micro_batch < LARGE_BATCH]
    large = [rung for rung in LADDER if rung.micro_batch == LARGE_BATCH]
    return [*small, replace(small[-1], name="our fused kernels"), *large]


def plan_rungs(config: Config, gpu: Gpu, rungs: Sequence[PublishedRung]) -> list[dict[str, Any]]:
    """Plan rungs with their batches; each keeps the settings of the rungs before it.

    A rung is a step of the ladder: one more optimization. Those that change nothing on this GPU are
    left out, except published ones.
    """
    seq_len = config.model.seq_len
    is_published_model = config.model == PRESETS["gpt2-124m"]
    published = {
        rung.name: rung.rate for rung in LADDER if is_published_model and rung.device == gpu.name
    }
    rows: list[dict[str, Any]] = []
    for rung in rungs:
        machine = replace(config.machine, **SWITCHES.get(rung.name, {}))
        seqs = max(1, CONTEXT * rung.micro_batch // seq_len)
        budget = replace(config.budget, batch_tokens=seqs * rung.gpus * seq_len)
        config = replace(config, machine=machine, budget=budget)
        plan = plan_run(config, gpu, rung.gpus, tokens=1.0, modes=("none",))
        rate = plan.tokens_per_second
        if rows and rate == rows[-1]["tokens_per_second"] and rung.name not in published:
            continue
        row = {
            "name": rung.name,
            "tokens_per_second": rate,
            "step_seconds": plan.step.seconds,
            "mfu": plan.mfu,
            "memory_bytes": plan.memory.total_bytes,
            "published": published.get(rung.name),
            "skipped": "" if plan.fits else "does not fit",
        }
        rows.append(row)
        row["speedup"] = rate / rows[0]["tokens_per_second"]
    return rows
