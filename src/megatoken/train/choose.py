"""Which form of each operation is fastest here: measured once a machine and model size, remembered, never believed.

In: a shape, a device, what the recipe fixed. Out: a Choice: kernels by name, and whether low precision is held in the
weights. A form must beat the plain one by a clear margin to be taken. Absent: the micro-batch (probe.py) and
compilation (device.py).
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial

import numpy
import torch
from torch import Tensor

from megatoken.config import Machine
from megatoken.device import Device
from megatoken.hardware import cpu_count, recall, remember, return_freed_memory
from megatoken.model.gpt import Block, use_kernels
from megatoken.model.kernels import ATTENTION, Kernels
from megatoken.presets import Shape
from megatoken.timing import take_turns
from megatoken.train.state import State

CHOICES = "choices.json"  # in the cache
MARGIN = 1.1  # how much faster a form must be than the plain one; less than this a noisy minute can feign
TRIAL_SECONDS, FEWEST, MOST = 2.0, 5, 50  # of an operation's trial; repeats
MOST_TOKENS = 4096  # of a trial; a longer one tells nothing more

Seconds = dict[str, dict[str, float]]  # operation -> form -> seconds of its best repeat


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The forms to compute with, and what was measured to choose them (empty where nothing was left open)."""

    kernels: Kernels
    masters: bool
    seconds: Seconds = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.kernels}{', weights held in low precision' if self.masters else ''}"

    def explain(self) -> list[tuple[str, str]]:
        """(operation, what was measured and chosen), for people."""
        chosen = asdict(self.kernels) | {"mixed": "masters" if self.masters else "autocast"}
        return [
            (name, f"{chosen[name]} ({', '.join(f'{form} {s * 1e3:.3g} ms' for form, s in forms.items())})")
            for name, forms in self.seconds.items()
        ]


def choose_forms(shape: Shape, machine: Machine, device: Device, *, micro_batch: int, dropout: float) -> Choice:
    """The fastest form of everything the recipe leaves to `auto`, by trials of at most a few seconds in all."""
    options = list_options(machine, device, dropout)
    fixed = {name: forms[0] for name, forms in options.items()}
    seconds: Seconds = {}
    if any(len(forms) > 1 for forms in options.values()):
        tokens = max(min(micro_batch * shape.seq_len, MOST_TOKENS), shape.seq_len)
        key = _describe(shape, device, tokens, options)
        seconds = _recall(key, options)
        if not seconds:
            seconds = _try_forms(shape, device, tokens // shape.seq_len, options)
            remember(CHOICES, {key: seconds})
            return_freed_memory()
        fixed |= {name: pick(forms) for name, forms in seconds.items()}
    masters = fixed.pop("mixed") == "masters"
    return Choice(kernels=Kernels(**fixed), masters=masters, seconds=seconds)


def use_choice(state: State, choice: Choice, device: Device) -> None:
    """Make a live state compute as chosen; its weights and moments stay."""
    use_kernels(state.model, choice.kernels)
    if choice.masters:
        state.hold_masters(device.dtype)


def list_options(machine: Machine, device: Device, dropout: float) -> dict[str, list[str]]:
    """Per operation the forms that can run here, the plain one first; one only where the recipe or the device decides.

    Other libraries and blocks are for fp32 and bf16 on a CPU: on an accelerator torch's own kernels stay.
    """
    on_cpu = device.place.type == "cpu" and machine.compile != "on"  # the compiler makes its own of the plain forms
    options = {"linear": ["torch"], "attention": ["flash"], "mixed": ["autocast"]}
    if on_cpu and device.precision == "fp32":
        # numpy's library does not know torch's number of threads.
        options["linear"] += ["numpy"] if torch.get_num_threads() == cpu_count() else []
        options["linear"] += ["onednn"] if torch.backends.mkldnn.is_available() else []  # type: ignore[no-untyped-call]
    if on_cpu:
        options["attention"] += [] if dropout else ["blocked"]
    if device.precision == "bf16":
        options["mixed"] += ["masters"]
    wishes = {"linear": machine.linear, "attention": machine.attention, "mixed": machine.mixed}
    return {name: forms if wishes[name] == "auto" else [wishes[name]] for name, forms in options.items()}


def pick(seconds: Mapping[str, float]) -> str:
    """The fastest form if it clearly beats the plain one, which comes first."""
    plain, *_ = seconds
    fastest = min(seconds, key=lambda form: seconds[form])
    return fastest if seconds[fastest] * MARGIN < seconds[plain] else plain


def _recall(key: str, options: Mapping[str, list[str]]) -> Seconds:
    """What was measured before under `key`; empty unless it is whole."""
    kept = recall(CHOICES).get(key)
    wanted = {name: set(forms) for name, forms in options.items() if len(forms) > 1}
    if not isinstance(kept, dict) or set(kept) != set(wanted):
        return {}
    for name, forms in kept.items():
        numbers = forms.values() if isinstance(forms, dict) and set(forms) == wanted[name] else [None]
        if not all(isinstance(seconds, float) and seconds > 0 for seconds in numbers):
            return {}
    return {name: {form: kept[name][form] for form in options[name]} for name in wanted}


def _describe(shape: Shape, device: Device, tokens: int, options: Mapping[str, list[str]]) -> str:
    """Everything a measured choice depends on, as the key under which it is kept."""
    place = f"{device.name} ({device.place.type}), {torch.get_num_threads()} threads, {device.precision}"
    sizes = (
        f"width {shape.d_model}, {shape.n_head} heads, MLP {shape.d_ff}, {tokens // shape.seq_len} x {shape.seq_len}"
    )
    forms = "; ".join(f"{name} {' '.join(forms)}" for name, forms in options.items())
    return f"{place}; {sizes}; {forms}; torch {torch.__version__}, numpy {numpy.__version__}"


def _try_forms(shape: Shape, device: Device, seqs: int, options: Mapping[str, list[str]]) -> Seconds:
    """Seconds of a forward and backward of every open operation in each of its forms, which take turns.

    Products and weights are timed in a whole block, where they meet the operations between them; the rest alone.
    """
    B, T, C, H = seqs, shape.seq_len, shape.d_model, shape.n_head
    block = Block(shape, 0, 0.0).to(device.place)
    low = Block(shape, 0, 0.0).to(device.place, device.dtype)
    x_BTC = torch.linspace(-2, 2, B * T * C, device=device.place).view(B, T, C).requires_grad_()
    heads_BHTD = x_BTC.detach().to(device.dtype).view(B, T, H, C // H).transpose(1, 2)
    q, k, v = (heads_BHTD.clone().requires_grad_() for _ in range(3))

    def run_block(kernels: Kernels) -> Tensor:
        use_kernels(block, kernels)
        with device.autocast():
            return block(x_BTC)  # type: ignore[no-any-return]

    trials: dict[str, Callable[[str], Tensor]] = {
        "linear": lambda form: run_block(Kernels(linear=form)),
        "attention": lambda form: ATTENTION[form](q, k, v, 0.0),
        "mixed": lambda form: run_block(Kernels()) if form == "autocast" else low(x_BTC.to(device.dtype)),
    }

    def run_trial(name: str, form: str) -> None:
        y = trials[name](form)
        y.backward(torch.ones_like(y))  # type: ignore[no-untyped-call]

    found: Seconds = {}
    for name, forms in options.items():
        if len(forms) > 1:
            calls = {form: partial(run_trial, name, form) for form in forms}
            first = take_turns(calls, repeats=1, synchronize=device.synchronize)
            affordable = int(TRIAL_SECONDS / sum(timing.best for timing in first.values()))
            repeats = min(max(affordable, FEWEST), MOST)
            timings = take_turns(calls, repeats=repeats, warmup=0, synchronize=device.synchronize)
            # The best repeat: what else the machine was doing only ever adds.
            found[name] = {form: timing.best for form, timing in timings.items()}
    return found
