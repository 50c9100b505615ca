"""One optimizer step: any split of the batch is the same step, and bad numbers never reach the weights."""

import copy

import pytest
import torch

from megatoken.config import Optim
from megatoken.errors import Exit, Fault
from megatoken.model.gpt import use_recompute
from megatoken.model.loss import cross_entropy
from megatoken.optim.groups import build_optimizer
from megatoken.presets import Shape
from megatoken.train.step import accumulate_gradients, dropout_seed, land, launch_step, train_step
from tests.tiny import CPU, LLAMA, SHAPE, tiny_batch, tiny_plan, tiny_state


def gradients(micro_batch: int, chunk: int = 1024, dropout: float = 0.0) -> tuple[float, dict[str, torch.Tensor]]:
    state = tiny_state(dropout=dropout)
    plan = tiny_plan(micro_batch, machine__loss_chunk=chunk, model__dropout=dropout)
    loss = accumulate_gradients(state, plan, CPU, *tiny_batch())
    return loss.item(), {name: p.grad.clone() for name, p in state.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
@pytest.mark.parametrize("chunk", [0, 5, 1024])
def test_any_split_of_the_batch_is_the_same_step(micro_batch: int, chunk: int) -> None:
    whole_loss, whole = gradients(8, chunk=0)
    loss, split = gradients(micro_batch, chunk)
    assert loss == pytest.approx(whole_loss, rel=1e-6)
    for name, gradient in whole.items():
        torch.testing.assert_close(split[name], gradient, rtol=1e-5, atol=1e-7)


def test_uncounted_targets_weigh_nothing_wherever_they_fall() -> None:
    inputs, targets = tiny_batch()
    targets = targets.clone()
    targets[0] = -1  # one micro-batch holds none that count: a mean of means would be wrong here
    losses = []
    for micro_batch in (1, 8):
        state = tiny_state()
        losses.append(accumulate_gradients(state, tiny_plan(micro_batch), CPU, inputs, targets).item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_the_step_equals_torch_by_hand() -> None:
    state = tiny_state()
    twin = copy.deepcopy(state.model)
    plan = tiny_plan(2, optim__clip=0.5)
    inputs, targets = tiny_batch()
    report = train_step(state, plan, CPU, inputs, targets)
    optimizer = build_optimizer(dict(twin.named_parameters()), state.placement.sizes, Optim(lr=plan.schedule.lr(0)))
    logits = twin.logits(twin(inputs))
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
    optimizer.step()
    assert report.loss == pytest.approx(loss.item(), rel=1e-6)
    assert report.grad_norm == pytest.approx(norm.item(), rel=1e-5)
    assert report.lr == plan.schedule.lr(0)
    assert report.step == state.step == 1
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(state.model.get_parameter(name), parameter, rtol=1e-4, atol=1e-6)


def test_matrices_decay_and_vectors_do_not() -> None:
    decayed, kept = tiny_state().optimizer.param_groups
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    assert all(p.dim() == 2 for p in decayed["params"])
    assert all(p.dim() == 1 for p in kept["params"])
    counted = sum(p.numel() for group in (decayed, kept) for p in group["params"])
    assert counted == sum(p.numel() for p in tiny_state().model.parameters())


def test_numbers_that_are_not_finite_stop_before_the_update() -> None:
    state = tiny_state()
    with torch.no_grad():
        state.model.norm.bias[0] = float("inf")
    before = {name: tensor.clone() for name, tensor in state.model.state_dict().items()}
    with pytest.raises(Fault, match="step 1") as fault:
        train_step(state, tiny_plan(), CPU, *tiny_batch())
    assert fault.value.code == Exit.NUMERICS
    assert state.step == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.model.state_dict().items())


@pytest.mark.parametrize("form", ["loop", "foreach", "fused"])
@pytest.mark.parametrize("clip", [0.0, 0.05, 100.0])
def test_every_form_of_the_update_is_the_same(form: str, clip: float) -> None:
    weights = []
    for name in (form, "loop"):
        state = tiny_state(form=name)
        assert state.watches_itself == (name == "fused")
        for step in range(4):
            train_step(state, tiny_plan(optim__clip=clip), CPU, *tiny_batch(step))
        weights.append(torch.cat([p.detach().flatten() for p in state.model.parameters()]))
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-4, atol=1e-6)


def test_steps_launched_after_a_bad_one_update_nothing_and_the_bad_one_is_named() -> None:
    state, alone = tiny_state(), tiny_state()
    plan = tiny_plan()
    flights = []
    for step in range(5):
        if step == 2:
            with torch.no_grad():
                kept = state.model.norm.bias[0].clone()
                state.model.norm.bias[0] = float("nan")
        flights.append(launch_step(state, plan, CPU, *tiny_batch(step)))
        if step == 2:
            with torch.no_grad():
                state.model.norm.bias[0] = kept
    for step in range(2):
        train_step(alone, plan, CPU, *tiny_batch(step))
    assert [report.step for report in land(state, flights[:2])] == [1, 2]
    with pytest.raises(Fault, match="loss nan") as fault:
        land(state, flights)
    assert "step 3" in str(fault.value)
    assert state.step == 2
    for name, parameter in alone.model.named_parameters():
        assert torch.equal(state.model.get_parameter(name), parameter), name
    moments = [s.optimizer.state[s.model.positions.weight] for s in (state, alone)]
    assert all(torch.equal(moments[0][part], moments[1][part]) for part in ("step", "exp_avg", "exp_avg_sq"))


def test_reading_late_tells_the_same_as_reading_at_once() -> None:
    late, now = tiny_state(), tiny_state()
    flights = [launch_step(late, tiny_plan(), CPU, *tiny_batch(step)) for step in range(4)]
    assert land(late, flights) == [train_step(now, tiny_plan(), CPU, *tiny_batch(step)) for step in range(4)]


def kept_bytes(recompute: str, shape: Shape) -> tuple[int, float, dict[str, torch.Tensor]]:
    """Bytes that the forward keeps for the backward, the loss and all gradients."""
    state = tiny_state(shape=shape)
    use_recompute(state.model, recompute)
    parameters = {p.untyped_storage().data_ptr() for p in state.model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    inputs, targets = tiny_batch()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = state.forward(inputs)
    total, count = cross_entropy(hidden, state.model.unembedding, targets, vocab_size=SHAPE.vocab_size)
    (total / count).backward()
    return sum(kept.values()), float(total.detach() / count), {n: p.grad for n, p in state.model.named_parameters()}


@pytest.mark.parametrize("shape", [SHAPE, LLAMA], ids=["gpt", "llama"])
def test_what_is_computed_again_is_not_kept_and_changes_nothing(shape: Shape) -> None:
    plain, gelu, block = (kept_bytes(what, shape) for what in ("none", "gelu", "block"))
    wide = shape.n_layer * 8 * 16 * shape.d_ff * 4
    assert gelu[0] <= plain[0] - wide + 4096  # of each layer the MLP's wide output, fp32
    assert block[0] < plain[0] / 3
    for other in (gelu, block):
        assert other[1] == plain[1]
        assert all(torch.equal(other[2][name], gradient) for name, gradient in plain[2].items())


@pytest.mark.parametrize("recompute", ["gelu", "block"])
def test_recomputed_dropout_drops_the_same(recompute: str) -> None:
    gradients = []
    for what in ("none", recompute):
        state = tiny_state(dropout=0.3)
        use_recompute(state.model, what)
        accumulate_gradients(state, tiny_plan(4, model__dropout=0.3), CPU, *tiny_batch())
        gradients.append([p.grad for p in state.model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_dropout_repeats_itself_and_differs_by_place() -> None:
    first, second = gradients(4, dropout=0.3), gradients(4, dropout=0.3)
    assert first[0] == second[0]
    assert all(torch.equal(first[1][name], second[1][name]) for name in first[1])
    assert first[0] != gradients(4)[0]
    seeds = {dropout_seed(seed, step, micro) for seed in (0, 1, 2) for step in range(50) for micro in range(8)}
    assert len(seeds) == 3 * 50 * 8


def test_padding_ids_learn_nothing() -> None:
    state = tiny_state()
    for seed in range(3):
        train_step(state, tiny_plan(), CPU, *tiny_batch(seed))
    assert torch.count_nonzero(state.model.unembedding[SHAPE.vocab_size :]) == 0


def test_ten_steps_on_one_batch_overfit_it() -> None:
    state = tiny_state(optim=Optim(lr=1e-2))
    plan = tiny_plan(optim__lr=1e-2, optim__schedule="constant")
    losses = [train_step(state, plan, CPU, *tiny_batch()).loss for _ in range(40)]
    assert losses[0] == pytest.approx(4.57, abs=0.1)  # ln 97
    assert losses[-1] < 1.5
