"""The model and optimizer that a run starts with: initial weights, those of `model.init`, or the user's own objects.

Loading a checkpoint over them is in train/restore.py.
"""

import inspect
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megatoken.checkpoint.commit import list_steps
from megatoken.config.load import ResolvedConfig
from megatoken.config.model_config import ModelConfig
from megatoken.config.schema import validate
from megatoken.convert.load_pretrained import load_pretrained, read_model_config
from megatoken.data.chat_dataset import ROW_OBJECTIVES, require_data_for
from megatoken.data.mixture import load_mixture
from megatoken.distributed.parallel_dims import ParallelDims
from megatoken.errors import ConfigError, DataError
from megatoken.model.gpt import GPT, init_weights
from megatoken.train.run_context import RunContext
from megatoken.train.run_folder import CHECKPOINTS
from megatoken.train.state import build_state

VOCABULARY_TABLES = (
    "tokens.weight",
    "head.weight",
)  # of value embeddings, too: attention.value_tokens.weight


def build_train_state(
    run: RunContext,
    dims: ParallelDims,
    model: GPT | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Put the model on its device and build its optimizer: `run.state`.

    model, optimizer: the user's, whose weights the run starts from; else the weights are initial ones or those of
    `model.init`, and left uninitialized where a checkpoint will replace them.
    """
    config, is_own = run.config, model is not None
    if model is None:
        with torch.device("cpu" if dims.is_unsharded else "meta"):
            model = GPT(run.model_config, seed=None)
    run.state = build_state(model, config, run.device, dims, optimizer)
    run.state.comm = run.comm
    if not is_own and not config.model.init:
        run.state.sharded.copy_from_full(init_weights(model, config.seed))
    elif not is_own and not run.comm.run_on_rank0(lambda: list_steps(run.out / CHECKPOINTS)):
        run.state.sharded.copy_from_full(_pretrained_weights(run))


def take_architecture(resolved: ResolvedConfig, out: Path) -> ResolvedConfig:
    """The config with the sizes and switches of `model.init`, where it gives none but a context and a value head.

    They are those of a run in `out` once it has a checkpoint: `model.init` may be gone. Raises as `load_pretrained`.
    """
    model, origins = resolved.config.model, resolved.origins
    own = {
        name
        for name in model.architecture()
        if origins.get(f"model.{name}", "default") != "default"
    }
    if not model.init or own - {"seq_len", "value_head"}:
        return resolved
    given = read_model_config(out if list_steps(out / CHECKPOINTS) else model.init)
    sizes = {
        name: value
        for name, value in given.architecture().items()
        if name not in {*own, "value_head"}
    }
    if (
        resolved.config.objective.name != "pretrain"
    ):  # the dataset's tokenizer may have control tokens more
        dataset = load_mixture(
            resolved.config.data.path, external_tokenizer=resolved.config.data.tokenizer
        )
        require_data_for(resolved.config.objective.name, dataset.parts[0].dataset)
        sizes["vocab_size"] = max(sizes["vocab_size"], dataset.tokenizer.vocab_size)
    config = replace(resolved.config, model=replace(model, **sizes))
    for key, what, fix in validate(config):
        raise ConfigError(f"{key}: {what}", f"model.init {model.init}", fix)
    return replace(
        resolved, config=config, origins=origins | {f"model.{name}": "model.init" for name in sizes}
    )


def check_own_model(run: RunContext, model: GPT, optimizer: torch.optim.Optimizer | None) -> None:
    """Raise ConfigError unless the user's model is the one that the config describes, in one process, and the user's
    optimizer updates its parameters, all and only."""
    if run.config.model.init:
        raise ConfigError("a model and model.init are both given", "model.init", "give one of them")
    if not run.comm.is_single_process:
        raise ConfigError(
            "a model object cannot be split over processes", "model", "use model.init with nproc"
        )
    if type(model).loss is not GPT.loss:
        what = f"{type(model).__name__}.loss is not what training computes"
        raise ConfigError(what, "model", "change model/loss.py, or override forward")
    differs = _list_differences(model.config, run.model_config)
    if model.config.dropout != run.model_config.dropout:
        differs.append(f"model.dropout={model.config.dropout}")
    if differs:
        raise ConfigError(
            "the model differs from config.model", "model", f"set {' '.join(differs)}"
        )
    if model.config.dropout and "dropout_keys_B" not in inspect.signature(model.forward).parameters:
        what = f"{type(model).__name__}.forward takes no dropout_keys_B"
        raise ConfigError(what, "model", "pass it on to GPT.forward, or set model.dropout=0")
    if (
        run.config.data.document_mask
        and "tree_mask" not in inspect.signature(model.forward).parameters
    ):
        what = f"{type(model).__name__}.forward takes no tree_mask"
        raise ConfigError(
            what, "model", "pass it on to GPT.forward, or set data.document_mask=false"
        )
    if optimizer is not None:
        updated = {id(param) for group in optimizer.param_groups for param in group["params"]}
        own = {id(param) for param in model.parameters()}
        if updated != own:
            what = (
                f"the optimizer updates {len(updated & own)} of the model's {len(own)} parameters"
            )
            what += f" and {len(updated - own)} others" if updated - own else ""
            raise ConfigError(what, "optimizer", "build it over model.parameters()")


def add_mean_rows(values: Tensor, n_old: int, n_new: int, config: ModelConfig) -> Tensor:
    """A table with a row for each id (padded, width), in which ids n_old to n_new have the mean of those before.

    So a new token's logit is the mean of the others', and it takes at most 1/n_old of the probability (Hewitt 2021); a
    row of zeros would take nearly all where the others' logits are far below 0.
    """
    rows = values.new_zeros(config.padded_vocab_size, values.shape[1])
    kept = min(len(rows), len(values))
    rows[:kept] = values[:kept]
    rows[n_old:n_new] = values[:n_old].double().mean(0).to(values.dtype)
    return rows


def _list_differences(given: ModelConfig, wanted: ModelConfig) -> list[str]:
    """`model.field=value` of `given` for each field of the architecture that differs."""
    other = wanted.architecture()
    return [
        f"model.{name}={value}"
        for name, value in given.architecture().items()
        if value != other[name]
    ]


def _pretrained_weights(run: RunContext) -> Iterator[tuple[str, Tensor]]:
    """The weights of `model.init`; a shorter context takes the first learned positions."""
    name, model_config = run.config.model.init, run.model_config
    loaded = load_pretrained(name, run.console.warn)
    given = loaded.model.config
    grows = not loaded.tokenizer.shares_ids(run.tokenizer) and run.tokenizer.extends(
        loaded.tokenizer
    )
    if not grows and not loaded.tokenizer.shares_ids(run.tokenizer):
        ours, theirs = (
            f"{t.name} ({t.fingerprint[:8]})" for t in (run.tokenizer, loaded.tokenizer)
        )
        what = f"model.init was trained with tokenizer {theirs}, the dataset is made by {ours}"
        raise DataError(
            what, name, f"prepare the dataset with the model's tokenizer: --tokenizer {name}"
        )
    vocab_size = max(given.vocab_size, run.tokenizer.vocab_size) if grows else given.vocab_size
    alike = replace(
        given,
        seq_len=model_config.seq_len,
        vocab_size=vocab_size,
        value_head=model_config.value_head,
    )
    differs = _list_differences(alike, model_config)
    if model_config.pos_emb == "learned" and given.seq_len < model_config.seq_len:
        differs.append(f"model.seq_len={given.seq_len}")
    if differs:
        raise ConfigError(
            "model.init has a different architecture", name, f"set {' '.join(differs)}"
        )
    if model_config.value_head and not given.value_head:
        yield from (
            ("value_head.weight", torch.zeros(1, model_config.d_model)),
            ("value_head.bias", torch.zeros(1)),
        )
    for weight, values in loaded.model.state_dict().items():
        if grows and weight.endswith(VOCABULARY_TABLES):
            values = add_mean_rows(
                values, loaded.tokenizer.vocab_size, run.tokenizer.vocab_size, model_config
            )
        yield weight, values[: model_config.seq_len] if weight == "positions.weight" else values
    if grows:
        n_new = run.tokenizer.vocab_size - loaded.tokenizer.vocab_size
        run.console.print(f"{n_new} new tokens start as the mean of the others")
        if run.config.objective.name in ROW_OBJECTIVES:
            run.console.warn(
                f"{name} has no chat template, so it has not learnt to answer: megatoken train sft first"
            )
    run.console.print(f"weights from {loaded.source}")
