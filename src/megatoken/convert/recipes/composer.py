"""Translates a YAML of MosaicML's Composer or llm-foundry.

Source: the GPT files of composer/yamls/models (2022) and of llm-foundry's scripts/train/yamls, and the optimizers and
schedulers that they name. DecoupledAdamW multiplies a weight by 1 - wd lr(t)/lr each step, AdamW by 1 - wd lr(t): the
same decay is wd/lr here, so that 1e-5 beside a peak of 3e-4 becomes 0.0333.
"""

import math
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import yaml

from megatoken.config.load import NULL, Assignment, compose_yaml
from megatoken.convert.recipes.translation import Row, Translation, format_value, only
from megatoken.errors import ConfigError

MODELS = ("gpt2", "mosaic_gpt", "mpt_causal_lm")
PRECISIONS = {
    "fp32": "fp32",
    "amp": "fp16",
    "fp16": "fp16",
    "bf16": "bf16",
    "amp_fp16": "fp16",
    "amp_bf16": "bf16",
}
OPTIMIZERS = {  # Composer's and torch's defaults
    "decoupled_adamw": {
        "lr": 1e-3,
        "betas.0": 0.9,
        "betas.1": 0.95,
        "eps": 1e-8,
        "weight_decay": 1e-5,
    },
    "adamw": {"lr": 1e-3, "betas.0": 0.9, "betas.1": 0.999, "eps": 1e-8, "weight_decay": 1e-2},
}
EXAMPLE = "optimizer: {name: decoupled_adamw, lr: 6e-4} or scheduler: {name: cosine_with_warmup, t_warmup: 100ba}"
CLIPPING = (
    "grad_clip_norm",
    "algorithms.gradient_clipping.clipping_threshold",
    "deepspeed.gradient_clipping",
)
BUDGETS = {"ba": "budget.steps", "ep": "budget.epochs", "tok": "budget.tokens"}
# The same thing under one name: a section that contains one other section, and a list with one entry.
RENAMED = (
    (r"^model\.(gpt2\.)?(model_config|config_overrides)\.", "model."),
    (r"^(optimizer|scheduler)s?\.(0\.)?", r"\1."),
    (r"^deepspeed(_config)?\.", "deepspeed."),
    (r"^train_(dataset|loader)\.(.+\.)?max_seq_len$", "train_dataset.max_seq_len"),
)
LONGEST_VALUE = 1000  # characters of a value that names others by ${}


def duration(text: str, default_unit: str = "", units: tuple[str, ...] = (*BUDGETS, "dur")) -> str:
    """A length of training. Raises ValueError for anything else."""
    number = r"([\d._]+(?:[eE][-+]?\d+)?)"
    match = re.fullmatch(f"{number}({'|'.join(units)})", text + default_unit * text.isdigit())
    if not match or not math.isfinite(float(match[1])):
        raise ValueError(f"write a number and one of {', '.join(units)}")
    return f"{format_value(float(match[1]))}{match[2].replace('ba', 'steps')}"


def schedule(name: str) -> str:
    """cosine_decay_with_warmup and the like."""
    decay = name.split("_")[0]
    if decay not in ("cosine", "linear", "constant") or "restarts" in name:
        raise ValueError("cosine, linear and constant ones are supported, with or without warm-up")
    return decay


TABLE: dict[str, Row] = {
    "run_name": Row(str),
    "save_folder": Row(str),
    "seed global_seed": Row(int, "seed"),
    "model.name": Row(str, convert=only(*MODELS)),
    "model.gpt2.use_pretrained model.pretrained": Row(bool, convert=only(False)),
    "model.n_layer model.n_layers": Row(int, "model.n_layer"),
    "model.n_head model.n_heads": Row(int, "model.n_head"),
    "model.n_embd model.d_model": Row(int, "model.d_model"),
    "model.n_positions model.max_seq_len model.max_position_embeddings max_seq_len train_dataset.max_seq_len": Row(
        int, "model.seq_len"
    ),
    "model.vocab_size": Row(int, "model.vocab_size"),
    "model.n_inner": Row(int, "model.d_ff"),
    "model.expansion_ratio model.mlp_ratio": Row(float),
    "model.attn_pdrop model.resid_pdrop model.embd_pdrop model.emb_pdrop": Row(
        float, "model.dropout"
    ),
    "model.no_bias": Row(bool, "model.bias", {True: False, False: True}),
    "model.activation_function": Row(str, convert=only("gelu_new", "gelu_pytorch_tanh")),
    "model.layer_norm_epsilon": Row(float, convert=only(1e-5)),
    "model.initializer_range": Row(float, convert=only(0.02)),
    "model.scale_attn_weights": Row(bool, convert=only(True)),
    "model.alibi model.attn_config.alibi": Row(bool, convert=only(False)),
    "optimizer.name": Row(str, convert=only(*OPTIMIZERS)),
    "optimizer.lr": Row(float, "optim.lr"),
    "optimizer.betas.0": Row(float, "optim.beta1"),
    "optimizer.betas.1": Row(float, "optim.beta2"),
    "optimizer.eps": Row(float, "optim.eps"),
    "optimizer.weight_decay": Row(float, "optim.weight_decay"),
    " ".join(CLIPPING): Row(float, "optim.grad_clip", partial(max, 0.0)),
    "algorithms.gradient_clipping.clipping_type": Row(str, convert=only("norm")),
    "scheduler.name": Row(str, "optim.schedule", schedule),
    "scheduler.t_warmup": Row(str, "optim.warmup", duration),
    "scheduler.alpha_f": Row(float, "optim.min_lr_ratio"),
    "scheduler.t_max": Row(str, convert=only("1dur", "1.0dur")),
    "scheduler.alpha_i scheduler.alpha": Row(float, convert=only(1.0)),
    "train_batch_size global_train_batch_size": Row(int),
    "max_duration": Row(str, convert=partial(duration, units=(*BUDGETS,))),
    "precision": Row(str, "machine.precision", PRECISIONS),
    "device_train_microbatch_size": Row(str, "machine.micro_batch"),
    "validate_every_n_epochs": Row(str, "evaluate.every", partial(duration, default_unit="ep")),
    "validate_every_n_batches": Row(str, "evaluate.every", partial(duration, default_unit="ba")),
    "eval_interval": Row(str, "evaluate.every", partial(duration, default_unit="ep")),
    "save_interval": Row(str, "save.every save.keep_every", duration),
    "save_num_checkpoints_to_keep": Row(int),
    "load_path": Row(str, convert=only()),
}
REQUIRED = (
    "model.n_layer",
    "model.n_head",
    "model.n_embd",
    "model.n_positions",
    "train_batch_size",
    "max_duration",
)
# How it is run, shown and stored, and what transformers writes into every configuration.
IGNORED = """
    logger* callbacks.*_monitor* callbacks.checkpoint* callbacks.hf_checkpoint* callbacks.runtime_estimator*
    callbacks.scheduled_gc* callbacks.image_visualizer* callbacks.mlperf* callbacks.memory_snapshot* callbacks.generate*
    callbacks.eval_* progress_bar log_to_console console_* python_log_level compute_training_metrics
    algorithms.fused_layernorm
    deepspeed.zero_optimization.* deepspeed.steps_per_print deepspeed.wall_clock_breakdown deepspeed.bf16.*
    deepspeed.fp16.* deepspeed.zero_allow_untested_optimizer deepspeed.dump_state
    device device.* dataloader.* fsdp_config* dist_timeout deterministic_mode autoresume load_*
    save_overwrite save_filename train_dataset.* train_loader.* val_dataset.* eval_loader.* evaluators* icl_tasks*
    grad_accum eval_subset_num_batches eval_batch_size device_eval_batch_size
    data_local data_remote tokenizer.* tokenizer_name variables.* eval_first device_train_grad_accum
    step_schedulers_every_batch model.*tokenizer_name model.*architectures* model.*model_type
    model.*_token_id model.*summary_* model.*task_specific_params* model.*transformers_version model.*use_cache
    model.*n_ctx model.*init_device model.*device model.*torch_dtype model.*attn_impl model.*loss_fn
"""


def translate_composer(path: Path) -> Translation:
    """The recipe of a Composer or llm-foundry file.

    Raises ConfigError naming file:line for a value that cannot be honoured here and for an unknown key.
    """
    given = _read(path)
    _add_defaults(given, path)
    settings = [
        setting
        for setting in given.values()
        if setting.text or setting.key.startswith(("algorithms.", "callbacks."))
    ]
    translation = Translation("Composer", TABLE, settings, IGNORED)
    get, where, assign = translation.get, translation.where, translation.set
    if missing := [key for key in REQUIRED if get(key) is None]:
        raise ConfigError(f"no {' and no '.join(missing)}", str(path), "give it in the file")
    if (folder := get("save_folder")) and "{" not in folder:
        translation.out = Path(folder)
    translation.name = get("run_name") or f"composer-{path.stem}"
    if get("model.name") in ("mosaic_gpt", "mpt_causal_lm"):
        assign("model.mlp", "gelu-erf", f"{where('model.name')}: MPT's")
        note = "first weights are GPT-2's, normal with 0.02, smaller where they add to the residual stream; MPT draws"
        translation.notes.append(f"{note} kaiming_normal_ ones: the first steps differ")
    if ratio := get("model.expansion_ratio"):
        assign("model.d_ff", int(ratio * get("model.n_embd")), where("model.expansion_ratio"))
    if get("optimizer.weight_decay"):
        _translate_decay(translation)
    _translate_budget(translation, given)
    if (keep := get("save_num_checkpoints_to_keep")) and keep > 0:  # else all are kept
        assign("save.keep_last", keep, where("save_num_checkpoints_to_keep"))
        translation.assignments.pop("save.keep_every", None)
    if "warmup" in get("scheduler.name"):
        translation.notes.append(
            "the first step is taken at lr/warm-up instead of 0: the ramp comes one step earlier"
        )
    translation.notes.append("its data is a stream of its own: prepare yours and set data.path")
    translation.notes += _describe_streams(given)
    return translation


def _describe_streams(given: Mapping[str, Assignment]) -> list[str]:
    """A note with the data.path that mixes the file's streams. Raises ConfigError for other shares."""
    found = {
        key: re.fullmatch(r"train_(?:loader|dataset)\.(?:.+\.)?streams\.([^.]+)\.(\w+)", key)
        for key in given
    }
    streams = {match[1]: "1" for match in found.values() if match}
    for key, match in found.items():
        if match and match[2] in ("repeat", "choose"):
            what = f"{key}: {match[2]} counts samples of a stream"
            raise ConfigError(what, given[key].where, "write the stream's share as its proportion")
        if match and match[2] == "proportion":
            streams[match[1]] = given[key].text
    if len(streams) < 2:
        return []
    words = ",".join(f"data/{name}:{share}" for name, share in streams.items())
    return [f"its streams are mixed by data.path={words} once each is prepared"]


def _add_defaults(given: dict[str, Assignment], path: Path) -> None:
    """Add the defaults of the optimizer and the scheduler that the file names."""

    def add(key: str, default: object, where: str) -> None:
        given.setdefault(key, Assignment(key, str(default), where))

    for section in ("optimizer", "scheduler"):
        keys = [key for key in given if key.startswith(f"{section}.")]
        if not keys:
            raise ConfigError(f"no {section}", str(path), f"write one as in {EXAMPLE}")
        if (
            f"{section}.name" not in keys
        ):  # Composer has {adamw: {lr: 1}}, llm-foundry {name: adamw, lr: 1}
            name = keys[0].split(".")[1]
            add(f"{section}.name", name, given[keys[0]].where)
            for old in (given.pop(key) for key in keys):
                add(old.key.replace(f".{name}", "", 1), old.text, old.where)
    optimizer, scheduler = given["optimizer.name"], given["scheduler.name"]
    for name, default in OPTIMIZERS.get(optimizer.text, {}).items():
        add(f"optimizer.{name}", default, f"{optimizer.where}: {optimizer.text}'s {name}")
    add("scheduler.alpha_f", 0.0, f"{scheduler.where}: {scheduler.text}'s alpha_f")
    if "warmup" not in scheduler.text:
        add("scheduler.t_warmup", "0ba", f"{scheduler.where}: no warm-up")
    elif "scheduler.t_warmup" not in given:
        raise ConfigError(f"{scheduler.text} without t_warmup", scheduler.where, "give it")
    if not any(key in given for key in CLIPPING):
        add("grad_clip_norm", 0.0, "Composer: no clipping unless asked")


def _translate_decay(translation: Translation) -> None:
    get, where = translation.get, translation.where
    if get("optimizer.name") == "decoupled_adamw":
        decay, lr = get("optimizer.weight_decay"), get("optimizer.lr")
        if not lr:
            raise ConfigError(
                "a decay beside a rate of 0 has no equal here",
                where("optimizer.lr"),
                "give it a rate",
            )
        translation.set("optim.weight_decay", decay / lr, where("optimizer.weight_decay"))
        note = "decoupled_adamw multiplies by 1 - wd x lr(t)/lr, AdamW by 1 - wd x lr(t): here wd ="
        translation.notes.append(f"{note} {format_value(decay)} / {format_value(lr)}")
    translation.notes.append(
        "norms and biases are not decayed here, Composer decays every parameter"
    )


def _translate_budget(translation: Translation, given: Mapping[str, Assignment]) -> None:
    get, where = translation.get, translation.where
    seq_len, length, origin = get("model.n_positions"), get("max_duration"), where("max_duration")
    batch_origin = f"{where('train_batch_size')}: x {seq_len} tokens"
    translation.set("budget.batch_tokens", get("train_batch_size") * seq_len, batch_origin)
    unit = next(unit for unit in BUDGETS if length.endswith(unit))
    number = float(length.removesuffix(unit))
    cuts = [
        given[key]
        for key in given
        if re.match(r"train_(dataset|loader)\..*(samples|num_tokens|epoch_size)$", key)
    ]
    if unit == "ep" and cuts:  # an epoch of a dataset that is cut to so many sequences or tokens
        cut = cuts[0]
        if len(cuts) > 1 or not re.fullmatch(r"\d{1,18}", cut.text):
            fix = "write max_duration in tok or ba"
            raise ConfigError(f"an epoch of {cut.key} {cut.text} has no equal here", cut.where, fix)
        size = 1 if cut.key.endswith("num_tokens") else seq_len
        origin += f": of {cut.text} x {size} tokens, {cut.where}"
        number, unit = round(number * int(cut.text) * size), "tok"
    elif unit == "ep":
        translation.notes.append("an epoch is one of your data, not of its own")
    translation.set(BUDGETS[unit], number, origin)


def _read(path: Path) -> dict[str, Assignment]:
    """The values of a file by dotted key, entries of lists numbered from 0; `${name}` is another value of the file."""
    root = compose_yaml(path)
    leaves = list(_list_leaves(root, path, "")) if root else []
    texts = {leaf.key: leaf.text for leaf in leaves}

    def look_up(match: re.Match[str]) -> str:
        return texts.get(match[1], texts.get(f"variables.{match[1]}", match[0]))[
            : LONGEST_VALUE + 1
        ]

    given: dict[str, Assignment] = {}
    for leaf in leaves:
        key, text = leaf.key, leaf.text
        for pattern, name in RENAMED:
            key = re.sub(pattern, name, key)
        if key in given:
            raise ConfigError(
                f"{key} is given twice", leaf.where, f"first given at {given[key].where}"
            )
        for _ in range(4):  # a value may name one that names another
            if "${" in text and len(text) <= LONGEST_VALUE:
                text = re.sub(r"\$\{([\w.]+)\}", look_up, text)
                if len(text) > LONGEST_VALUE:
                    what = (
                        f"{key} is over {LONGEST_VALUE:,} characters long with what its ${{}} name"
                    )
                    raise ConfigError(what, leaf.where, "write it out")
        if "${" in text:
            raise ConfigError(
                f"{text:.{LONGEST_VALUE}} is not given in the file", leaf.where, "write it out"
            )
        given[key] = Assignment(key, text, leaf.where)
    return given


def _list_leaves(node: yaml.Node, path: Path, key: str) -> Iterator[Assignment]:
    if isinstance(node, yaml.ScalarNode) or not node.value:
        yield Assignment(
            key, "" if node.tag == NULL else node.value or "", f"{path}:{node.start_mark.line + 1}"
        )
        return
    is_section = isinstance(node, yaml.MappingNode)
    entries = (
        [(name.value, value) for name, value in node.value] if is_section else enumerate(node.value)
    )
    for name, value in entries:
        yield from _list_leaves(value, path, f"{key}.{name}" if key else str(name))
