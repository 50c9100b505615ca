"""Models and runs of the null GPU's tests."""

from dataclasses import replace

from megatoken.base.config.model_config import ModelConfig
from megatoken.base.config.presets import PRESETS
from megatoken.base.errors import ExitCode
from megatoken.cli.main import main


def shrink(preset: str, n_layer: int) -> ModelConfig:
    """Return the model with fewer layers, which are alike."""
    return replace(PRESETS[preset], n_layer=n_layer)


def train_and_extend(line: str) -> None:
    """Train a run, then one step more."""
    for more in ("", " --extend 1steps"):
        assert main(f"{line}{more}".split()) == ExitCode.DONE
