"""The lines that a run prints before its first step."""

from megatoken.base.config.model_config import describe_heads
from megatoken.base.console import format_count, format_quantity
from megatoken.data.mixture import Mixture
from megatoken.distributed.parallel_dims import ParallelDims
from megatoken.model.flops import (
    count_matmul_parameters,
    describe_parameters,
    expected_initial_loss,
    flops_per_token,
)
from megatoken.train.run import RunPlan
from megatoken.train.state import StepConfig


def print_summary(name: str, plan: RunPlan) -> None:
    """Print the run's model, data, budget, machine and expected initial loss, with warnings."""
    config = plan.config
    data = plan.data
    steps = plan.step_config
    device = plan.device
    model = data.model_config
    vocabulary = data.vocabulary
    tokens = steps.tokens_before(steps.total_steps)
    flops = flops_per_token(model, causal=False)
    work = f"{flops:,} FLOPs per token (full attention)"
    if plan.data.fills_context:  # else rows are shorter than the context
        work += f", {format_quantity(flops * tokens, 'FLOP')} in all"
    machine = [str(device.torch_device), device.name, device.precision]
    if device.peak_flops:
        peak = format_quantity(device.peak_flops, "FLOP/s")
        machine.append(f"peak {peak} ({device.peak_source})")
    rows = [
        ("run", f"{name} in {plan.out}"),
        (
            "model",
            f"{model.n_layer} layers, {describe_heads(model)}, width {model.d_model}, context "
            f"{model.seq_len}: {describe_parameters(model)}, "
            f"{count_matmul_parameters(model):,} in matrix products",
        ),
        (
            "data",
            f"{data.dataset}: {len(data.dataset.train):,} train and {data.dataset.n_val:,} "
            f"held-out tokens, tokenizer {vocabulary.name} ({vocabulary.vocab_size:,} ids)",
        ),
        ("budget", _describe_budget(steps)),
        *(("", line) for line in _describe_components(data.dataset, model.seq_len, tokens)),
        ("work", work),
        ("machine", ", ".join(text for text in machine if text)),
    ]
    if plan.dims != ParallelDims():
        rows.append(("layout", str(plan.dims)))
    if not config.model.init:
        first_loss = f"ln({model.vocab_size:,}) = {expected_initial_loss(model):.2f} nats"
        rows.append(("initial loss", f"should be near {first_loss}"))
    plan.console.table(rows)
    _warn(plan)


def _warn(plan: RunPlan) -> None:
    console = plan.console
    data = plan.data
    schedule = plan.step_config.schedule
    unit = "tokens" if plan.step_config.ramp else "steps"
    lengths = {"optim.warmup": schedule.warmup, "optim.decay": schedule.decay_length or 0}
    for key, length in lengths.items():
        if length > schedule.total:
            console.warn(f"{key}: {length:,} {unit} exceed the run's {schedule.total:,}")
    vocab_size = data.model_config.vocab_size
    n_unused = vocab_size - data.vocabulary.vocab_size
    # Fewer unused ids may be padding by another program.
    if n_unused >= data.model_config.vocab_multiple and not plan.config.model.init:
        what = f"{n_unused:,} of the model's {vocab_size:,} ids are not in the tokenizer"
        fix = f"model.vocab_size=0 uses the tokenizer's {data.vocabulary.vocab_size:,}"
        console.warn(f"{what}; {fix}")
    if not data.dataset.n_val:
        console.warn("the dataset has no validation split: no held-out loss will be measured")


def _describe_budget(steps: StepConfig) -> str:
    tokens = steps.tokens_before(steps.total_steps)
    size = f"{steps.batch_tokens:,}"
    if steps.ramp:
        size = f"{steps.ramp.start:,} to {size}"
    epochs = _format_epochs(tokens / steps.epoch_tokens)
    n_steps = format_count(steps.total_steps, "step")
    return f"{n_steps} of {size} tokens = {format_quantity(tokens)} tokens = {epochs} epochs"


def _describe_components(dataset: Mixture, seq_len: int, tokens: int) -> list[str]:
    """Return a line for each dataset of a mixture. tokens: training tokens of the run."""
    if len(dataset.components) == 1:
        return []
    lines = []
    for component in dataset.components:
        size = (len(component.dataset.train) - 1) // seq_len * seq_len
        epochs = _format_epochs(tokens * component.share / size)
        share = f"{component.share:.1%} of the batches"
        lines.append(f"{component.name}: {share}, {epochs} epochs of {size:,} tokens")
    return lines


def _format_epochs(epochs: float) -> str:
    return f"{epochs:.3g}" if epochs < 100 else f"{epochs:,.0f}"
