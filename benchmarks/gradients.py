"""Compare gradients on a device with gradients on a CPU in fp32, by preset and kernels.

    python -m benchmarks.gradients --device cuda --presets gpt2-124m,llama-110m

Two sequences through a model with its initial weights. Prints a JSON line after each configuration,
with all so far: the loss, the loss of the CPU, and the relative L2 error of the full gradient. Use
no preset with zero_init: its blocks start without gradients.
"""

import argparse
import json
from typing import Any

import torch
from torch import Tensor

from megatoken.base.config.presets import PRESETS
from megatoken.base.config.schema import MachineConfig
from megatoken.model.kernels.attention import CUDA_ONLY
from megatoken.study.bench.workload import build_workload, draw_batch
from megatoken.train.step import forward_backward

SEQS = 2
PLAIN: dict[str, Any] = {
    "gemm_backend": "torch",
    "attention": "flash",
    "fused": "off",
    "adamw": "fused",
    "precision": "fp32",
    "tf32": False,
    "compile": "off",
}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "fp32": PLAIN,
    "fp32 compiled": PLAIN | {"compile": "blocks"},
    "default": {"compile": "off"},
    "default compiled": {"compile": "blocks"},
    "default cudnn": {"compile": "blocks", "attention": "cudnn"},
    "autocast": {"compile": "blocks", "attention": "fa2", "master_weights": "off"},
}


def compute(preset: str, machine: MachineConfig) -> tuple[float, list[Tensor], str]:
    """Return the loss, the gradient of every parameter in fp32 on the CPU, and the kernels."""
    config = PRESETS[preset]
    torch.compiler.reset()
    workload = build_workload(config, machine, batch_seqs=SEQS, micro_batch=SEQS)
    state = workload.state
    assert not workload.tuning.note, workload.tuning.note
    batch = draw_batch(config, SEQS, 0, workload.device)
    loss = forward_backward(state, workload.step_config, workload.device, batch)
    gradients = []
    for param, copy in zip(state.model.parameters(), state.compute.model.parameters(), strict=True):
        gradient = copy.grad if param.grad is None else param.grad
        assert gradient is not None
        gradients.append(gradient.float().cpu())
    return float(loss), gradients, str(workload.tuning.choice)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--presets", default="gpt2-124m,llama-110m", metavar="NAME,...")
    options = parser.parse_args()
    rows = []
    for preset in options.presets.split(","):
        cpu_loss, exact, _ = compute(preset, MachineConfig(device="cpu", **PLAIN))
        size = torch.nn.utils.get_total_norm(exact)
        for name, settings in CONFIGURATIONS.items():
            if options.device == "cpu" and settings.get("attention") in CUDA_ONLY:
                continue
            machine = MachineConfig(device=options.device, **settings)
            loss, gradients, kernels = compute(preset, machine)
            apart = [ours - theirs for ours, theirs in zip(gradients, exact, strict=True)]
            error = float(torch.nn.utils.get_total_norm(apart) / size)
            row = {"preset": preset, "configuration": name, "loss": loss, "cpu_loss": cpu_loss}
            rows.append(row | {"error": error, "kernels": kernels})
            print(json.dumps({"rows": rows}), flush=True)


if __name__ == "__main__":
    main()
