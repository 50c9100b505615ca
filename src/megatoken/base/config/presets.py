"""Published architectures by name, from a table (presets.toml)."""

import tomllib
from pathlib import Path

from megatoken.base.config.model_config import ModelConfig
from megatoken.base.suggest import suggest

GPT2_VOCABULARY = 50257
# Names on the Hugging Face Hub.
PUBLISHED = {
    "gpt2": "gpt2-124m",
    "gpt2-medium": "gpt2-355m",
    "gpt2-large": "gpt2-774m",
    "gpt2-xl": "gpt2-1558m",
}
_FAMILIES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).values()
PRESETS = {
    name: ModelConfig(**{**family["settings"], **sizes})
    for family in _FAMILIES
    for name, sizes in family["models"].items()
}


def suggest_preset(name: str) -> str | None:
    """Return the preset that is closest to an unknown name, or None if none is close."""
    return PUBLISHED.get(name.lower()) or suggest(name, PRESETS)
