"""Build the model and optimizer of a run, unless the user passes them to `Trainer`.

restore.py then replaces their state if the run has a checkpoint.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megatoken.base.config.load import ResolvedConfig
from megatoken.base.config.model_config import ADDED, ModelConfig
from megatoken.base.config.validate import validate
from megatoken.base.errors import ConfigError, DataError
from megatoken.convert.load_pretrained import load_pretrained, read_model_config
from megatoken.data.mixture import load_mixture
from megatoken.model.gpt import GPT, init_weights
from megatoken.store.commit import list_steps
from megatoken.store.run_folder import CHECKPOINTS
from megatoken.text.tokenizer import open_tokenizer
from megatoken.train.objective import load_objective
from megatoken.train.run import RunPlan
from megatoken.train.state import TrainState, build_state

VOCABULARY_TABLES = ("tokens.weight", "head.weight")  # also attention.value_tokens.weight


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


def take_architecture(resolved: ResolvedConfig, out: Path) -> ResolvedConfig:
    """Copy the architecture of `model.init` into the config, unless the config sets its own.

    A config may still set model.seq_len, and the fields in ADDED, which are not copied. Once the
    run in `out` has a checkpoint, the architecture is read from there, because `model.init` may no
    longer exist. Raises what `load_pretrained` raises.
    """
    model = resolved.config.model
    own_fields = {
        name
        for name in model.architecture()
        if resolved.origins.get(f"model.{name}", "default") != "default"
    }
    if not model.init or own_fields - {"seq_len", *ADDED}:
        return resolved
    source = read_model_config(out if list_steps(out / CHECKPOINTS) else model.init)
    sizes = {
        name: value
        for name, value in source.architecture().items()
        if name not in {*own_fields, *ADDED}
    }
    data = resolved.config.data
    if load_objective(
        resolved.config.objective.name
    ).is_chat:  # the dataset's tokenizer may add control tokens
        dataset = load_mixture(data.path, external_tokenizer=data.tokenizer)
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


def add_mean_rows(values: Tensor, n_old: int, n_new: int, config: ModelConfig) -> Tensor:
    """Extend a table (vocabulary, width) by rows [n_old, n_new), each the mean of the old rows.

    The result has the padded vocabulary of `config`. A new token's logit is then the mean of the
    old logits, and its probability at most 1/n_old (Hewitt 2021). A row of zeros would instead give
    the new token nearly all the probability wherever the old logits are far below 0.
    """
    table = values.new_zeros(config.padded_vocab_size, values.shape[1])
    n_copied = min(len(table), len(values))
    table[:n_copied] = values[:n_copied]
    table[n_old:n_new] = values[:n_old].double().mean(0).to(values.dtype)
    return table


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
    console = plan.console
    name = plan.config.model.init
    model_config = plan.data.model_config
    tokenizer = open_tokenizer(plan.data.vocabulary)
    loaded = load_pretrained(name, console.warn)
    source = loaded.model.config
    has_same_ids = loaded.tokenizer.shares_ids(tokenizer)
    adds_tokens = not has_same_ids and tokenizer.extends(loaded.tokenizer)
    if not has_same_ids and not adds_tokens:
        what = f"model.init uses tokenizer {loaded.tokenizer.name}, the dataset {tokenizer.name}"
        fix = f"prepare the dataset with the model's tokenizer: --tokenizer {name}"
        raise DataError(what, name, fix)
    vocab_size = source.vocab_size
    if adds_tokens:
        vocab_size = max(vocab_size, tokenizer.vocab_size)
    expected = replace(
        source,
        seq_len=model_config.seq_len,
        vocab_size=vocab_size,
        **{name: getattr(model_config, name) for name in ADDED},
    )
    differences = _list_differences(expected, model_config)
    if model_config.pos_emb == "learned" and source.seq_len < model_config.seq_len:
        differences.append(f"model.seq_len={source.seq_len}")
    if differences:
        fix = f"set {' '.join(differences)}"
        raise ConfigError("model.init has a different architecture", name, fix)
    n_old = loaded.tokenizer.vocab_size
    for weight, values in loaded.model.state_dict().items():
        if adds_tokens and weight.endswith(VOCABULARY_TABLES):
            values = add_mean_rows(values, n_old, tokenizer.vocab_size, model_config)
            if model_config.lora_rank:  # frozen rows that were equal could not be told apart
                generator = torch.Generator().manual_seed(plan.config.seed)
                new = values[n_old : tokenizer.vocab_size]
                noise = torch.randn(new.shape, generator=generator)
                new += noise * values[:n_old].std(0)
        yield weight, values[: model_config.seq_len] if weight == "positions.weight" else values
    if adds_tokens:
        start = "random rows" if model_config.lora_rank else "the mean of the others"
        console.print(f"{tokenizer.vocab_size - n_old} new tokens start as {start}")
        if not plan.objective.is_dense:
            fix = "run megatoken train sft first"
            console.warn(f"{name} has no chat template, so it has not learned to answer: {fix}")
    console.print(f"weights from {loaded.source}")
