"""Find conflicts between settings that would make a run fail late or train something unintended."""

import re
from collections.abc import Iterator

from megatoken.base.config.fields import Duration, parse_time
from megatoken.base.config.model_config import validate_model
from megatoken.base.config.presets import PRESETS, suggest_preset
from megatoken.base.config.schema import CACHE, DEVICE_NAMES, END_DECAYS, Config
from megatoken.base.rooms import list_entries, list_own, load_entry

Conflicts = Iterator[tuple[str, str, str]]


def validate(config: Config) -> Conflicts:
    """Yield each conflict between settings as (setting, problem, how to fix it).

    A room's entries of the kind "check" do the same for its settings.
    """
    model = config.model
    if model.preset and model.preset not in PRESETS:
        near = suggest_preset(model.preset)
        fix = f"did you mean {near}?" if near else f"choose one of {', '.join(PRESETS)}"
        yield "model.preset", f"unknown preset {model.preset!r}", fix
    yield from validate_model(model)
    if not model.is_unread:
        yield from _validate_batch(config)
    yield from _validate_length(config)
    yield from _validate_terms(config)
    yield from _validate_machine(config)
    try:
        parse_time(config.save.time_limit)
    except ValueError as error:
        yield "save.time_limit", str(error), ""
    for name in list_entries("check"):
        yield from load_entry("check", name)(config)


def _validate_batch(config: Config) -> Conflicts:
    budget, seq_len = config.budget, config.model.seq_len
    for name in ("batch_tokens", "batch_start"):
        tokens = getattr(budget, name)
        if tokens % seq_len:
            problem = f"{tokens} is not a multiple of model.seq_len {seq_len}"
            yield f"budget.{name}", problem, f"try {tokens // seq_len * seq_len or seq_len}"
    micro_batch = config.machine.micro_batch
    if micro_batch != "auto" and config.batch_seqs % micro_batch:
        problem = f"{micro_batch} does not divide the batch of {config.batch_seqs} sequences"
        yield "machine.micro_batch", problem, "use auto"
    if bool(budget.batch_start) != bool(budget.batch_ramp):
        name = "batch_start" if budget.batch_start else "batch_ramp"
        yield f"budget.{name}", "batch_start and batch_ramp require each other", "set both"
    if budget.batch_start and config.data.order == "sequential":
        yield "data.order", "sequential order needs a constant batch", "set budget.batch_start=0"
    if budget.batch_start > budget.batch_tokens:
        problem = f"{budget.batch_start} is larger than batch_tokens {budget.batch_tokens}"
        yield "budget.batch_start", problem, "start with a smaller batch"


def _validate_length(config: Config) -> Conflicts:
    optim, budget = config.optim, config.budget
    lengths = [name for name in ("steps", "tokens", "epochs") if getattr(budget, name)]
    if len(lengths) != 1:
        problem = f"{' and '.join(lengths)} are both set" if lengths else "no length of the run"
        key = f"budget.{lengths[-1] if lengths else 'steps'}"
        yield key, problem, "set one of budget.steps, tokens, epochs"
    phases = (optim.warmup, optim.decay_length or Duration(0))
    shares = [phase.value for phase in phases if phase.unit == "dur"]
    longest = sum(shares) if optim.schedule in END_DECAYS else max(shares, default=0)
    if longest > 1 + 1e-9:
        key = "optim.warmup" if optim.decay == "auto" else "optim.decay"
        yield key, "warmup and decay are longer than the run", "use at most 1dur in total"
    if optim.schedule == "multi-step" and not optim.min_lr_ratio:
        problem = "multi-step multiplies lr by the root of min_lr_ratio, so by 0"
        yield "optim.min_lr_ratio", problem, "use 0.1, or schedule linear"


def _validate_terms(config: Config) -> Conflicts:
    names = list_entries("loss_term")
    try:
        unknown = config.objective.weights.keys() - names.keys()
    except ValueError:
        yield "objective.terms", "not a weight", "write z=1e-4,smoothing=0.1"
        return
    for name in unknown:
        yield "objective.terms", f"no loss term {name!r}", f"choose among {', '.join(names)}"


def _validate_machine(config: Config) -> Conflicts:
    machine, model, mask = config.machine, config.model, config.data.document_mask
    if not re.fullmatch(CACHE, config.data.cache):
        yield "data.cache", f"not a size: {config.data.cache}", "use 100GB, 2TB or all"
    if not re.fullmatch(DEVICE_NAMES, machine.device):
        problem = f"unknown device {machine.device!r}"
        yield "machine.device", problem, "use auto, cpu, cuda, cuda:N or mps"
    if machine.device == "cpu" and machine.precision == "fp16":
        yield "machine.precision", "fp16 does not train on a CPU", "use auto, bf16 or fp32"
    if machine.sharding not in ("auto", "none") and machine.master_weights == "on":
        yield "machine.master_weights", "sharding already keeps fp32 masters", "use auto"
    if mask and machine.attention in ("cudnn", "fa2"):
        problem = f"{machine.attention} does not support data.document_mask"
        yield "machine.attention", problem, "use auto or flash"
    if machine.tensor_parallel > 1:
        problem = "not supported with machine.tensor_parallel"
        if machine.activation_checkpointing == "gelu":
            yield "machine.activation_checkpointing", problem, "use none or block"
        if machine.fp8 != "off":
            yield "machine.fp8", problem, "use off"
        if model.mlp in list_own("mlp") or model.block in list_own("block"):
            problem = "not supported for an MLP or block of your own"
            yield "machine.tensor_parallel", problem, "use machine.sharding"
        if mask or model.lora_rank:
            problem = "not supported for data.document_mask or model.lora_rank"
            yield "machine.tensor_parallel", problem, "use machine.sharding"
