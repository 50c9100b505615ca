"""Which form of each operation is fastest here: measured once a machine and model size, remembered, never believed.

In: a shape, a device, what the recipe fixed. Out: a Choice: kernels by name, and whether low precision is held in the
weights. A form must beat the plain one by a clear margin to be taken. Absent: the micro-batch (probe.py) and
compilation (device.py).
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import partial

import numpy
import torch
from torch import Tensor

from megatoken.config import Machine
from megatoken.device import Device, misses_triton
from megatoken.errors import Exit, Fault
from megatoken.hardware import cpu_count, recall, remember, return_freed_memory
from megatoken.model.gpt import Block, use_kernels
from megatoken.model.kernels import ATTENTION, CUDA_ONLY, LOSS, Kernels
from megatoken.model.kernels.attention import switch_flash
from megatoken.model.rotary import make_turns
from megatoken.presets import Shape
from megatoken.timing import take_turns
from megatoken.train.state import LOSS_CHUNK, State

CHOICES = "choices.json"  # in the cache
# How much faster a form must be than the plain one: on a CPU less than this is what a noisy minute can feign.
MARGIN = {"cpu": 1.1, "mps": 1.1, "cuda": 1.01}
TRIAL_SECONDS, FEWEST, MOST = 2.0, 5, 50  # of an operation's trial; repeats
MOST_TOKENS = {"cpu": 4096, "mps": 4096, "cuda": 65536}  # of a trial; a longer one tells nothing more
FUSED = ("norm", "gelu", "loss")

Seconds = dict[str, dict[str, float]]  # operation -> form -> seconds of its best repeat


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The forms to compute with, and what was measured to choose them (empty where nothing was left open)."""

    kernels: Kernels
    masters: bool
    seconds: Seconds = field(default_factory=dict)
    note: str = ""  # why a wish could not be met

    def __str__(self) -> str:
        return f"{self.kernels}{', weights held in low precision' if self.masters else ''}"

    def explain(self) -> list[tuple[str, str]]:
        """(operation, what was measured and chosen), for people."""
        chosen = asdict(self.kernels) | {"mixed": "masters" if self.masters else "autocast"}
        return [
            (name, f"{chosen[name]} ({', '.join(f'{form} {s * 1e3:.3g} ms' for form, s in forms.items())})")
            for name, forms in self.seconds.items()
        ]


def choose_forms(
    shape: Shape, machine: Machine, device: Device, *, micro_batch: int, dropout: float, compiled: bool = False
) -> Choice:
    """The fastest form of everything the recipe leaves to `auto`, by trials of at most a few seconds in all.

    compiled: whether the model will be, so that forms are tried as they will run; on a CPU those that differ are not.
    """
    compiled = compiled and device.place.type == "cuda"
    _check_attention(shape, machine, device, dropout)
    options = list_options(shape, machine, device, dropout)
    note = _excuse_plain(shape, device) if machine.fused == "on" else ""
    fixed = {name: forms[0] for name, forms in options.items()}
    seconds: Seconds = {}
    if any(len(forms) > 1 for forms in options.values()):
        most = MOST_TOKENS[device.place.type]
        tokens = max(min(micro_batch * shape.seq_len, most), shape.seq_len)
        key = _describe(shape, device, tokens, options)
        key += f"{f', dropout {dropout}' if dropout else ''}{', compiled' if compiled else ''}"
        seconds = _recall(key, options)
        if not seconds:
            seconds = _try_forms(shape, device, tokens // shape.seq_len, options, dropout, compiled)
            remember(CHOICES, {key: seconds})
            return_freed_memory()
        margin = MARGIN[device.place.type]
        fixed |= {name: pick(forms, margin) for name, forms in seconds.items()}
    masters = fixed.pop("mixed") == "masters"
    return Choice(kernels=Kernels(**fixed), masters=masters, seconds=seconds, note=note)


def _check_attention(shape: Shape, machine: Machine, device: Device, dropout: float) -> None:
    """Raise Fault(CONFIG) when the backend that the recipe names cannot do these heads in this precision here."""
    if machine.attention not in CUDA_ONLY:
        return
    q, k = (
        torch.zeros(1, heads, 16, shape.d_head, dtype=device.dtype, device=device.place)
        for heads in (shape.n_head, shape.kv_heads)
    )
    if device.place.type != "cuda" or not _runs(lambda: attend(machine.attention, q, k, k, dropout)):
        what = f"no {machine.attention} attention for heads of {shape.d_head} in {device.precision} on {device.name}"
        raise Fault(Exit.CONFIG, what, "machine.attention", "use auto")


def use_choice(state: State, choice: Choice, device: Device) -> None:
    """Make a live state compute as chosen; its weights and moments stay."""
    use_kernels(state.model, choice.kernels)
    state.lose = LOSS[choice.kernels.loss]
    if choice.masters:
        state.hold_masters(device.dtype)


def _excuse_plain(shape: Shape, device: Device) -> str:
    """Why some or all of our fused kernels are left out; empty if none is."""
    if missing := misses_triton(device):
        return f"fused kernels are left out: {missing}"
    plain = [name for name in FUSED if name not in list_fused(shape, device)]
    return f"fused kernels are left out for {' and '.join(plain)}: there are none for this model" if plain else ""


def list_fused(shape: Shape, device: Device) -> list[str]:
    """The operations of this model that our fused kernels can do in the device's precision."""
    fits = {
        "norm": shape.norm == "layernorm" and shape.bias,
        "gelu": shape.mlp == "gelu" and shape.bias,
        "loss": device.precision != "fp16",  # which makes its logits again in the backward, where torch differentiates
    }
    return [name for name in FUSED if fits[name]]


def list_options(shape: Shape, machine: Machine, device: Device, dropout: float) -> dict[str, list[str]]:
    """Per operation the forms that can run here, the plain one first; one only where the recipe or the device decides.

    Other libraries and blocks are for fp32 and bf16 on a CPU; on CUDA there are backends of attention, which fp32 has
    less of, and our fused kernels. A deterministic run takes the plain ones: the fastest depends on how many threads.
    """
    # The compiler makes its own of the plain forms.
    on_cpu = device.place.type == "cpu" and machine.compile in ("auto", "off")
    options = {"linear": ["torch"], "attention": ["flash"], "norm": ["torch"], "gelu": ["torch"], "loss": ["torch"]}
    options |= {"mixed": ["autocast"]}
    if on_cpu and device.precision == "fp32":
        # numpy's library does not know torch's number of threads.
        options["linear"] += ["numpy"] if torch.get_num_threads() == cpu_count() else []
        options["linear"] += ["onednn"] if torch.backends.mkldnn.is_available() else []  # type: ignore[no-untyped-call]
    if on_cpu:
        options["attention"] += [] if dropout else ["blocked"]
    if device.place.type == "cuda" and device.precision != "fp32":
        # FlexAttention is for masks that the others lack; with this one it only costs its compilation.
        options["attention"] += [form for form in CUDA_ONLY if form != "flex"]
    if device.precision == "bf16":
        options["mixed"] += ["masters"]
    if machine.fused != "off" and not misses_triton(device):
        for name in list_fused(shape, device):
            options[name] = ["torch", "triton"] if machine.fused == "auto" else ["triton"]
    if machine.deterministic:
        options = {name: forms[:1] for name, forms in options.items()}
    wishes = {"linear": machine.linear, "attention": machine.attention, "mixed": machine.mixed}
    return {name: forms if wishes.get(name, "auto") == "auto" else [wishes[name]] for name, forms in options.items()}


def pick(seconds: Mapping[str, float], margin: float) -> str:
    """The fastest form if it is so many times as fast as the plain one, which comes first."""
    plain, *_ = seconds
    fastest = min(seconds, key=lambda form: seconds[form])
    return fastest if seconds[fastest] * margin < seconds[plain] else plain


def _recall(key: str, options: Mapping[str, list[str]]) -> Seconds:
    """What was measured before under `key`; empty unless it is whole."""
    kept = recall(CHOICES).get(key)
    wanted = {name: set(forms) for name, forms in options.items() if len(forms) > 1}
    if not isinstance(kept, dict) or set(kept) != set(wanted):
        return {}
    for name, forms in kept.items():
        # Forms that failed here were not kept; the plain one never does.
        whole = isinstance(forms, dict) and options[name][0] in forms and set(forms) <= wanted[name]
        if not whole or not all(isinstance(seconds, float) and seconds > 0 for seconds in forms.values()):
            return {}
    return {name: {form: kept[name][form] for form in options[name] if form in kept[name]} for name in wanted}


def _describe(shape: Shape, device: Device, tokens: int, options: Mapping[str, list[str]]) -> str:
    """Everything a measured choice depends on, as the key under which it is kept."""
    place = f"{device.name} ({device.place.type}), {torch.get_num_threads()} threads, {device.precision}"
    sizes = (
        f"width {shape.d_model}, {shape.n_head} heads, MLP {shape.d_ff}, vocabulary {shape.padded_vocab_size}, "
        f"{tokens // shape.seq_len} x {shape.seq_len}"
    )
    for f in fields(Shape):
        if f.default is not MISSING and getattr(shape, f.name) != f.default:
            sizes += f", {f.name} {getattr(shape, f.name)}"
    forms = "; ".join(f"{name} {' '.join(forms)}" for name, forms in options.items())
    return f"{place}; {sizes}; {forms}; torch {torch.__version__}, numpy {numpy.__version__}"


def _try_forms(
    shape: Shape, device: Device, seqs: int, options: Mapping[str, list[str]], dropout: float, compiled: bool
) -> Seconds:
    """Seconds of a forward and backward of every open operation in each of its forms, which take turns.

    Products, norms, GELU and weights are timed in a whole block, where they meet the operations between them; attention
    and the loss alone. A form that fails is left out.
    """
    B, T, C, H = seqs, shape.seq_len, shape.d_model, shape.n_head
    block = Block(shape, 0, 0.0).to(device.place)
    low = Block(shape, 0, 0.0).to(device.place, device.dtype)
    forward, forward_low = (torch.compile(each) if compiled else each for each in (block, low))
    x_BTC = torch.linspace(-2, 2, B * T * C, device=device.place).view(B, T, C).requires_grad_()
    update_BTC = x_BTC.detach().flip(0).requires_grad_()
    low_pair = tuple(part.detach().to(device.dtype).requires_grad_() for part in (x_BTC, update_BTC))
    heads_BHTD = x_BTC.detach().to(device.dtype).view(B, T, H, C // H).transpose(1, 2)
    q, k, v = (heads_BHTD[:, :heads].clone().requires_grad_() for heads in block.attention.heads)
    turns = make_turns(shape, torch.arange(T, device=device.place))
    rows = min(B * T, LOSS_CHUNK[device.place.type])
    targets_N = torch.arange(rows, device=device.place) % shape.vocab_size

    def run_block(kernels: Kernels) -> Tensor:
        use_kernels(block, kernels)
        with device.autocast():
            return _sum_stream(forward(x_BTC, update_BTC, None, turns))

    def run_loss(form: str) -> None:
        logits_NV = torch.zeros(rows, shape.padded_vocab_size, dtype=device.dtype, device=device.place)
        LOSS[form](logits_NV, targets_N, shape.vocab_size, overwrite=True)

    trials: dict[str, Callable[[str], Tensor | None]] = {
        "linear": lambda form: run_block(Kernels(linear=form)),
        "attention": lambda form: attend(form, q, k, v, dropout),
        "norm": lambda form: run_block(Kernels(norm=form)),
        "gelu": lambda form: run_block(Kernels(gelu=form)),
        "loss": run_loss,
        "mixed": lambda form: (
            run_block(Kernels()) if form == "autocast" else _sum_stream(forward_low(*low_pair, None, turns))
        ),
    }

    def run_trial(name: str, form: str) -> None:
        y = trials[name](form)
        if y is not None:
            y.backward(torch.ones_like(y))  # type: ignore[no-untyped-call]

    found: Seconds = {}
    for name, forms in options.items():
        if len(forms) > 1:
            calls = {form: call for form in forms if _runs(call := partial(run_trial, name, form))}
            if forms[0] not in calls:
                continue  # what is wrong with the plain form is for the run to say
            first = take_turns(calls, repeats=1, before=switch_flash, synchronize=device.synchronize)
            affordable = int(TRIAL_SECONDS / sum(timing.best for timing in first.values()))
            repeats = min(max(affordable, FEWEST), MOST)
            timings = take_turns(calls, repeats=repeats, warmup=0, before=switch_flash, synchronize=device.synchronize)
            # The best repeat: what else the machine was doing only ever adds.
            found[name] = {form: timing.best for form, timing in timings.items()}
    return found


def attend(form: str, q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, dropout: float) -> Tensor:
    """Causal attention in a form, with what it needs behind it."""
    switch_flash(form)
    return ATTENTION[form](q_BHTD, k_BKTD, v_BKTD, dropout)


def _sum_stream(parts: tuple[Tensor, Tensor]) -> Tensor:
    """What a block makes of its stream: the next norm would add the update."""
    return parts[0] + parts[1]


def _runs(call: Callable[[], object]) -> bool:
    """Whether a form works here at all: a backend may lack this head width, a compiler this card."""
    try:
        with warnings.catch_warnings(action="ignore"):  # torch tells at length why a backend declined
            call()
    except torch.OutOfMemoryError:
        raise
    except Exception:
        return False
    return True
