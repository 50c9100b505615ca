"""A YAML of MosaicML's Composer, or of llm-foundry, told as a recipe.

Source: the GPT files of Composer's composer/yamls/models (2022), the pretraining files of llm-foundry's
scripts/train/yamls, and the optimizers and schedulers that they name. Every value must be understood, or known to
change nothing that is learnt; another is an error. Absent: `algorithms` that change the model or the curve, and its
data: both programs read streams of their own.

DecoupledAdamW multiplies a weight by 1 - wd x lr(t)/lr each step, torch's AdamW by 1 - wd x lr(t). The same decay is
therefore wd/lr here: 1e-5 beside a peak of 3e-4 is 0.0333.
"""

import re
from fnmatch import fnmatch
from pathlib import Path

from megatoken.errors import Exit, Fault
from megatoken.interop.translation import Translation, write_number
from megatoken.interop.yaml_tree import Leaf, Tree, read_tree
from megatoken.presets import PRESETS

# Nothing of these is learnt: how it is run, shown, stored, and what transformers writes into every configuration.
SILENT = (
    "logger*",
    "callbacks*",
    "progress_bar",
    "log_to_console",
    "console_*",
    "python_log_level",
    "device",
    "device.*",
    "dataloader.*",
    "deepspeed*",
    "fsdp_config*",
    "dist_timeout",
    "grad_accum",
    "device_train_grad_accum",
    "deterministic_mode",
    "train_dataset.*",
    "train_loader.*",
    "val_dataset.*",
    "eval_loader.*",
    "evaluators*",
    "data_local",
    "data_remote",
    "tokenizer.*",
    "tokenizer_name",
    "variables.*",
    "max_seq_len",
    "eval_first",
    "save_overwrite",
    "save_filename",
    "autoresume",
    "load_*",
    "compute_training_metrics",
    "step_schedulers_every_batch",
    "icl_tasks*",
    "model.gpt2.use_pretrained",
    "model.gpt2.tokenizer_name",
    *(
        f"model.*{name}"
        for name in (
            "architectures*",
            "model_type",
            "_token_id",
            "summary_*",
            "task_specific_params*",
            "transformers_version",
            "use_cache",
            "n_ctx",
            "init_device",
            "device",
            "tokenizer_name",
            "torch_dtype",
            "attn_impl",
            "pretrained",
            "loss_fn",
        )
    ),
)
# What our GPT-2 computes; another value is another model.
FIXED = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "initializer_range": (0.02,),
    "scale_attn_weights": (True,),
}
PUBLISHED = {
    "gpt2": "gpt2-124m",
    "gpt2-medium": "gpt2-355m",
    "gpt2-large": "gpt2-774m",
    "gpt2-xl": "gpt2-1558m",
}
UNITS = {"ba": "steps", "ep": "ep", "tok": "tok", "dur": "dur", "sp": "tok"}


def translate_composer(path: Path) -> Translation:
    """The recipe of a Composer or llm-foundry file.

    Raises Fault(CONFIG) naming file:line for a value that cannot be told here and for a key that nobody understands.
    """
    tree = read_tree(path)
    told = Translation(name=f"composer-{path.stem}")
    if (folder := tree.take("save_folder")) and "{" not in folder.text:
        told.out = Path(folder.text)
    if name := tree.take("run_name"):
        told.name = name.text or told.name
    seq_len = _tell_model(tree, told)
    _tell_optimizer(tree, told)
    _tell_schedule(tree, told, seq_len)
    _tell_budget(tree, told, seq_len)
    _tell_evaluation(tree, told, seq_len)
    _tell_saving(tree, told, seq_len)
    _tell_machine(tree, told)
    told.note("its data is a stream of its own: prepare yours and set data.path")
    _refuse_leftovers(tree, told)
    return told


def _refuse_leftovers(tree: Tree, told: Translation) -> None:
    left = []
    for key, leaf in tree.leaves.items():
        if not any(fnmatch(key, pattern) for pattern in SILENT):
            what = f"{key} is not understood, and what is not understood is not dropped"
            raise Fault(Exit.CONFIG, what, leaf.where, "take it out if it changes nothing that is learnt")
        left.append(key.split(".")[0])
    if left:
        told.note(f"left out, they change nothing that is learnt: {', '.join(dict.fromkeys(left))}")


def _tell_model(tree: Tree, told: Translation) -> int:
    """Shape and dropout. Returns the sequence length."""
    kind = tree.take("model.name")
    if kind and kind.text == "hf_causal_lm":
        return _tell_published(tree, told)
    if kind and kind.text not in ("gpt2", "mosaic_gpt", "mpt_causal_lm"):
        fix = "gpt2, mosaic_gpt, mpt_causal_lm and hf_causal_lm are told here"
        raise Fault(Exit.CONFIG, f"no model called {kind.text!r}", kind.where, fix)
    prefix = next((p for p in ("model.gpt2.model_config", "model.model_config", "model") if tree.under(p)), "model")
    names = {
        "n_layer": ("n_layer", "n_layers"),
        "n_head": ("n_head", "n_heads"),
        "d_model": ("n_embd", "d_model"),
        "seq_len": ("n_positions", "max_seq_len"),
        "vocab_size": ("vocab_size",),
    }
    sizes = {}
    for ours, theirs in names.items():
        leaf = tree.take(*(f"{prefix}.{name}" for name in theirs))
        if leaf is None and ours != "vocab_size":
            fix = "give the model's sizes in the file"
            raise Fault(Exit.CONFIG, f"no {prefix}.{theirs[0]}", str(tree.path), fix)
        if leaf is not None:
            sizes[ours] = leaf.integer()
            told.set(f"model.{ours}", sizes[ours], leaf.where)
    if inner := tree.take(f"{prefix}.n_inner"):
        told.set("model.d_ff", inner.integer(), inner.where)
    if ratio := tree.take(f"{prefix}.expansion_ratio", f"{prefix}.mlp_ratio"):
        told.set("model.d_ff", int(ratio.number() * sizes["d_model"]), ratio.where)
    drops = [tree.take(f"{prefix}.{name}") for name in ("attn_pdrop", "resid_pdrop", "embd_pdrop", "emb_pdrop")]
    given = [leaf for leaf in drops if leaf]
    if len({leaf.number() for leaf in given}) > 1:
        what = "attention, residual and embedding have different dropout, here it is one number"
        raise Fault(Exit.CONFIG, what, given[0].where, "give them the same")
    if given:
        told.set("model.dropout", write_number(given[0].number()), given[0].where)
    for name, allowed in FIXED.items():
        leaf = tree.take(f"{prefix}.{name}")
        if leaf and leaf.value() not in allowed:
            raise Fault(Exit.CONFIG, f"{name} {leaf.text} is not computed here", leaf.where, f"here: {allowed[0]}")
    if kind and kind.text != "gpt2":
        told.set("model.mlp", "gelu-erf", f"{kind.where}: MPT's")
    if bare := tree.take(f"{prefix}.no_bias"):
        told.set("model.bias", "false" if bare.value() else "true", bare.where)
    alibi = tree.take(f"{prefix}.attn_config.alibi", f"{prefix}.alibi")
    if alibi and alibi.value() is not False:
        raise Fault(Exit.CONFIG, "ALiBi is not computed here", alibi.where, "train it with learned positions")
    return sizes["seq_len"]


def _tell_published(tree: Tree, told: Translation) -> int:
    """One of OpenAI's GPT-2s by its name on the hub. Returns the sequence length."""
    name = tree.need("model.pretrained_model_name_or_path")
    preset = PUBLISHED.get(name.text.removeprefix("openai-community/"))
    if preset is None:
        fix = f"one of {', '.join(PUBLISHED)}"
        raise Fault(Exit.CONFIG, f"the shape of {name.text!r} is not known here", name.where, fix)
    told.set("model.preset", preset, name.where)
    told.set("model.dropout", 0.1, f"{name.where}: transformers' GPT2Config")
    overrides = "model.config_overrides"
    length = tree.take(f"{overrides}.n_positions", f"{overrides}.max_position_embeddings")
    if length:
        told.set("model.seq_len", length.integer(), length.where)
    trained = tree.take("model.pretrained")
    if trained and trained.value():
        told.set("model.init", name.text, trained.where)
    return length.integer() if length else PRESETS[preset].seq_len


def _tell_optimizer(tree: Tree, told: Translation) -> None:
    kind, prefix = tree.take_kind("optimizers", "optimizer")
    if kind.text not in ("decoupled_adamw", "adamw"):
        fix = "decoupled_adamw and adamw are told here"
        raise Fault(Exit.CONFIG, f"no optimizer called {kind.text!r}", kind.where, fix)
    decoupled = kind.text == "decoupled_adamw"
    implied = {"lr": 1e-3, "eps": 1e-8, "weight_decay": 1e-5 if decoupled else 1e-2}
    betas = (0.9, 0.95) if decoupled else (0.9, 0.999)
    values, places = {}, {}
    for name, default in implied.items():
        leaf = tree.take(f"{prefix}.{name}")
        values[name] = leaf.number() if leaf else default
        places[name] = leaf.where if leaf else f"{kind.where}: {kind.text}'s {name}"
    told.set("optim.lr", write_number(values["lr"]), places["lr"])
    for number, default in enumerate(betas):
        leaf = tree.take(f"{prefix}.betas.{number}")
        where = leaf.where if leaf else f"{kind.where}: {kind.text}'s betas"
        told.set(f"optim.beta{number + 1}", write_number(leaf.number() if leaf else default), where)
    told.set("optim.eps", write_number(values["eps"]), places["eps"])
    decay = values["weight_decay"]
    if decoupled and decay:
        if not values["lr"]:
            raise Fault(Exit.CONFIG, "a decay beside a rate of 0 has no equal here", places["lr"], "give it a rate")
        told.note(
            f"decoupled_adamw multiplies by 1 - {write_number(decay)} x lr(t)/lr, AdamW by 1 - wd x lr(t): "
            f"wd = {write_number(decay)} / {write_number(values['lr'])}"
        )
        decay /= values["lr"]
    told.set("optim.weight_decay", write_number(decay), places["weight_decay"])
    if decay:
        told.note("norms and biases are not decayed here, Composer decays every parameter")


def _tell_schedule(tree: Tree, told: Translation, seq_len: int) -> None:
    kind, prefix = tree.take_kind("schedulers.0", "scheduler")
    kinds = {"cosine": "cosine", "linear": "linear", "constant": "constant"}
    shape = next((ours for begin, ours in kinds.items() if kind.text.startswith(begin)), None)
    if shape is None or "restarts" in kind.text:
        fix = "cosine, linear and constant ones are told here, with or without warm-up"
        raise Fault(Exit.CONFIG, f"no schedule like {kind.text!r}", kind.where, fix)
    told.set("optim.schedule", shape, kind.where)
    warmup = tree.take(f"{prefix}.t_warmup")
    if "warmup" in kind.text and warmup is None:
        raise Fault(Exit.CONFIG, f"{kind.text} without t_warmup", kind.where, "give it")
    told.set("optim.warmup", _duration(warmup.text, warmup.where, seq_len) if warmup else "0steps",
             warmup.where if warmup else f"{kind.where}: no warm-up")  # fmt: skip
    if warmup:
        told.note("the first step is taken at lr/warm-up instead of 0: the ramp comes one step earlier")
    floor = tree.take(f"{prefix}.alpha_f")
    told.set("optim.floor", write_number(floor.number() if floor else 0.0),
             floor.where if floor else f"{kind.where}: {kind.text}'s alpha_f")  # fmt: skip
    for name, only in (("t_max", "1dur"), ("alpha_i", "1"), ("alpha", "1")):
        leaf = tree.take(f"{prefix}.{name}")
        if leaf and leaf.text.removesuffix(".0") != only:
            raise Fault(Exit.CONFIG, f"{name} {leaf.text} has no equal here", leaf.where, f"here it is {only}")
    if second := tree.under("schedulers.1"):
        raise Fault(Exit.CONFIG, "schedules that multiply have no equal here", second[0].where, "give one")


def _tell_budget(tree: Tree, told: Translation, seq_len: int) -> None:
    batch = tree.need("train_batch_size", "global_train_batch_size")
    told.set("budget.batch_tokens", batch.integer() * seq_len, f"{batch.where}: x {seq_len} tokens")
    length = tree.need("max_duration")
    text = _duration(length.text, length.where, seq_len)
    value, unit = re.fullmatch(r"(\S+?)(steps|ep|tok|dur)", text).groups()  # type: ignore[union-attr]
    keys = {"steps": "steps", "ep": "epochs", "tok": "tokens"}
    samples = _find_samples(tree, "train_dataset")
    if unit not in keys:
        raise Fault(Exit.CONFIG, f"max_duration {length.text} is no length", length.where, "20000ba, 1ep or 10e9tok")
    if unit == "ep" and samples:  # its epoch is shorter than its data
        tokens = round(float(value) * samples.integer() * seq_len)
        told.set("budget.tokens", tokens, f"{length.where}: of {samples.text} x {seq_len} tokens, {samples.where}")
    else:
        told.set(f"budget.{keys[unit]}", value, length.where)
    if seed := tree.take("seed", "global_seed"):
        told.set("seed", seed.integer(), seed.where)
    clip = tree.take("grad_clip_norm", "algorithms.gradient_clipping.clipping_threshold")
    norm = tree.take("algorithms.gradient_clipping.clipping_type")
    if norm and norm.text != "norm":
        raise Fault(Exit.CONFIG, f"clipping by {norm.text} is not done here", norm.where, "norm is")
    told.set("optim.clip", write_number(max(clip.number(), 0.0)) if clip else "0",
             clip.where if clip else "Composer: no clipping unless asked")  # fmt: skip


def _find_samples(tree: Tree, dataset: str) -> Leaf | None:
    """How many sequences a dataset is cut to."""
    return next((leaf for leaf in tree.under(dataset) if leaf.key.endswith(("max_samples", "num_samples"))), None)


def _tell_evaluation(tree: Tree, told: Translation, seq_len: int) -> None:
    every = tree.take("eval_interval", "validate_every_n_batches", "validate_every_n_epochs")
    if tree.take("validate_every_n_epochs"):
        told.note("validation after each epoch, too, is left to the end of the run")
    held_out = bool(tree.under("val_dataset") or tree.under("eval_loader"))
    if every:
        unit = "ba" if every.key == "validate_every_n_batches" else "ep"
        text = every.text + (unit if every.text.isdigit() else "")
        told.set("evaluate.every", _duration(text, every.where, seq_len), every.where)
    elif held_out:
        told.set("evaluate.every", "1ep", "Composer: eval_interval is an epoch")
    subset, size = tree.take("eval_subset_num_batches"), tree.take("eval_batch_size", "device_eval_batch_size")
    samples = _find_samples(tree, "val_dataset")
    if subset and size and subset.integer() > 0:
        tokens = subset.integer() * size.integer() * seq_len
        told.set("evaluate.tokens", tokens, f"{subset.where}: x {size.text} x {seq_len} tokens")
    elif samples:
        told.set("evaluate.tokens", samples.integer() * seq_len, f"{samples.where}: x {seq_len} tokens")
    elif held_out:
        told.set("evaluate.tokens", "1T", "Composer: the whole split")


def _tell_saving(tree: Tree, told: Translation, seq_len: int) -> None:
    every, keep = tree.take("save_interval"), tree.take("save_num_checkpoints_to_keep")
    if every:
        text = _duration(every.text, every.where, seq_len)
        told.set("save.every", text, every.where)
        if keep is None or keep.integer() < 0:
            told.set("save.keep_every", text, keep.where if keep else "Composer: all are kept")
    if keep and keep.integer() > 0:
        told.set("save.keep_last", keep.integer(), keep.where)


def _tell_machine(tree: Tree, told: Translation) -> None:
    if precision := tree.take("precision"):
        words = {"fp32": "fp32", "amp": "fp16", "fp16": "fp16", "bf16": "bf16", "amp_fp16": "fp16", "amp_bf16": "bf16"}
        if precision.text not in words:
            fix = f"one of {', '.join(words)}"
            raise Fault(Exit.CONFIG, f"no precision {precision.text!r}", precision.where, fix)
        told.set("machine.precision", words[precision.text], precision.where)
    if size := tree.take("device_train_microbatch_size"):
        told.set("machine.micro_batch", size.text, size.where)
    accumulation = tree.leaves.get("grad_accum")
    if accumulation and accumulation.text == "auto":
        told.set("machine.micro_batch", "auto", accumulation.where)
        del tree.leaves["grad_accum"]
    elif accumulation:
        told.note("accumulation follows from the micro-batch, which is chosen here: machine.micro_batch=N sets it")


def _duration(text: str, where: str, seq_len: int) -> str:
    """A length of Composer's in our words: ba are steps, sp are samples of seq_len tokens."""
    match = re.fullmatch(r"([\d._]+(?:[eE][-+]?\d+)?)(ba|ep|tok|dur|sp)", text.strip())
    if not match:
        raise Fault(
            Exit.CONFIG, f"{text!r} is no length of time", where, "write it as 20000ba, 1ep, 10e9tok or 0.01dur"
        )
    value = float(match[1]) * (seq_len if match[2] == "sp" else 1)
    return f"{write_number(value)}{UNITS[match[2]]}"
