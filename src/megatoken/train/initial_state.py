"""Build the model and optimizer of a run, unless the user passes them to `Trainer`.

restore.py then replaces their state if the run has a checkpoint.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megatoken.base.config.load import ResolvedConfig
from megatoken.base.config.model_config import EXTENSION_FIELDS, ModelConfig
from megatoken.base.config.validate import validate
from megatoken.base.errors import ConfigError, DataError
from megatoken.base.rooms import call_entries
from megatoken.data.mixture import load_mixture
from megatoken.model.gpt import GPT, init_weights
from megatoken.store.commit import list_steps
from megatoken.store.pretrained import load_weights, read_architecture
from megatoken.store.run_folder import CHECKPOINTS
from megatoken.train.objective import load_objective
from megatoken.train.run import RunPlan
from megatoken.train.state import TrainState, build_state


def build_train_state(
    plan: RunPlan, model: GPT | None, optimizer: torch.optim.Optimizer | None
) -> TrainState:
    """Build the run's model and optimizer on the device, or use those of the user.

    The weights of a built model are initialized from the seed or loaded from `model.init`, unless
    the run has a checkpoint, which will replace them.

    model: the user's model with its initial weights, or None to build one.
    optimizer: the user's optimizer, or None to build one.
    """
    config = plan.config
    if model is not None:
        check_user_model(model, optimizer, plan)
        return build_state(model, config, plan.device, plan.dims, optimizer, plan.comm)
    with torch.device("cpu" if plan.dims.is_unsharded else "meta"):
        model = GPT(plan.data.model_config, seed=None)
    state = build_state(model, config, plan.device, plan.dims, comm=plan.comm)
    if plan.comm.run_on_rank0(lambda: list_steps(plan.out / CHECKPOINTS)):
        return state
    has_init = bool(config.model.init)
    state.sharded.copy_from_full(init_weights(model, config.seed, added_only=has_init))
    if has_init:
        state.sharded.copy_from_full(_read_pretrained(plan))
    return state


def copy_architecture(resolved: ResolvedConfig, out: Path) -> ResolvedConfig:
    """Copy the architecture of `model.init` into the config, unless the config sets its own.

    A config may still set model.seq_len, and EXTENSION_FIELDS, which are not copied. Once the run
    in `out` has a checkpoint, the architecture is read from there, because `model.init` may no
    longer exist. Raises what `load_weights` raises.
    """
    model = resolved.config.model
    own_fields = {
        name
        for name in model.architecture()
        if resolved.origins.get(f"model.{name}", "default") != "default"
    }
    if not model.init or own_fields - {"seq_len", *EXTENSION_FIELDS}:
        return resolved
    source = read_architecture(out if list_steps(out / CHECKPOINTS) else model.init)
    sizes = {
        name: value
        for name, value in source.architecture().items()
        if name not in {*own_fields, *EXTENSION_FIELDS}
    }
    data = resolved.config.data
    objective = load_objective(resolved.config.objective.name)
    if objective.is_chat:  # the dataset's tokenizer may add control tokens
        dataset = load_mixture(data.path, external_tokenizer=data.tokenizer, cache=data.cache)
        sizes["vocab_size"] = max(sizes["vocab_size"], dataset.vocabulary.vocab_size)
    config = replace(resolved.config, model=replace(model, **sizes))
    for key, what, fix in validate(config):
        raise ConfigError(f"{key}: {what}", f"model.init {model.init}", fix)
    origins = resolved.origins | {f"model.{name}": "model.init" for name in sizes}
    return replace(resolved, config=config, origins=origins)


def check_user_model(model: GPT, optimizer: torch.optim.Optimizer | None, plan: RunPlan) -> None:
    """Raise ConfigError unless the user's model and optimizer fit the run.

    The run must be a single process, the model must have the config's architecture, and the
    optimizer must update exactly the model's parameters.
    """
    model_config = plan.data.model_config
    if plan.config.model.init:
        raise ConfigError("both a model and model.init are given", "model.init", "use one of them")
    if not plan.comm.is_single_process:
        fix = "use model.init with nproc"
        raise ConfigError("a model object cannot be split over processes", "model", fix)
    if type(model).loss is not GPT.loss:
        what = f"{type(model).__name__}.loss is not used in training"
        raise ConfigError(what, "model", "override forward, or change model/loss.py")
    differences = _list_differences(model.config, model_config)
    if model.config.dropout != model_config.dropout:
        differences.append(f"model.dropout={model.config.dropout}")
    if differences:
        fix = f"set {' '.join(differences)}"
        raise ConfigError("the model differs from config.model", "model", fix)
    if optimizer is not None:
        updated = {id(param) for group in optimizer.param_groups for param in group["params"]}
        if updated != {id(param) for param in model.parameters() if param.requires_grad}:
            what = "the optimizer does not update exactly the model's parameters"
            raise ConfigError(what, "optimizer", "build it over model.parameters()")


def _list_differences(actual: ModelConfig, expected: ModelConfig) -> list[str]:
    """Return the settings, as `model.field=value`, in which `actual` differs from `expected`."""
    expected_fields = expected.architecture()
    return [
        f"model.{name}={value}"
        for name, value in actual.architecture().items()
        if value != expected_fields[name]
    ]


def _read_pretrained(plan: RunPlan) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, weights) of `model.init`, adapted to the run's vocabulary and context.

    A shorter context keeps the first rows of learned position embeddings.
    """
    name, model_config = plan.config.model.init, plan.data.model_config
    loaded = load_weights(name, plan.console.warn)
    has_same_ids = loaded.vocabulary.shares_ids(plan.data.vocabulary)
    if not has_same_ids and not call_entries("new_tokens", loaded, plan):
        theirs, ours = loaded.vocabulary.name, plan.data.vocabulary.name
        what = f"model.init uses tokenizer {theirs}, the dataset {ours}"
        fix = f"prepare the dataset with the model's tokenizer: --tokenizer {name}"
        raise DataError(what, name, fix)
    source = loaded.model.config
    added = {name: getattr(model_config, name) for name in EXTENSION_FIELDS}
    differences = _list_differences(
        replace(source, seq_len=model_config.seq_len, **added), model_config
    )
    if model_config.pos_emb == "learned" and source.seq_len < model_config.seq_len:
        differences.append(f"model.seq_len={source.seq_len}")
    if differences:
        fix = f"set {' '.join(differences)}"
        raise ConfigError("model.init has a different architecture", name, fix)
    for weight, values in loaded.model.state_dict().items():
        yield weight, values[: model_config.seq_len] if weight == "positions.weight" else values
    plan.console.print(f"weights from {loaded.source}")
