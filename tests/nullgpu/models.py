"""Models of the null GPU's tests."""

from dataclasses import replace

from megatoken.config.model_config import ModelConfig


def shrink(config: ModelConfig, n_layer: int) -> ModelConfig:
    """Return the model with fewer layers, which are alike."""
    return replace(config, n_layer=n_layer)
