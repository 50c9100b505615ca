"""Growing batches: sizes, tokens before a batch, and the batch at a number of tokens."""

from itertools import accumulate

import pytest

from megatoken.base.config.batch_ramp import BatchRamp
from megatoken.base.config.load import resolve

GPT3 = BatchRamp(32_768, 524_288, 4_000_000_000)


@pytest.mark.parametrize(
    "ramp", [GPT3, BatchRamp(16, 100, 1000), BatchRamp(16, 16, 500), BatchRamp(3, 64, 10)], ids=str
)
def test_tokens_before_a_batch_are_the_sum_of_earlier_sizes(ramp: BatchRamp):
    batches = range(min(ramp.count(ramp.length) + 50, 3000))
    sizes = [ramp.size(batch) for batch in batches]
    assert [ramp.before(batch) for batch in batches] == [0, *accumulate(sizes)][:-1]
    assert sizes == sorted(sizes)
    assert set(sizes) <= {*range(ramp.start, ramp.full, ramp.start), ramp.full}
    for batch in batches:
        assert ramp.count(ramp.before(batch)) == batch


def test_batches_grow_linearly_in_tokens():
    assert (GPT3.size(0), GPT3.size(10**6)) == (32_768, 524_288)
    full = next(batch for batch in range(0, 10**6, 10) if GPT3.size(batch) == GPT3.full)
    assert GPT3.before(full) == pytest.approx(4e9, rel=2e-3)
    for share in (0.1, 0.25, 0.5, 0.9):
        size = GPT3.size(GPT3.count(share * 4e9))
        assert size == pytest.approx(32_768 + share * (524_288 - 32_768), abs=32_768)


def test_a_token_budget_counts_the_small_batches():
    overrides = ["budget.tokens=300e9", "budget.batch_start=32768", "budget.batch_ramp=4e9"]
    config = resolve("gpt2-124m", overrides).config
    steps = config.total_steps(0)
    assert config.budget.tokens_before(steps) == pytest.approx(300e9, abs=524_288 / 2)
    # 4e9 / 15 tokens of each multiple of 32,768, instead of 7,629 full batches.
    assert steps == 572_205 + 19_376
