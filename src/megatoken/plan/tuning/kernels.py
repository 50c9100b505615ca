"""Choose the fastest implementation of each operation on this machine, timed at the model's sizes.

Timings are cached under the settings of the step. An implementation replaces the plain PyTorch one
only if it is faster by a clear margin. The micro-batch is tuned in micro_batch.py.
"""

import copy
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatoken.base.config.model_config import ModelConfig
from megatoken.base.config.schema import Config, MachineConfig
from megatoken.base.errors import ConfigError
from megatoken.base.rooms import load_entry
from megatoken.base.system.device import Device, is_out_of_memory
from megatoken.base.system.malloc import return_freed_memory
from megatoken.base.system.measurement_cache import read_measurements, save_measurement
from megatoken.base.system.threads import thread_count, use_torch_threads
from megatoken.base.system.timing import time_calls
from megatoken.distributed.parallel_dims import ParallelDims
from megatoken.model.gpt import GPT, Block, add_term, set_attention, set_block_kernels
from megatoken.model.kernels.attention import CUDA_ONLY, find_attention
from megatoken.model.kernels.fp8 import MULTIPLE
from megatoken.model.kernels.fused_loss import misses_triton
from megatoken.model.memory import LOSS_CHUNK
from megatoken.model.native.selection import NO_LIBRARY, find_library, loaded_library
from megatoken.model.rope import rotary_cos_sin
from megatoken.optim.native import NativeUpdate, is_supported
from megatoken.train.state import TrainState

CACHE_FILE = "kernels.json"
# Required speed-up over the plain implementation. On a CPU, smaller differences may be noise.
MARGIN = {"cpu": 1.1, "mps": 1.1, "cuda": 1.01}
BLOCK_MARGIN = 1.0
# Per operation: at most 50 rounds in half a second, at least 3.
TRIAL: Any = {"repeats": 50, "longest": 0.5, "fewest": 3}
MAX_TRIAL_TOKENS = {"cpu": 2048, "mps": 4096, "cuda": 65536}  # more do not change the ranking

ONE_PROCESS = ParallelDims()

Timings = dict[str, dict[str, float]]  # operation -> implementation -> seconds of its best repeat
Errors = dict[str, str]  # "operation implementation" -> why it does not run here


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Which implementation to use for each operation, by name."""

    attention: str = "flash"
    loss: str = "torch"
    block: str = "torch"
    adamw: str = "torch"
    fp8: str = "off"
    mixed: str = "autocast"  # masters: weights held in low precision, with fp32 master weights

    def __str__(self) -> str:
        native = [name for name in ("block", "loss") if getattr(self, name) == "native"]
        parts = {
            f"attention {self.attention}": True,
            "fused loss": self.loss == "triton",
            "GELU in matmuls": self.block == "cublaslt",
            "native norms and activations": self.block == "torch+native",
            f"fp8 {self.fp8}": self.fp8 != "off",
            f"native {' + '.join(native)}": native,
            "weights held in low precision": self.mixed == "masters",
        }
        return ", ".join(part for part, is_used in parts.items() if is_used)


@dataclass(frozen=True, kw_only=True)
class KernelChoice:
    """The chosen implementation of each operation, and the timings on which the choice is based.

    seconds: empty if the config left no choice. errors: messages of implementations that failed
    when timed. library: name of the native library; "" if no native kernel is chosen. threads:
    torch's threads on a CPU, on which the order of its sums depends; 0 on other devices.
    """

    kernels: Kernels
    threads: int = 0
    seconds: Timings = field(default_factory=dict)
    errors: Errors = field(default_factory=dict)
    library: str = ""

    def __str__(self) -> str:
        text = f"{self.kernels}, torch's threads: {self.threads or 'any'}"
        return f"{text} ({self.library})" if self.library else text

    def explain(self) -> list[tuple[str, str]]:
        """Return pairs to print: the operation, then its chosen implementation and all timings."""
        chosen = asdict(self.kernels)
        rows = []
        for op, seconds in self.seconds.items():
            times = ", ".join(f"{name} {s * 1e3:.3g} ms" for name, s in seconds.items())
            rows.append((op, f"{chosen[op]} ({times})"))
        return rows + [("failed", f"{name}: {reason}") for name, reason in self.errors.items()]


def step_key(
    config: Config,
    model: ModelConfig,
    device: Device,
    dims: ParallelDims = ONE_PROCESS,
    mode: str = "off",
) -> str:
    """Return the key of all measurements of a step.

    It names every setting that the speed and the memory of a step depend on, except the depth of
    the model and the number of sequences. mode: how the model is compiled.
    """
    library = find_library()
    settings = asdict(config.machine) | model.architecture()
    settings |= {
        "device": f"{device.name} ({device.type})",
        "precision": device.precision,
        "threads": _torch_threads(device, ""),
        "compile": mode,
        "sharding": str(dims),
        "document_mask": config.data.document_mask,
        "optimizer": config.optim.name,
        "dropout": model.dropout,
        "torch": torch.__version__,
        "library": library and library.name,
        "n_layer": "any",
        "micro_batch": "any",
    }
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def autotune(
    config: ModelConfig,
    machine: MachineConfig,
    device: Device,
    *,
    micro_batch: int,
    key: str,
    compiled: bool = False,
) -> KernelChoice:
    """Choose the fastest implementation of every operation that `machine` leaves to `auto`.

    Timing takes a few seconds.

    key: the `step_key`. compiled: whether to time blocks under torch.compile; ignored except on
        CUDA.
    """
    compiled = compiled and device.type == "cuda"
    _check_requests(config, machine, device)
    options = list_options(config, machine, device)
    library = find_library()
    seconds: Timings = {}
    errors: Errors = {}
    if any(len(names) > 1 for names in options.values()):
        seqs = max(min(micro_batch, MAX_TRIAL_TOKENS[device.type] // config.seq_len), 1)
        key = f"{key}; {seqs} sequences, {options}"
        measured = read_measurements(CACHE_FILE).get(key)
        if not measured:
            measured = _time_in_memory(config, device, seqs, options, compiled)
            save_measurement(CACHE_FILE, key, measured)
            return_freed_memory()
        seconds, errors = measured
    chosen = {op: names[0] for op, names in options.items()}
    for op, timings in seconds.items():
        chosen[op] = pick(timings, BLOCK_MARGIN if op == "block" else MARGIN[device.type])
    # Other matmuls need low-precision weights, which autocast would have to cast at every use.
    if chosen["block"] != "torch" and device.precision == "bf16":
        chosen["mixed"] = "masters"
    is_native = any("native" in name for name in chosen.values())
    return KernelChoice(
        kernels=Kernels(**chosen),
        seconds=seconds,
        errors=errors,
        library=library.name if library and is_native else "",
        threads=_torch_threads(device, chosen["block"]),
    )


def _torch_threads(device: Device, block: str) -> int:
    """Return torch's threads in a run whose blocks use this implementation; 0 except on a CPU.

    It is one if our kernels compute all but a few operations, because torch's waiting threads would
    keep cores from them.
    """
    if device.type != "cpu":
        return 0
    return 1 if block == "native" else thread_count()


def apply_choice(state: TrainState, choice: KernelChoice, device: Device) -> None:
    """Switch a state to the chosen implementations without changing weights or optimizer state."""
    kernels = choice.kernels
    set_attention(state.model, kernels.attention)
    set_block_kernels(state.model, load_entry("block_kernels", kernels.block))
    if kernels.mixed == "masters":
        state.enable_master_weights(copy.deepcopy(state.model).to(device.dtype))
    use_torch_threads(choice.threads)
    update = state.compute.update
    if kernels.adamw == "native" and find_library() and is_supported(state.optimizer):
        pairs = state.grad_pairs() if state.uses_master_weights else []
        copies = {local: trained for trained, local in pairs}
        update = NativeUpdate(loaded_library(), copies)
    state.compute = replace(
        state.compute,
        output_layer=load_entry("output_layer", kernels.loss + " fp8" * (kernels.fp8 != "off")),
        threads=choice.threads,
        update=update,
    )


def list_options(
    config: ModelConfig, machine: MachineConfig, device: Device
) -> dict[str, list[str]]:
    """Return the implementations of each operation that can run here, plain PyTorch first.

    The block is the first operation, because the others are timed with its number of threads.
    A deterministic run gets only plain PyTorch where the config says `auto`, because the choice of
    the fastest implementation would depend on the number of threads. With dropout, attention gets
    only its default, because in training every implementation would fall back to the explicit
    formula (model/kernels/attention.py).
    """
    options = {"block": ["torch"], "attention": ["flash"], "loss": ["torch"], "adamw": ["torch"]}
    options["fp8"] = ["off"]
    options["mixed"] = ["autocast", "masters"] if device.precision == "bf16" else ["autocast"]
    is_low = device.precision == "bf16" and machine.master_weights != "off"
    if device.type == "cpu" and machine.compile in ("auto", "off"):  # else torch.compile's kernels
        native = ["native"] if find_library() else []
        if not config.dropout:
            # Native attention is at least as fast as torch matmuls on blocks.
            options["attention"] += native if native and not config.window else ["blocked"]
        if native and device.precision == "fp32":  # torch's matmuls may be faster
            options["block"] += ["torch+native", "native"]
        elif is_low:
            options["block"] += native
        if machine.fused == "auto":
            options["loss"] += native
        elif machine.fused == "on" and native:
            options["loss"] = native
        options["adamw"] = native or ["torch"]  # not timed: it moves fewer bytes than torch's
    if (
        device.type == "cuda"
        and device.precision != "fp32"
        and not config.dropout
        and not config.window
    ):
        options["attention"] += CUDA_ONLY
    saves_gelu = config.mlp == "gelu" and machine.activation_checkpointing != "gelu"
    has_gelu = saves_gelu and config.has_bias("mlp")
    if device.type == "cuda" and torch.version.cuda and is_low and has_gelu:
        options["block"].append("cublaslt")
    elif machine.gemm_backend == "cublaslt":
        what = "cublaslt needs GELU that is saved, biases, and weights held in bf16 on CUDA"
        raise ConfigError(what, "machine.gemm_backend", "set it to auto")
    # In fp16 the loss recomputes its logits in the backward, which torch differentiates.
    if machine.fused != "off" and device.precision != "fp16" and not misses_triton(device):
        options["loss"] = ["torch", "triton"] if machine.fused == "auto" else ["triton"]
    if machine.deterministic:
        # Native Muon runs in single processes only, and rounds differently from torch's operations.
        options = {op: names[:1] for op, names in options.items()} | {"adamw": ["torch"]}
    requests: dict[str, str] = {
        "block": machine.gemm_backend,
        "attention": machine.attention,
        "mixed": {"on": "masters", "off": "autocast"}.get(machine.master_weights, "auto"),
        "fp8": machine.fp8,
        "adamw": machine.adamw if machine.adamw in ("auto", "native") else "torch",
    }
    options |= {op: [name] for op, name in requests.items() if name != "auto"}
    if device.precision == "fp32":
        options["mixed"] = ["autocast"]  # a low-precision copy would also be in fp32
    return options


def pick(seconds: Mapping[str, float], margin: float) -> str:
    """Return the fastest implementation if it beats the first by the factor `margin`.

    Otherwise returns the first. seconds: time of each implementation.
    """
    plain, *_ = seconds
    fastest = min(seconds, key=lambda name: seconds[name])
    return fastest if seconds[fastest] * margin < seconds[plain] else plain


def _check_requests(config: ModelConfig, machine: MachineConfig, device: Device) -> None:
    """Raise ConfigError if kernels that the config asks for cannot run on this device."""
    if machine.attention in CUDA_ONLY:
        shape = 1, config.n_head, 16, config.d_head
        q = torch.zeros(shape, dtype=device.dtype, device=device.torch_device)
        k = q[:, : config.kv_heads]
        attention = find_attention(machine.attention)
        compute = partial(attention, q, k, k, mask=None, causal=True, dropout=None)
        if device.type != "cuda" or _find_error(compute):
            heads = f"heads of {config.d_head} in {device.precision}"
            what = f"no {machine.attention} attention for {heads} on {device.name}"
            raise ConfigError(what, "machine.attention", "use auto")
    on_cpu = device.type == "cpu"
    for key in ("attention", "gemm_backend", "adamw"):
        if "native" in str(getattr(machine, key)) and not (on_cpu and find_library()):
            fix = NO_LIBRARY if on_cpu else "set it to auto"
            raise ConfigError("there are no native kernels for this device", f"machine.{key}", fix)
    is_bf16 = device.precision == "bf16"
    if is_bf16 and machine.master_weights == "off" and "native" in machine.gemm_backend:
        what = "native kernels in bf16 need master weights, which are off (always off in sharding)"
        raise ConfigError(what, "machine.gemm_backend", "set it to auto")
    if machine.fp8 != "off" and not (is_bf16 and device.has_fp8 and config.d_model % MULTIPLE == 0):
        what = f"FP8 needs bf16, an NVIDIA GPU since Ada, and a width divisible by {MULTIPLE}"
        raise ConfigError(what, "machine.fp8", "set it to off")


def _time_in_memory(
    config: ModelConfig, device: Device, seqs: int, *trial: Any
) -> tuple[Timings, Errors]:
    """Call `_time_options`, halving the number of sequences until they fit in memory."""
    while True:
        try:
            return _time_options(config, device, seqs, *trial)
        except (RuntimeError, MemoryError) as error:
            if seqs == 1 or not is_out_of_memory(error):
                raise
        seqs //= 2
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _time_options(
    config: ModelConfig, device: Device, seqs: int, options: Mapping[str, list[str]], compiled: bool
) -> tuple[Timings, Errors]:
    """Time forward and backward of each operation's implementations in interleaved rounds.

    Returns the timings, and the errors of implementations that failed.
    """
    trials = _build_trials(config, device, seqs, compiled)

    def run_trial(op: str, implementation: str) -> None:
        y = trials[op](implementation)
        if y is not None:
            y.backward(torch.ones_like(y))  # type: ignore[no-untyped-call]

    best: Timings = {}
    errors: Errors = {}
    block, *others = options["block"]
    block = "" if others else block  # until it is chosen

    def set_threads(implementation: str) -> None:
        use_torch_threads(_torch_threads(device, block or implementation))

    for op, names in options.items():
        if len(names) == 1 or (op == "mixed" and block != "torch"):
            continue  # decided: other matmuls need low-precision weights
        calls = {}
        for name in names:
            call = partial(run_trial, op, name)
            set_threads(name)
            reason = _find_error(call)
            if reason:
                errors[f"{op} {name}"] = reason
            else:
                calls[name] = call
        if names[0] not in calls:
            continue  # the run will report what is wrong with the plain implementation
        timings = time_calls(
            calls, **TRIAL, is_warm=True, before=set_threads, synchronize=device.synchronize
        )
        # The best repeat, because other load on the machine only adds time.
        best[op] = {name: timing.best for name, timing in timings.items()}
        if op == "block":
            block = pick(best[op], BLOCK_MARGIN)
    return best, errors


def _build_trials(
    config: ModelConfig, device: Device, seqs: int, compiled: bool
) -> dict[str, Callable[[str], Tensor | None]]:
    """Return a function per operation, which runs the forward of a named implementation.

    For `block` and `mixed` it runs a full block, and for `attention` and `loss` only that
    operation. For `loss` it also computes the gradient, and returns None.
    """
    B, T, C = seqs, config.seq_len, config.d_model
    block = (
        GPT(replace(config, n_layer=1, vocab_size=1, dropout=0.0)).blocks[0].to(device.torch_device)
    )
    assert isinstance(block, Block)
    low_block = copy.deepcopy(block).to(device.dtype)
    forward = torch.compile(block) if compiled else block
    forward_low = torch.compile(low_block) if compiled else low_block

    def make(*shape: int, dtype: torch.dtype = device.dtype) -> Tensor:
        values = torch.linspace(-2, 2, math.prod(shape), dtype=dtype, device=device.torch_device)
        return values.view(shape).requires_grad_()

    x_BTC = make(B, T, C, dtype=torch.float32)
    low_x_BTC = make(B, T, C)
    heads = (config.n_head, config.kv_heads, config.kv_heads)
    q, k, v = (make(B, T, count, config.d_head).transpose(1, 2) for count in heads)
    rope = rotary_cos_sin(config, torch.arange(T, device=device.torch_device))
    window = {"window": config.window} if config.window else {}
    ids_BT = torch.zeros(B, T, dtype=torch.int64, device=device.torch_device)
    rows = min(B * T, LOSS_CHUNK[device.type])
    targets_N = torch.arange(rows, device=device.torch_device) % config.vocab_size

    def run_mixed(implementation: str) -> Tensor:
        if implementation == "masters":
            return run_block("torch")
        with device.autocast():
            return add_term(*forward(x_BTC, ids_BT, None, rope, None))

    def run_block(implementation: str) -> Tensor:
        is_native = implementation == "native" and not config.window
        low_block.attention.attention_fn = find_attention("native" if is_native else "flash")
        set_block_kernels(low_block, load_entry("block_kernels", implementation))
        return add_term(*forward_low(low_x_BTC, ids_BT, None, rope, None))

    def run_loss(implementation: str) -> None:
        logits_NV = torch.zeros(
            rows, config.padded_vocab_size, dtype=device.dtype, device=device.torch_device
        )
        softmax = load_entry("output_layer", implementation).softmax
        softmax(logits_NV, targets_N, config.vocab_size, config.logit_softcap, overwrite=True)

    return {
        "attention": lambda name: find_attention(name)(
            q, k, v, mask=None, causal=True, dropout=None, **window
        ),
        "block": run_block,
        "loss": run_loss,
        "mixed": run_mixed,
    }


def _find_error(call: Callable[[], object]) -> str:
    """Call a function and return the message of its exception, or "" if it succeeds.

    Out-of-memory errors are raised.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # warnings of unsupported backends
            call()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return " ".join(str(error).split()) or type(error).__name__
    return ""
