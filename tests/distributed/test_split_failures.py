"""Failures while a split model is set up leave the model untouched or end the run at once."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatoken.base.errors import MegatokenError
from megatoken.base.system.device import memory_errors
from megatoken.distributed.comm import Comm, join_process_group
from megatoken.distributed.env import DistEnv
from megatoken.distributed.parallel_dims import build_dims
from megatoken.plan.tuning import micro_batch
from megatoken.plan.tuning.compilation import compile_forward
from megatoken.plan.tuning.micro_batch import tune_micro_batch
from megatoken.train.state import StepConfig, TrainState
from tests.distributed.sharded_run import build_sharded, collect_ranks, train
from tests.tiny_model import CPU, TINY_GPT, tiny_step_config

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


def compile_badly(module: nn.Module, **_: object) -> None:
    """In place of `nn.Module.compile`: the forward works, the backward does not."""
    error = RuntimeError("no kernel for this card")

    def call(*args):
        result = module._call_impl(*args)
        if isinstance(result, tuple):  # the two terms of a block
            return FailingBackward.apply(result[0], error), result[1]
        return FailingBackward.apply(result, error)

    module._compiled_call_impl = call


def build(layout: str, comm: Comm) -> TrainState:
    sharding, tp_size = LAYOUTS[layout]
    dims = build_dims(sharding, tp_size, comm.dist_env)
    return build_sharded(TINY_GPT, dims, comm, starts_reduction=False)


def train_three(state: TrainState) -> list[float]:
    state.start_grad_reduction()
    return train(state, 3)


class Memory:
    """Imitates a GPU with room for `largest` sequences of 10 bytes; more fail in the backward."""

    def __init__(self, largest: int, patch: pytest.MonkeyPatch) -> None:
        self.largest, self.sizes = largest, []
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


def work(env: DistEnv, folder: Path) -> dict[str, Any]:
    found = {}
    step_config = tiny_step_config(2)
    with join_process_group(env, "cpu") as comm:
        for layout in LAYOUTS:
            untouched, tuned, compiled = (build(layout, comm) for _ in range(3))
            with pytest.MonkeyPatch.context() as patch:
                memory = Memory(4 - 2 * env.rank, patch)  # one rank has less than the other
                rates = tune_micro_batch(tuned, step_config, CPU, 8)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(nn.Module, "compile", compile_badly)
                note = compile_forward(compiled, step_config, CPU, "blocks")
                found[layout] = {"compiled": train_three(compiled)}
            found[layout] |= {"rates": list(rates), "tried": memory.sizes, "note": note}
            found[layout]["tuned"] = train_three(tuned)
            found[layout]["untouched"] = train_three(untouched)
    try:
        with (
            join_process_group(env, "cpu") as comm,
            memory_errors(f"rank {env.rank}", "lower it"),
            pytest.MonkeyPatch.context() as patch,
        ):
            Memory(1 - env.rank, patch)
            tune_micro_batch(build("zero3", comm), step_config, CPU, 8)
    except MegatokenError as error:
        found["end"] = (str(error), int(error.code))
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found."""
    return collect_ranks(work, tmp_path_factory.mktemp("ranks"), nprocs=2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sizes_that_do_not_fit_and_a_failed_compile_change_nothing(
    layout: str, found: list[dict[str, Any]]
):
    for rank in (results[layout] for results in found):
        assert rank["rates"] == [1, 2]  # what fits on both
        # Without sharding, sizes are tried until memory runs out.
        assert rank["tried"] == ([1, 2, 4] if layout == "ddp" else [1, 2])
        assert "no kernel for this card" in rank["note"]
        assert rank["tuned"] == rank["compiled"] == rank["untouched"]


def test_memory_that_ends_in_a_split_model_ends_the_run(found: list[dict[str, Any]]):
    whole, failed = (rank["end"] for rank in found)
    assert "rank 1" in failed[0]
    assert (failed[1], whole[1]) == (2, 7)
    assert "timed out" not in whole[0].lower()
