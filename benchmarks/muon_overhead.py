"""Measure how much longer Muon's update takes than AdamW's in a step of 64K tokens.

    python -m benchmarks.muon_overhead

GPT-2 124M with a run's kernels on one thread, in CPU seconds. Each round times forward and
backward of one micro-batch of 1,024 tokens, AdamW's update and Muon's update with clipping. A step
is 64 micro-batches and one update. Prints one JSON line: median seconds, and by round the share by
which Muon's step is longer.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from megatoken.base.config.presets import PRESETS
from megatoken.base.config.schema import MachineConfig, OptimConfig
from megatoken.data.dataloader import Batch
from megatoken.optim.muon import WholeMatrices, list_hidden_matrices
from megatoken.optim.optimizer import build_optimizer
from megatoken.plan.speed import count_optimizer_flops
from megatoken.study.bench.workload import build_workload, draw_ids
from megatoken.train.step import clip_and_update, forward_backward

STEP_TOKENS = 65536


def seconds_of(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    model_config = PRESETS["gpt2-124m"]
    workload = build_workload(
        model_config, MachineConfig(device="cpu", threads=1), batch_seqs=1, micro_batch=1
    )
    adamw, device, step_config = workload.state, workload.device, workload.step_config
    dtype = torch.bfloat16 if device.precision == "bf16" else torch.float32
    matrices = WholeMatrices(list_hidden_matrices(adamw.model), dtype)
    optimizer = build_optimizer(adamw.model, OptimConfig(name="muon"), matrices=matrices)
    muon = replace(adamw, optimizer=optimizer)
    rounds: list[tuple[float, float, float]] = []
    for number in range(options.rounds + 1):
        ids = draw_ids(1, model_config.seq_len + 1, model_config.vocab_size, seed=number)
        inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        step_config = replace(step_config, batch_tokens=model_config.seq_len)
        micro = seconds_of(
            lambda: forward_backward(adamw, step_config, device, Batch(inputs, targets))  # noqa: B023
        )
        gradients = {
            param: param.grad.clone()
            for param in adamw.model.parameters()
            if param.grad is not None
        }
        seconds = []
        for state in (adamw, muon):
            for param, gradient in gradients.items():
                param.grad = gradient.clone()
            norm = state.sharded.global_grad_norm(state.comm)
            loss = torch.ones(())
            seconds.append(seconds_of(lambda: clip_and_update(state, step_config, loss, norm)))  # noqa: B023
        adamw.optimizer.zero_grad(set_to_none=True)
        adamw.refresh_low_precision_copy()
        if number:  # the first one warms up
            rounds.append((micro, *seconds))
    micro_steps = STEP_TOKENS // model_config.seq_len
    shares = [(other - own) / (micro_steps * micro + own) for micro, own, other in rounds]
    names = ("micro_batch", "adamw", "muon")
    medians = {
        name: round(statistics.median(row[i] for row in rounds), 4) for i, name in enumerate(names)
    }
    result = {
        "soak": "muon-overhead",
        "precision": device.precision,
        "threads": torch.get_num_threads(),
        "step_tokens": STEP_TOKENS,
        "muon_flops": count_optimizer_flops("muon", model_config),
        "seconds": medians,
        "share": round(statistics.median(shares), 4),
        "shares": [round(share, 4) for share in shares],
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
