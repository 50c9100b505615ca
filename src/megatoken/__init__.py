"""megatoken pre-trains GPT-2, GPT-3 and LLaMA models from raw text.

The names below are the Python API (docs/python.md). Each is imported when it is first used, so that
`import megatoken` is fast and does not load torch.

LAYERS lists the packages from the lowest layer up. A package may import only itself and earlier
ones, which tests/test_architecture.py enforces.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from megatoken.config.load import load_config as load_config
    from megatoken.config.model_config import ModelConfig as ModelConfig
    from megatoken.config.schema import Config as Config
    from megatoken.convert.export import export as export
    from megatoken.convert.load_pretrained import load_pretrained as load_run  # noqa: F401
    from megatoken.data.dataloader import DataLoader as DataLoader
    from megatoken.data.dataset import load_dataset as load_dataset
    from megatoken.data.prepare import prepare as prepare
    from megatoken.errors import MegatokenError as MegatokenError
    from megatoken.eval.evaluate import evaluate as evaluate
    from megatoken.model.gpt import GPT as GPT
    from megatoken.model.kernels import register_attention as register_attention
    from megatoken.optim.optimizer import build_optimizer as build_optimizer
    from megatoken.optim.optimizer import register_optimizer as register_optimizer
    from megatoken.sampling.generate import generate as generate
    from megatoken.system.metrics_log import read_metrics as read_metrics
    from megatoken.train.train import Trainer as Trainer

_MODULES = {
    "load_config": "config.load",
    "ModelConfig": "config.model_config",
    "Config": "config.schema",
    "export": "convert.export",
    "load_run": "convert.load_pretrained",
    "DataLoader": "data.dataloader",
    "load_dataset": "data.dataset",
    "prepare": "data.prepare",
    "MegatokenError": "errors",
    "evaluate": "eval.evaluate",
    "GPT": "model.gpt",
    "register_attention": "model.kernels",
    "build_optimizer": "optim.optimizer",
    "register_optimizer": "optim.optimizer",
    "Trainer": "train.train",
    "generate": "sampling.generate",
    "read_metrics": "system.metrics_log",
}
__all__ = [*_MODULES, "LAYERS", "__version__"]


def __getattr__(name: str) -> Any:
    """Import the module of a public name, and return the name's value."""
    if name not in _MODULES:
        raise AttributeError(f"module 'megatoken' has no attribute {name!r}")
    module = import_module(f"megatoken.{_MODULES[name]}")
    value = globals()[name] = getattr(module, "load_pretrained" if name == "load_run" else name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


LAYERS = (
    "redact",  # secrets are hidden in text that leaves the program
    "errors",  # one kind of error, with its exit code
    "console",  # terminal output
    "suggest",  # valid names for misspelled ones
    "config",  # every setting of a run, presets, recipes
    "system",  # the machine: environment, device, peak FLOP/s, timing
    "published",  # losses, speeds and scores of other people's runs
    "native",  # the step's kernels for CPUs, in C++
    "data",  # sources -> tokenizer -> prepare -> shards -> dataset -> dataloader
    "model",  # GPT, loss, kernels, FLOP counts
    "optim",  # optimizers, learning-rate schedules
    "distributed",  # process group, parallel dims, sharded parameters, gradient reduction
    "launch",  # processes on one machine; scripts for many
    "checkpoint",  # commit protocol, save, load, merge
    "convert",  # Hugging Face, llm.c, nanoGPT: weights and recipes
    "sampling",  # key/value cache, generation
    "serving",  # a model behind HTTP
    "eval",  # validation loss, multiple-choice tasks
    "objectives",  # preferences, sampled answers and their rewards: losses and batches
    "plots",  # curves and weight pictures
    "estimate",  # time, cost, memory and traffic of a run before it starts
    "train",  # train.py: read it first; state, step, tuning, logs, recovery
    "measure",  # dry run, calibration on this machine
    "bench",  # every speed, measured on this machine
    "cli",  # the `megatoken` command
)
