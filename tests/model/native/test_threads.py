"""The kernels' threads: results do not depend on their number, on other calls or on a fork."""

import multiprocessing
import random
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import Tensor

from megatoken.base.config.model_config import ModelConfig
from megatoken.base.system.threads import set_thread_count, thread_count
from megatoken.model.native import int8, ops, products
from megatoken.model.native.attention import native_attention
from megatoken.model.native.library import DTYPES, Values
from tests.model.native import test_attention as attention
from tests.model.native.test_block import GPT2, LLAMA, Call
from tests.model.native.test_optimizers import Training
from tests.model.native.test_products import draw_factors
from tests.processes import HANG_SECONDS
from tests.tiny_model import differentiate, draw


def run_block(config: ModelConfig) -> list[Tensor]:
    call = Call(config)
    return differentiate(call, call.draw(torch.bfloat16))


def run_muon() -> list[Tensor]:
    training = Training(products.loaded_library(), torch.bfloat16)
    training.set_gradients(0)
    norm = training.update.grad_norm(training.optimizer)
    training.step(0)
    return [norm, *training.parameters()]


def run_attention() -> Iterator[Tensor]:
    for shape in ("1 300 1 1 32", "2 140 4 2 64"):
        yield from attention.compute(native_attention, *attention.draw_heads(shape, torch.bfloat16))


def run_products(dtype: torch.dtype) -> Iterator[Tensor]:
    rng = random.Random(5)
    for sizes in ((2, 99, 64), (130, 257, 96), (301, 45, 3500)):
        a, b = draw_factors(sizes, dtype, rng)
        sums = torch.empty(len(a))
        yield products.matmul(a, b, row_sums_M=sums)
        yield sums


def run_int8() -> list[Tensor]:
    weight = int8.round_to_int8(draw(101, 300, seed=1))
    return [int8.linear(draw(1, 300).bfloat16(), weight, None)]


def run_sums() -> list[Tensor]:
    x, *vectors = inputs = [
        draw(*shape, seed=seed).requires_grad_()
        for seed, shape in enumerate([(1000, 64), (64,), (64,)])
    ]
    y = ops.norm(x, *vectors, 1e-5)
    values = Values(x.data_ptr(), x.numel(), DTYPES[x.dtype])
    squares = products.loaded_library().call_all("sum_of_squares", [values])
    gradients = torch.autograd.grad(y.square().sum(), inputs)
    return [torch.tensor(squares, dtype=torch.float64), *gradients]


RUNS = [run_attention, run_int8, run_muon, run_sums]
RUNS += [partial(run_block, GPT2), partial(run_block, LLAMA)]
RUNS += [partial(run_products, dtype) for dtype in (torch.float32, torch.bfloat16)]


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = thread_count()
    set_thread_count(2)
    yield
    set_thread_count(before)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("run", RUNS)
def test_same_bits_with_any_number_of_threads(run: Callable[[], Iterable[Tensor]]):
    results = []
    for count in (1, 2, 3):
        set_thread_count(count)
        results.append([*run()])
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@pytest.mark.usefixtures("fastest")
def test_two_threads_of_the_program_at_the_same_time():
    """One of them gets the kernels' threads; the other computes alone."""

    def repeat(config):
        return [run_block(config) for _ in range(20)]

    expected = [run_block(config) for config in (GPT2, LLAMA)]
    with ThreadPoolExecutor(2) as pool:
        for results, first in zip(pool.map(repeat, (GPT2, LLAMA)), expected, strict=True):
            assert all(all(map(torch.equal, result, first)) for result in results)


@pytest.mark.usefixtures("fastest")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_computes():
    """A fork does not copy the kernels' threads."""
    a = draw(64, 64)
    expected = products.matmul(a, a)

    def work():
        for count in (2, 3, 1, 3):
            set_thread_count(count)
            for _ in range(5):
                assert products.matmul(a, a).equal(expected)
                time.sleep(0.002)  # until its new thread sleeps

    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join(HANG_SECONDS)
    code = child.exitcode
    child.kill()
    assert code == 0
