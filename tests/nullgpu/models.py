"""Models and runs of the null GPU's tests."""

from dataclasses import replace

from megatoken.cli.main import main
from megatoken.config.model_config import ModelConfig
from megatoken.config.presets import PRESETS
from megatoken.errors import ExitCode


def shrink(preset: str, n_layer: int) -> ModelConfig:
    """Return the model with fewer layers, which are alike."""
    return replace(PRESETS[preset], n_layer=n_layer)


def train_and_extend(line: str) -> None:
    """Train a run, then one step more."""
    for more in ("", " --extend 1steps"):
        assert main(f"{line}{more}".split()) == ExitCode.DONE
