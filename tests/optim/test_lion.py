"""Lion against its formula in double precision; bad steps, resume, bytes, and sharded over two processes."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatoken.checkpoint.load import restore_state
from megatoken.checkpoint.manifest import verify
from megatoken.checkpoint.save import save_state
from megatoken.config.schema import OptimConfig
from megatoken.data.dataloader import Batch
from megatoken.distributed.comm import Comm
from megatoken.distributed.env import DistEnv
from megatoken.distributed.parallel_dims import ParallelDims, build_dims
from megatoken.model.gpt import GPT, init_weights
from megatoken.optim.costs import count_optimizer_bytes
from megatoken.optim.lion import Lion
from megatoken.optim.optimizer import OPTIMIZERS, build_optimizer
from megatoken.train.state import TrainState, build_state, gather_model
from megatoken.train.step import train_step, train_step_async, wait_for_steps
from tests.ranks import run_ranks
from tests.tiny_model import CPU, TINY_GPT, tiny_batch, tiny_config, tiny_state, tiny_step_config

OPTIM = OptimConfig(name="lion", lr=1e-3, beta2=0.99)
STEPS = 4


def random_gradients(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in ((5, 3), (5,))]


def test_it_is_the_published_update() -> None:
    layer = torch.nn.Linear(3, 5)
    optim = OptimConfig(name="lion", lr=0.01, beta1=0.9, beta2=0.99, weight_decay=0.5)
    optimizer = build_optimizer(layer, optim)
    weights = [param.detach().double() for param in layer.parameters()]
    momenta = [torch.zeros_like(weight) for weight in weights]
    for step in range(5):
        gradients = random_gradients(step)
        for param, gradient in zip(layer.parameters(), gradients, strict=True):
            param.grad = gradient
        optimizer.step()
        for index, gradient in enumerate(gradients):
            decay = 0.5 if index == 0 else 0.0  # of the matrix alone
            update = (0.9 * momenta[index] + 0.1 * gradient.double()).sign()
            weights[index] = weights[index] - 0.01 * (update + decay * weights[index])
            momenta[index] = 0.99 * momenta[index] + 0.01 * gradient.double()
    for param, weight, momentum in zip(layer.parameters(), weights, momenta, strict=True):
        torch.testing.assert_close(param.detach(), weight.float(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(optimizer.state[param]["exp_avg"], momentum.float(), rtol=1e-5, atol=1e-7)


def test_gradients_are_divided_by_the_scale() -> None:
    ends = []
    for scale in (1.0, 8.0):
        torch.manual_seed(0)
        layer = torch.nn.Linear(3, 5)
        optimizer = build_optimizer(layer, OPTIM)
        optimizer.grad_scale = torch.tensor(scale)  # type: ignore[attr-defined]
        for step in range(3):
            for param, gradient in zip(layer.parameters(), random_gradients(step), strict=True):
                param.grad = gradient * scale
            optimizer.step()
        ends.append([*layer.parameters(), *(optimizer.state[param]["exp_avg"] for param in layer.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


def test_a_bad_step_and_all_after_it_leave_weights_and_momentum() -> None:
    state, alone = (tiny_state(optim=OPTIM) for _ in range(2))
    assert state.skips_bad_on_device
    step_config, pending = tiny_step_config(optim__lr=1e-3), []
    for step in range(4):
        bias = state.model.norm.bias
        kept = bias.detach().clone()  # type: ignore[union-attr]
        if step == 2:
            bias.data[0] = math.nan  # type: ignore[union-attr]
        pending.append(train_step_async(state, step_config, CPU, Batch(*tiny_batch(step))))
        if step == 2:
            bias.data.copy_(kept)  # type: ignore[union-attr]
    for step in range(2):
        train_step(alone, step_config, CPU, Batch(*tiny_batch(step)))
    assert [report.bad for report in wait_for_steps(state, pending)] == [False, False, True]
    for name, param in alone.model.named_parameters():
        other = state.model.get_parameter(name)
        assert torch.equal(other, param), name
        assert torch.equal(state.optimizer.state[other]["exp_avg"], alone.optimizer.state[param]["exp_avg"]), name


def test_a_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    step_config = tiny_step_config(optim__lr=1e-3)
    whole, first, second = (tiny_state(optim=OPTIM) for _ in range(3))
    for state, steps in ((whole, range(6)), (first, range(3))):
        for step in steps:
            train_step(state, step_config, CPU, Batch(*tiny_batch(step)))
    (tmp_path / "config.yaml").touch()
    (tmp_path / "tokenizer").mkdir()
    folder = save_state(tmp_path, first, config=tmp_path / "config.yaml", tokenizer=tmp_path / "tokenizer", meta={})
    assert verify(folder).meta["optimizer"] == {"name": "Lion", "groups": []}  # its numbers are in the config
    restore_state(folder, verify(folder), second)
    for step in range(3, 6):
        train_step(second, step_config, CPU, Batch(*tiny_batch(step)))
    for name, param in whole.model.named_parameters():
        assert torch.equal(second.model.get_parameter(name), param), name


def test_it_keeps_four_bytes_a_parameter() -> None:
    state = tiny_state(optim=OPTIM)
    assert isinstance(state.optimizer, Lion)
    kept = [moment for each in state.optimizer.state.values() for moment in each.values()]
    assert sum(moment.nbytes for moment in kept) == count_optimizer_bytes("lion", TINY_GPT.resolve(0))
    assert {key for each in state.optimizer.state.values() for key in each} == set(OPTIMIZERS["lion"].state_keys)


def test_it_learns() -> None:
    state, step_config = tiny_state(optim=OPTIM), tiny_step_config(optim__lr=3e-3, optim__schedule="constant")
    losses = [train_step(state, step_config, CPU, Batch(*tiny_batch())).loss for _ in range(60)]
    assert losses[-1] < 1.0 < losses[0]


def train(dims: ParallelDims, comm: Comm) -> tuple[TrainState, list[float]]:
    """This rank's share of the rows of 4 steps."""
    with torch.device("cpu" if dims.is_unsharded else "meta"):
        model = GPT(replace(TINY_GPT, n_head=4))
    state = build_state(model, replace(tiny_config(), optim=OPTIM), CPU, dims)
    state.sharded.copy_from_full(init_weights(model, 1))
    state.start_grad_reduction(comm)
    step_config, curve = tiny_step_config(4, optim__lr=1e-3), []
    share = 8 // dims.dp_size
    for step in range(STEPS):
        rows = [each[dims.dp_rank * share :][:share] for each in tiny_batch(step)]
        curve.append(train_step(state, step_config, CPU, Batch(*rows)).loss)
    return state, curve


def work(rank: int, where: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{where}/join", rank=rank, world_size=2)
    env = DistEnv(rank=rank, world_size=2, local_rank=rank, local_world_size=2)
    comm = Comm(env, dist.new_group(backend="gloo"))
    for name, sharding, tensor_parallel in (("sharded", "zero3", 1), ("tensor", "none", 2)):
        state, curve = train(build_dims(sharding, tensor_parallel, env), comm)
        model = gather_model(state)
        if model is not None:
            torch.save((dict(model.named_parameters()), curve), f"{where}/{name}.pt")
    comm.barrier()
    dist.destroy_process_group()


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    run_ranks(work, str(tmp_path), nprocs=2)
    alone, expected = train(ParallelDims(), Comm(DistEnv()))
    for name in ("sharded", "tensor"):
        weights, curve = torch.load(tmp_path / f"{name}.pt", weights_only=True)
        assert curve == pytest.approx(expected, rel=1e-5)
        for key, param in alone.model.named_parameters():
            if ".attention.qkv.bias" not in key:  # keys' biases cancel in the softmax: their gradient is rounding alone
                far = ~torch.isclose(weights[key], param, rtol=1e-4, atol=1e-5)
                assert far.float().mean() <= 1e-3, key  # where a gradient is rounding alone, its sign decides
