"""The kernels' threads: results do not depend on their number, on other calls or on a fork."""

import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import Tensor

from megatoken.config.model_config import ModelConfig
from megatoken.native import products
from megatoken.native.library import Library
from megatoken.system.threads import set_thread_count, thread_count
from tests.native.test_block import GPT2, LLAMA, Call, compute
from tests.native.test_muon import Training
from tests.native.twins import assert_same_on_threads
from tests.processes import HANG_SECONDS
from tests.tiny_model import draw


def run_block(config: ModelConfig) -> list[Tensor]:
    call = Call(config)
    return compute(call, call.draw(torch.bfloat16))


def run_muon() -> list[Tensor]:
    training = Training(products.loaded_library(), torch.bfloat16)
    training.set_gradients(0)
    norm = training.optimizer.grad_norm()
    training.optimizer.step()
    assert norm is not None
    return [norm, *training.parameters()]


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("call", [partial(run_block, GPT2), partial(run_block, LLAMA), run_muon])
def test_same_bits_with_any_number_of_threads(call: Callable[[], list[Tensor]]):
    assert_same_on_threads(call)


@pytest.fixture
def two_threads(fastest: Library) -> Iterator[None]:
    before = thread_count()
    set_thread_count(2)
    yield
    set_thread_count(before)


@pytest.mark.usefixtures("two_threads")
def test_two_threads_of_the_program_at_the_same_time():
    """One of them has the kernels' threads, the other computes alone."""

    def repeat(config: ModelConfig) -> list[list[Tensor]]:
        return [run_block(config) for _ in range(20)]

    expected = [run_block(config) for config in (GPT2, LLAMA)]
    with ThreadPoolExecutor(2) as pool:
        for results, first in zip(pool.map(repeat, (GPT2, LLAMA)), expected, strict=True):
            assert all(all(map(torch.equal, result, first)) for result in results)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_computes():
    """It has none of the threads."""
    a = draw(64, 64)
    expected = products.matmul(a, a)

    def work() -> None:
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
