"""megatoken pre-trains GPT-2, GPT-3 and LLaMA models from raw text.

The names below are the Python API (docs/python.md). Each is imported when it is first used, so that
`import megatoken` is fast and does not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from megatoken.base.config.load import load_config as load_config
    from megatoken.base.config.model_config import ModelConfig as ModelConfig
    from megatoken.base.config.schema import Config as Config
    from megatoken.base.errors import MegatokenError as MegatokenError
    from megatoken.base.rooms import register as register
    from megatoken.base.system.metrics_log import read_metrics as read_metrics
    from megatoken.convert.export import export as export
    from megatoken.data.dataloader import DataLoader as DataLoader
    from megatoken.data.dataset import load_dataset as load_dataset
    from megatoken.inference.evaluate import evaluate as evaluate
    from megatoken.inference.generate import generate as generate
    from megatoken.model.gpt import GPT as GPT
    from megatoken.optim.optimizer import build_optimizer as build_optimizer
    from megatoken.text.load_pretrained import load_pretrained as load_run  # noqa: F401
    from megatoken.text.prepare import prepare as prepare
    from megatoken.train.train import Trainer as Trainer

_MODULES = {
    "load_config": "base.config.load",
    "ModelConfig": "base.config.model_config",
    "Config": "base.config.schema",
    "register": "base.rooms",
    "export": "convert.export",
    "load_run": "text.load_pretrained",
    "DataLoader": "data.dataloader",
    "load_dataset": "data.dataset",
    "prepare": "text.prepare",
    "MegatokenError": "base.errors",
    "evaluate": "inference.evaluate",
    "GPT": "model.gpt",
    "build_optimizer": "optim.optimizer",
    "Trainer": "train.train",
    "generate": "inference.generate",
    "read_metrics": "base.system.metrics_log",
}
__all__ = [*_MODULES, "__version__"]


def __getattr__(name: str) -> Any:
    """Import the module of a public name, and return the name's value."""
    if name not in _MODULES:
        raise AttributeError(f"module 'megatoken' has no attribute {name!r}")
    module = import_module(f"megatoken.{_MODULES[name]}")
    value = globals()[name] = getattr(module, "load_pretrained" if name == "load_run" else name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
