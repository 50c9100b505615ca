"""Compile the forward, and run one forward and backward to check that it works.

A sharded model cannot recover from an exception in its forward or backward: FSDP2 would no longer
reduce gradients, and other ranks would wait in a collective. So each process first tries the
compiler on a small model of its own, without communication. An unsharded model is compiled and run
without communication between replicas.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from megatoken.base.config.schema import MachineConfig
from megatoken.base.errors import ConfigError, MegatokenError
from megatoken.base.system.device import Device, is_out_of_memory
from megatoken.base.system.machine import find_compiler
from megatoken.base.system.torch_compat import uncompile
from megatoken.data.dataloader import Batch
from megatoken.distributed.comm import Comm, peer_errors
from megatoken.distributed.env import DistEnv
from megatoken.model.dropout import sequence_keys
from megatoken.model.gpt import GPT, set_activation_checkpointing, set_attention
from megatoken.train.state import StepConfig, TrainState
from megatoken.train.step import forward_backward

MIN_COMPILED_STEPS = 500  # a shorter run would spend most of its time compiling
GRADIENT_TOLERANCE = 1e-2  # relative difference of gradient norms; some kernels sum in any order


def wants_compile(machine: MachineConfig, device: Device, total_steps: int) -> tuple[str, str]:
    """Return the compile mode to use, and a warning.

    The warning is "" unless the configured mode is impossible on this machine.
    """
    if machine.compile == "auto":
        # Blocks compile faster than a full model, and their gradients arrive during the backward,
        # to be reduced while it computes.
        pays_off = device.type == "cuda" and total_steps >= MIN_COMPILED_STEPS
        return ("blocks" if pays_off else "off"), ""
    if machine.compile == "graphs" and device.type != "cuda":
        return "off", "CUDA graphs are for CUDA: the model runs uncompiled (machine.compile=on)"
    if machine.compile != "off" and device.type == "cpu" and not find_compiler():
        return (
            "off",
            "no C++ compiler found: the model runs uncompiled (install g++ to change that)",
        )
    return machine.compile, ""


def compile_forward(state: TrainState, step_config: StepConfig, device: Device, mode: str) -> str:
    """Compile the compute model and run it once; return an error message, "" on success.

    If compilation fails on any rank, all ranks use the uncompiled model. Raises ConfigError if a
    sharded model fails to compile after the small trial model succeeded.

    mode: `on` compiles the full model; `blocks` compiles each block separately, so that all blocks
    share the code generated for the first; `graphs` compiles the full model with CUDA graphs. A
    sharded model is always compiled by blocks.
    """
    shape = step_config.micro_batch, state.model.config.seq_len
    ids = torch.zeros(shape, dtype=torch.int64, device=device.torch_device)
    reason = ""
    plain = replace(state.compute, is_compiled=False)
    state.compute = replace(plain, is_compiled=True)
    try:
        if state.dims.is_unsharded:
            alone = without_replicas(state)
            _compile_full(alone, step_config, device, ids, mode)
            state.compute = alone.compute
        else:
            _try_small_model(state.model, device, ids)
    except Exception as error:  # compilers raise many types
        if is_out_of_memory(error):
            raise
        reason = _first_line(error)
    if state.comm.any(bool(reason)):
        uncompile(plain.model)
        state.compute = plain
        reason = f"torch.compile failed, the model runs uncompiled: {reason or 'on another rank'}"
    elif not state.dims.is_unsharded:
        _compile_split(state, step_config, device, ids)
    free_gradients(state, device)
    return reason


def without_replicas(state: TrainState) -> TrainState:
    """Return a copy of the state that does not communicate; a sharded state is returned as it is.

    An exception in the copy's forward or backward cannot leave other ranks in a collective.
    """
    return replace(state, comm=Comm(DistEnv())) if state.dims.is_unsharded else state


def free_gradients(state: TrainState, device: Device) -> None:
    """Set all gradients to None and release cached GPU memory."""
    state.zero_grad()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _compile_full(
    state: TrainState, step_config: StepConfig, device: Device, ids: Tensor, mode: str
) -> None:
    """Compile an unsharded model and run it; exceptions of the compiler pass through."""
    if mode != "graphs":
        if mode == "blocks":
            _compile_blocks(state.compute.model)
        else:
            forward = torch.compile(state.compute.model)
            state.compute = replace(state.compute, forward=forward)
        forward_backward(state, step_config, device, Batch(ids, ids))
        return
    forward = torch.compile(state.compute.model, mode="reduce-overhead")
    state.compute = replace(state.compute, forward=forward, cuda_graphs=True)
    # Two micro-batches: the second replays over the memory where the first left its gradients.
    ids = torch.cat([ids, ids])
    norms = []
    for _ in range(3):  # compile, record, replay
        forward_backward(state, step_config, device, Batch(ids, ids))
        norms.append(float(state.sharded.global_grad_norm(state.comm)))
        state.zero_grad()
    if not all(math.isclose(norm, norms[0], rel_tol=GRADIENT_TOLERANCE) for norm in norms):
        values = ", ".join(f"{norm:.4g}" for norm in norms)
        raise RuntimeError(f"CUDA graphs change the gradient: its norm was {values}")


def _compile_split(state: TrainState, step_config: StepConfig, device: Device, ids: Tensor) -> None:
    _compile_blocks(state.model)
    try:
        with peer_errors(state.comm.dist_env):
            forward_backward(state, step_config, device, Batch(ids, ids))
    except Exception as error:
        if isinstance(error, MegatokenError) or is_out_of_memory(error):
            raise
        what = f"torch.compile failed on the split model: {_first_line(error)}"
        raise ConfigError(what, f"rank {state.dims.rank}", "set machine.compile=off") from None


def _try_small_model(model: GPT, device: Device, ids: Tensor) -> None:
    """Compile and run a one-block copy of the model; exceptions of the compiler pass through."""
    config = replace(model.config, n_layer=1, vocab_size=1)
    small = GPT(config, seed=None).to(device.torch_device, device.dtype)
    set_attention(small, model.attention_name)
    set_activation_checkpointing(small, model.activation_checkpointing)
    _compile_blocks(small)
    with device.autocast():
        keys = sequence_keys(0, 0, 0, len(ids), device.torch_device)
        small(ids, dropout_keys_B=keys).sum().backward()  # type: ignore[no-untyped-call]


def _compile_blocks(model: GPT) -> None:
    for part in (*model.blocks, model.norm):
        part.compile(dynamic=False)  # sizes vary only while the micro-batch is chosen


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
