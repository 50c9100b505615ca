"""What fails while a split model is set up: it is found before the model is touched, or it ends the run at once."""

import json
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatoken.data.dataloader import Batch
from megatoken.distributed.comm import Comm, join_process_group
from megatoken.distributed.env import DistEnv
from megatoken.distributed.parallel_dims import build_dims
from megatoken.errors import MegatokenError
from megatoken.launch.local import find_free_port
from megatoken.model.gpt import GPT, init_weights
from megatoken.system.device import memory_errors
from megatoken.train import micro_batch
from megatoken.train.compilation import compile_forward
from megatoken.train.micro_batch import tune_micro_batch
from megatoken.train.state import StepConfig, TrainState, build_state
from megatoken.train.step import train_step
from tests.ranks import run_ranks
from tests.tiny_model import CPU, TINY_GPT, tiny_batch, tiny_config, tiny_step_config

WORLD = 2
LAYOUTS = {"zero1": ("zero1", 1), "zero3": ("zero3", 1), "tensor": ("none", 2), "ddp": ("none", 1)}


class FailingBackward(torch.autograd.Function):
    """The identity, whose backward raises an error."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, error: Exception) -> Tensor:
        ctx.error = error
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise ctx.error


def compile_badly(module: nn.Module) -> None:
    """In place of `nn.Module.compile`: the forward works, the backward does not."""
    error = RuntimeError("no kernel for this card")
    module._compiled_call_impl = lambda *args: FailingBackward.apply(
        module._call_impl(*args), error
    )


def build(layout: str, comm: Comm) -> TrainState:
    sharding, tp_size = LAYOUTS[layout]
    dims = build_dims(sharding, tp_size, comm.dist_env)
    with torch.device("cpu" if dims.is_unsharded else "meta"):
        model = GPT(TINY_GPT)
    state = build_state(model, tiny_config(), CPU, dims)
    state.sharded.copy_from_full(init_weights(model, 1))
    state.comm = comm
    return state


def train(state: TrainState, comm: Comm) -> list[float]:
    state.start_grad_reduction(comm)
    dims, step_config = state.dims, tiny_step_config(2, optim__lr=1e-2)
    share = 8 // dims.dp_size
    rows = slice(dims.dp_rank * share, (dims.dp_rank + 1) * share)
    batches = [[part[rows] for part in tiny_batch(step)] for step in range(3)]
    return [train_step(state, step_config, CPU, Batch(*batch)).loss for batch in batches]


class Memory:
    """Stands for a GPU with room for `largest` sequences, each of 10 bytes; a larger forward fails in its backward."""

    def __init__(self, largest: int, patch: pytest.MonkeyPatch) -> None:
        self.largest, self.sizes = largest, list[int]()
        self._measure = micro_batch._time_forward_backward
        patch.setattr(
            micro_batch, "_free_bytes", lambda device: 10.0 * largest / micro_batch.MEMORY_SHARE
        )
        patch.setattr(micro_batch, "_time_forward_backward", self.measure)

    def measure(
        self, state: TrainState, step_config: StepConfig, device: object, rows: int
    ) -> tuple[float, int]:
        size = step_config.micro_batch
        self.sizes.append(size)
        hook = state.model.blocks[0].mlp.register_forward_hook(
            self.fail if size > self.largest else lambda *_: None
        )
        try:
            self._measure(state, step_config, CPU, rows)
        finally:
            hook.remove()
        return 1.0, 10 * size

    @staticmethod
    def fail(_module: nn.Module, _inputs: object, output: Tensor) -> Any:
        error = torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. Including advice"
        )
        return FailingBackward.apply(output, error)


def work(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    dist_env = DistEnv(
        rank=rank, world_size=WORLD, local_rank=rank, local_world_size=WORLD, port=port
    )
    found: dict[str, Any] = {}
    with join_process_group(dist_env, "cpu") as comm:
        for layout in LAYOUTS:
            found[layout] = {"untouched": train(build(layout, comm), comm)}
            state = build(layout, comm)
            with pytest.MonkeyPatch.context() as patch:
                # One rank has less memory than the other.
                memory = Memory(4 - 2 * rank, patch)
                rates = tune_micro_batch(state, tiny_step_config(), CPU, 8)
                found[layout] |= {
                    "rates": list(rates),
                    "tried": memory.sizes,
                    "tuned": train(state, comm),
                }
            state = build(layout, comm)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(nn.Module, "compile", compile_badly)
                note = compile_forward(state, tiny_step_config(2), CPU, "blocks")
                found[layout] |= {"note": note, "compiled": train(state, comm)}
    start = time.monotonic()
    try:
        with (
            join_process_group(dist_env, "cpu") as comm,
            memory_errors(f"rank {rank}", "lower it"),
            pytest.MonkeyPatch.context() as patch,
        ):
            Memory(1 - rank, patch)
            tune_micro_batch(build("zero3", comm), tiny_step_config(), CPU, 8)
    except MegatokenError as error:
        found["end"] = (str(error), int(error.code), time.monotonic() - start)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank wrote."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(work, find_free_port(), str(folder), nprocs=WORLD)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sizes_that_do_not_fit_change_nothing(layout: str, found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank[layout]["rates"] == [1, 2]  # what fits on both
        assert rank[layout]["tuned"] == rank[layout]["untouched"]
        # A whole model finds the end of memory by trying.
        assert rank[layout]["tried"] == ([1, 2, 4] if layout == "ddp" else [1, 2])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_failed_compile_changes_nothing(layout: str, found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert (
            rank[layout]["note"]
            == "torch.compile failed, the model runs uncompiled: no kernel for this card"
        )
        assert rank[layout]["compiled"] == rank[layout]["untouched"]


def test_memory_that_ends_in_a_split_model_ends_the_run_at_once(
    found: list[dict[str, Any]],
) -> None:
    whole, failed = (rank["end"] for rank in found)
    assert failed[:2] == ["out of memory: Tried to allocate 2.00 GiB. — rank 1 — lower it", 2]
    assert whole[0].startswith("rank 0 lost another rank: ")
    assert whole[1] == 7
    assert max(whole[2], failed[2]) < 100  # not after the timeout of a collective
