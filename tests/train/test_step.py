"""One optimizer step: any split of the batch is the same step, and bad numbers never reach the weights."""

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatoken.config.model_config import ModelConfig
from megatoken.config.schema import OptimConfig
from megatoken.data.dataloader import Batch
from megatoken.distributed.parallel_dims import ParallelDims
from megatoken.errors import NumericsError
from megatoken.model.gpt import set_activation_checkpointing
from megatoken.objectives.answer_scores import fit_rows
from megatoken.objectives.objective import build_objective
from megatoken.optim.optimizer import build_optimizer
from megatoken.train.step import (
    count_rows,
    forward_backward,
    train_step,
    train_step_async,
    wait_for_steps,
)
from tests.tiny_model import (
    CPU,
    TINY_GPT,
    TINY_LLAMA,
    tiny_batch,
    tiny_config,
    tiny_rows,
    tiny_state,
    tiny_step_config,
)


def gradients(
    micro_batch: int, chunk: int = 1024, recompute: str = "none", **options: Any
) -> tuple[float, dict[str, Any]]:
    """Return loss and gradients of a batch. options: of tiny_state."""
    state = tiny_state(**options)
    set_activation_checkpointing(state.model, recompute)
    step_config = tiny_step_config(micro_batch, machine__loss_chunk=chunk)
    loss = forward_backward(state, step_config, CPU, tiny_batch())
    return loss.item(), {name: param.grad for name, param in state.model.named_parameters()}


@pytest.mark.parametrize(("micro_batch", "chunk"), [(1, 0), (2, 5), (3, 1024), (4, 5)])
def test_gradients_do_not_depend_on_micro_batch_or_loss_chunk(micro_batch: int, chunk: int):
    whole_loss, whole = gradients(8, chunk=0)
    loss, split = gradients(micro_batch, chunk)
    assert loss == pytest.approx(whole_loss, rel=1e-6)
    torch.testing.assert_close(split, whole, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("rows", "row_tokens", "size"),
    [
        (512, 256, 16),  # of the context's length
        (512, 24, 128),  # 170 rows have the tokens of 16 of 256
        (96, 24, 128),  # all in one
        (512, 257, 8),  # a pair of answers: more than the context
        (512, 512, 8),
        (24, 60, 32),
    ],
)
def test_micro_batches_of_shorter_rows_have_more_of_them(rows: int, row_tokens: int, size: int):
    assert fit_rows(16, rows, row_tokens, 256) == size


@pytest.mark.parametrize("deterministic", [False, True])
def test_rows_of_a_micro_batch_are_those_that_the_widest_process_has(deterministic: bool):
    state = tiny_state()
    state.objective = build_objective(tiny_config(objective__name="grpo").objective, 64)
    state.comm.gather = lambda own: [own, 2 * own]  # type: ignore[method-assign,assignment]
    batch = Batch(*[torch.zeros(32, 4)] * 2)
    step_config = tiny_step_config(2, machine__deterministic=deterministic)
    assert count_rows(state, step_config, batch) == (2 if deterministic else 4)


def test_step_equals_plain_torch():
    state = tiny_state()
    twin = copy.deepcopy(state.model)
    step_config = tiny_step_config(2, optim__grad_clip=0.5)
    inputs, targets = tiny_rows()
    report = train_step(state, step_config, CPU, Batch(inputs, targets))
    optimizer = build_optimizer(twin, OptimConfig(lr=step_config.schedule.lr(0)))
    logits = twin.logits(inputs)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
    optimizer.step()
    assert report.loss == pytest.approx(loss.item(), rel=1e-6)
    assert report.grad_norm == pytest.approx(norm.item(), rel=1e-5)
    assert report.lr == step_config.schedule.lr(0)
    assert report.step == state.step == 1
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(state.model.get_parameter(name), parameter, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("form", "clip"), [("foreach", 0.05), ("fused", 0.0), ("fused", 0.05)])
def test_adamw_implementations_agree(form: str, clip: float):
    states = [tiny_state(form=name) for name in (form, "loop")]
    assert [state.skips_bad_on_device for state in states] == [form == "fused", False]
    for state in states:
        for step in range(4):
            train_step(state, tiny_step_config(optim__grad_clip=clip), CPU, tiny_batch(step))
    weights = [dict(state.model.named_parameters()) for state in states]
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_bad_step_and_all_after_it_leave_the_weights_until_it_is_read(name: Any):
    optim = OptimConfig(name=name, cautious_decay=name == "muon")
    state, alone = tiny_state(optim=optim), tiny_state(optim=optim)
    step_config = tiny_step_config()
    pending = []
    for step in range(5):
        if step == 2:
            with torch.no_grad():
                kept = state.model.norm.bias[0].clone()
                state.model.norm.bias[0] = float("nan")
        pending.append(train_step_async(state, step_config, CPU, tiny_batch(step)))
        if step == 2:
            with torch.no_grad():
                state.model.norm.bias[0] = kept
    for step in range(2):
        train_step(alone, step_config, CPU, tiny_batch(step))
    assert [report.step for report in wait_for_steps(state, pending[:2])] == [1, 2]
    assert state.step == 5
    metrics = wait_for_steps(state, pending)
    assert [(report.step, report.bad) for report in metrics] == [(1, False), (2, False), (3, True)]
    assert math.isnan(metrics[-1].loss)
    assert state.step == 2
    for each in (state, alone):
        train_step(each, step_config, CPU, tiny_batch(7))  # the next one counts again
    for key, parameter in alone.model.named_parameters():
        other = state.model.get_parameter(key)
        assert torch.equal(other, parameter), key
        for part, value in alone.optimizer.state[parameter].items():
            assert torch.equal(state.optimizer.state[other][part], value), (key, part)


@pytest.mark.parametrize("form", ["fused", "loop"])
def test_a_step_without_gradient_ends_the_run_and_leaves_the_weights(form: str):
    state, step_config = tiny_state(form=form), tiny_step_config()
    train_step(state, step_config, CPU, tiny_batch())
    weights = copy.deepcopy(state.model.state_dict())
    # Reaches no weight but the output layer's.
    state.forward = lambda ids: torch.zeros(*ids.shape, TINY_GPT.d_model)
    with pytest.raises(NumericsError, match=r"gradient is 0 — step 2"):
        train_step(state, step_config, CPU, tiny_batch())
    assert state.step == 1
    torch.testing.assert_close(state.model.state_dict(), weights, rtol=0, atol=0)


def test_gradients_of_earlier_micro_batches_survive_in_the_memory_of_cuda_graphs(
    monkeypatch: pytest.MonkeyPatch,
):
    state, step_config = tiny_state(), tiny_step_config(2)
    marks = []

    def mark() -> None:
        """The next step's graphs write to the memory of this one's results."""
        marks.append([p.grad.zero_() for p in state.model.parameters() if p.grad is not None])

    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", mark)
    state.cuda_graphs = True
    forward_backward(state, step_config, CPU, tiny_batch())
    _, expected = gradients(8)
    for name, param in state.model.named_parameters():
        torch.testing.assert_close(param.grad, expected[name], rtol=1e-5, atol=1e-7)
    state.optimizer.zero_grad()
    forward_backward(state, step_config, CPU, tiny_batch())
    assert marks == [[], []]  # once a step, when no gradient is left


def kept_bytes(recompute: str, model_config: ModelConfig) -> int:
    """Return the bytes that the forward keeps for the backward."""
    state = tiny_state(model_config=model_config)
    set_activation_checkpointing(state.model, recompute)
    parameters = {p.untyped_storage().data_ptr() for p in state.model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = state.forward(tiny_rows()[0])
    assert hidden.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("model_config", [TINY_GPT, TINY_LLAMA], ids=["gpt", "llama"])
def test_activation_checkpointing_saves_memory_and_keeps_gradients(model_config: ModelConfig):
    """It repeats dropout."""
    plain, gelu, block = (kept_bytes(what, model_config) for what in ("none", "gelu", "block"))
    wide = model_config.n_layer * 8 * 16 * model_config.d_ff * 4
    assert gelu <= plain - wide + 4096  # of each layer the MLP's wide output, fp32
    assert block < plain / 3
    options: dict[str, Any] = {"dropout": 0.3, "model_config": model_config}
    expected = gradients(4, **options)
    for recompute in ("gelu", "block"):
        found = gradients(4, recompute=recompute, **options)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("micro_batch", "n_ranks"), [(6, 1), (1, 2), (2, 2), (3, 2)])
def test_dropout_does_not_depend_on_micro_batch_or_processes(micro_batch: int, n_ranks: int):
    """Six sequences at once, and as two processes' shares in micro-batches."""
    inputs, targets = (rows[:6] for rows in tiny_rows())
    whole, shared = tiny_state(dropout=0.3), tiny_state(dropout=0.3)
    whole_loss = forward_backward(whole, tiny_step_config(6), CPU, Batch(inputs, targets))
    loss = 0.0
    for rank in range(n_ranks):
        shared.sharded = replace(shared.sharded, dims=ParallelDims(dp_replicate=n_ranks, rank=rank))
        batch = Batch(*(rows.chunk(n_ranks)[rank] for rows in (inputs, targets)))
        share = forward_backward(shared, tiny_step_config(micro_batch), CPU, batch)
        loss += float(share) / n_ranks
    assert loss == pytest.approx(float(whole_loss), rel=1e-6)
    for name, parameter in whole.model.named_parameters():
        gradient = shared.model.get_parameter(name).grad
        torch.testing.assert_close(gradient / n_ranks, parameter.grad, rtol=1e-5, atol=1e-7)


def test_every_step_and_seed_drops_other_values():
    def loss(dropout: float, seed: int, step: int) -> float:
        state = tiny_state(dropout=dropout)
        state.step = step
        return forward_backward(state, tiny_step_config(seed=seed), CPU, tiny_batch()).item()

    assert loss(0.3, 1, 0) == loss(0.3, 1, 0)
    assert len({loss(0.3, 1, 0), loss(0.3, 1, 1), loss(0.3, 2, 0), loss(0.0, 1, 0)}) == 4


def test_rows_of_one_sequence_need_no_mask():
    inputs, targets = tiny_rows()
    starts = torch.zeros_like(inputs)
    starts[0, 8:] = 8
    first, second = Batch(inputs, targets, starts).split(4)
    assert first.starts_BT is not None
    assert (second.starts_BT, len(second)) == (None, 4)


def test_only_weights_that_train_are_copied_in_a_step():
    state = tiny_state(model_config=replace(TINY_GPT, lora_rank=2))
    state.enable_master_weights(torch.bfloat16)
    names = [name for name, _ in state.model.named_parameters()]
    copies = list(state.compute_model.parameters())
    writes = [low._version for low in copies]
    train_step(state, tiny_step_config(), CPU, tiny_batch())
    written = {name for name, low, n in zip(names, copies, writes, strict=True) if low._version > n}
    assert written == {name for name in names if ".lora." in name}
    for low, param in zip(copies, state.model.parameters(), strict=True):
        assert torch.equal(low, param.to(torch.bfloat16))
