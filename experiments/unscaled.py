"""Run megatoken in fp16 without a loss scale, as the notebook behind `megatoken reproduce` did.

    python -m experiments.unscaled reproduce notebook-fp16 machine.precision=fp16

Gradients of logits below 6e-8 are then lost: in a batch of 4,096 tokens, most of them.
"""

import sys

import torch


class UnitScaler(torch.amp.GradScaler):
    """A GradScaler whose scale stays 1."""

    def __init__(self, device: str, enabled: bool = True) -> None:
        super().__init__(device, init_scale=1.0, growth_interval=1 << 30, enabled=enabled)


def main() -> int:
    torch.amp.GradScaler = UnitScaler  # type: ignore[misc]  # before it is used by a run
    from megatoken.cli.main import main as run_command

    return run_command()


if __name__ == "__main__":
    sys.exit(main())
