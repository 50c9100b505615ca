"""The choice of the micro-batch: which sizes are tried, and which of them is taken."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatoken.base.errors import ConfigError
from megatoken.data.dataloader import Batch
from megatoken.distributed.parallel_dims import ParallelDims
from megatoken.plan.tuning import compilation, micro_batch
from megatoken.plan.tuning.compilation import compile_forward
from megatoken.plan.tuning.kernels import step_key
from megatoken.plan.tuning.micro_batch import (
    candidate_sizes,
    find_rates,
    pick_micro_batch,
    tune_micro_batch,
)
from megatoken.train.state import StepConfig, TrainState
from megatoken.train.step import train_step
from tests.tiny_model import CPU, TINY_GPT, tiny_batch, tiny_config, tiny_state, tiny_step_config


def test_largest_micro_batch_unless_a_smaller_one_is_clearly_faster():
    for rates, picked in (
        ({1: 0.0}, 1),  # nothing measured: there was no choice
        ({1: 100.0, 2: 99.5, 4: 98.5}, 4),  # within the noise: the fewest forwards
        ({1: 100.0, 2: 120.0, 4: 110.0}, 2),  # clearly faster
        ({1: 50.0, 2: 90.0, 4: 100.0}, 4),
    ):
        assert pick_micro_batch(rates) == picked


def test_candidate_sizes():
    assert candidate_sizes(16, 256, "cpu") == [1, 2, 4, 8, 16]
    assert candidate_sizes(48, 1024, "cpu") == [1, 2, 3, 6]
    assert candidate_sizes(12, 1024, "cuda") == [1, 2, 3, 6, 12]
    assert candidate_sizes(7, 1 << 20, "cpu") == [1]


class Memory:
    """A replacement of `forward_backward` that fits `largest` sequences and is slow beyond `fast`.

    A step has `batch_seqs` sequences. A smaller size is tried with two micro-batches, because
    gradients are kept between them.
    """

    def __init__(self, largest: int, fast: int = 64, batch_seqs: int = 16) -> None:
        self.largest, self.fast, self.batch_seqs = largest, fast, batch_seqs
        self.sizes = []

    def __call__(
        self, state: TrainState, step_config: StepConfig, device: object, batch: Batch
    ) -> None:
        size = step_config.micro_batch
        rows, length = batch.inputs_BT.shape
        assert (rows, length) == (min(2 * size, self.batch_seqs), TINY_GPT.seq_len)
        self.sizes.append(size)
        for parameter in state.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        if size > self.largest:
            raise torch.OutOfMemoryError("out of memory")
        self.seconds = max(1, size / self.fast) * rows / size

    def time_once(self, call: Callable[[], object], _: object) -> float:
        call()
        return self.seconds

    def tune(self, patch: pytest.MonkeyPatch) -> list[int]:
        """Return the sizes that were tried; the state must have no gradients afterwards."""
        patch.setattr(micro_batch, "forward_backward", self)
        patch.setattr(micro_batch, "time_once", self.time_once)
        state = tiny_state()
        rates = tune_micro_batch(state, tiny_step_config(), CPU, self.batch_seqs)
        assert all(parameter.grad is None for parameter in state.model.parameters())
        assert state.step == 0
        return list(rates)


def test_the_search_ends_out_of_memory_or_at_two_sizes_that_are_no_faster(
    monkeypatch: pytest.MonkeyPatch,
):
    memory = Memory(largest=4)
    assert memory.tune(monkeypatch) == [1, 2, 4]
    assert memory.sizes == [1, 1, 2, 2, 4, 4, 8]  # seconds each: one repeat after the first
    assert Memory(largest=64, fast=2, batch_seqs=64).tune(monkeypatch) == [1, 2, 4, 8]
    with pytest.raises(ConfigError):
        Memory(largest=0).tune(monkeypatch)


@pytest.mark.parametrize("fault", ["", "lost gradient", "one micro-batch"])
def test_cuda_graphs_are_proved_on_replays_of_two_micro_batches(
    fault: str, monkeypatch: pytest.MonkeyPatch
):
    state, rows = tiny_state(), []

    def compile_to_graphs(model, mode):
        assert mode == "reduce-overhead"

        def replay(ids):
            rows.append(len(ids))
            if fault == "one micro-batch" and len(rows) == 2:
                raise RuntimeError("tensor output of CUDAGraphs that has been overwritten")
            hidden = model(ids)
            return hidden.detach() if fault and len(rows) > 4 else hidden

        return replay

    monkeypatch.setattr(torch, "compile", compile_to_graphs)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: None)
    reason = compile_forward(state, tiny_step_config(2), CPU, "graphs")
    assert ("change the gradient" in reason) == (fault == "lost gradient")
    assert bool(reason) == bool(fault) == (not state.compute.cuda_graphs)
    if fault:
        assert state.compute.forward is state.model
        assert all(parameter.grad is None for parameter in state.model.parameters())
    else:
        assert rows == [2] * 6


@pytest.mark.filterwarnings("ignore")  # of torch's compiler
def test_memory_that_ends_during_compilation_is_not_a_failure_of_the_compiler(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(compilation, "forward_backward", Memory(largest=1, batch_seqs=2))
    with pytest.raises(torch.OutOfMemoryError):
        compile_forward(tiny_state(), tiny_step_config(2), CPU, "blocks")


def test_a_size_less_than_half_as_fast_as_a_smaller_one_is_measured_again(
    monkeypatch: pytest.MonkeyPatch,
):
    # Of 1 sequence; of 2, disturbed, then not; of 4; of 8.
    seconds = iter([2.0, 10.0, 2.5, 4.0, 5.0])
    monkeypatch.setattr(micro_batch, "_time_forward_backward", lambda *_: (next(seconds), 0))
    rates = tune_micro_batch(tiny_state(), tiny_step_config(), CPU, 8)
    expected = {1: 1, 2: 2 / 1.25, 4: 2, 8: 8 / 5}
    assert {size: rate / 16 for size, rate in rates.items()} == pytest.approx(expected)


def test_what_a_cpu_has_measured_is_kept_for_every_depth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MEGATOKEN_CACHE", str(tmp_path))
    rates = iter([{1: rate, 2: rate} for rate in (50.0, 60.0, 70.0)])
    monkeypatch.setattr(micro_batch, "tune_micro_batch", lambda *_: next(rates))

    def find(n_layer=2, **settings):
        model = replace(TINY_GPT, n_layer=n_layer)
        key = step_key(tiny_config(**settings), model, CPU, ParallelDims(), "off")
        return find_rates(tiny_state(), tiny_step_config(), CPU, 8, "off", key)[1]

    assert find() == find(n_layer=5, machine__micro_batch=2) == 50.0
    cache = tmp_path / "micro_batches.json"
    cache.write_text(json.dumps({key: {} for key in json.loads(cache.read_text())}))  # damaged
    assert find() == find() == 60.0
    assert find(machine__activation_checkpointing="block") == 70.0


@pytest.mark.filterwarnings("ignore")  # of torch's compiler
def test_sizes_are_timed_compiled_and_the_step_runs_the_chosen_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each size is compiled separately, without dynamic shapes, and the next step compiles nothing."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    compiled, plain = tiny_state(), tiny_state()
    counters = torch._dynamo.utils.counters
    counters.clear()
    assert list(tune_micro_batch(compiled, tiny_step_config(), CPU, 2, "blocks")) == [1, 2]
    graphs = counters["stats"]["unique_graphs"]
    found, expected = (
        train_step(state, tiny_step_config(2), CPU, tiny_batch()) for state in (compiled, plain)
    )
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    assert counters["stats"]["unique_graphs"] == graphs >= 2


@pytest.mark.filterwarnings("ignore")  # of torch's compiler
def test_a_size_that_does_not_compile_ends_the_search(monkeypatch: pytest.MonkeyPatch):
    sizes = []

    def compile_small_sizes(graph, inputs):
        sizes.append(max(len(x) for x in inputs if isinstance(x, Tensor) and x.dim() == 3))
        if sizes[-1] > 1:
            raise OSError("the compiler was killed")
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=compile_small_sizes))
    assert list(tune_micro_batch(tiny_state(), tiny_step_config(), CPU, 4, "blocks")) == [1]
    assert sizes[-1] == 2
