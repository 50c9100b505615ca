"""One number derives a compute-optimal run, by rules that it prints."""

from dataclasses import replace

import pytest

from megatoken.cli.main import main
from megatoken.config.load import load_config, resolve
from megatoken.config.presets import PRESETS
from megatoken.errors import ConfigError
from megatoken.model.flops import count_matmul_parameters

D_12 = 64 * 12


def test_depth_12_is_the_size_of_gpt2_124m() -> None:
    config = load_config("depth-12")
    model = config.model.resolve(50257)
    assert model == PRESETS["modern-124m"]
    assert config.model.zero_init
    assert config.budget.tokens == 20 * count_matmul_parameters(
        replace(model, value_embeddings=False)
    )
    flops = (72 * 12 * D_12**2 + 12 * 12 * D_12 * 1024) * config.budget.tokens
    base = load_config("modern-124m")
    assert config.optim.name == base.optim.name == "muon"
    assert (base.model.resolve(50257).d_model, base.budget.batch_tokens) == (D_12, 524288)
    assert config.optim.lr == pytest.approx(
        base.optim.lr / 2**0.5, rel=0.01
    )  # half of its batch, its width
    assert config.optim.matrix_lr == pytest.approx(base.optim.matrix_lr / 2**0.5, rel=0.01)
    assert (
        config.budget.batch_tokens == 262144
    )  # of powers of two the nearest to the rule's 259,666
    assert 0.2920 * flops**0.3271 == pytest.approx(259_666, rel=1e-4)


@pytest.mark.parametrize(
    ("depth", "width", "heads"), [(1, 64, 1), (3, 192, 3), (6, 384, 3), (20, 1280, 10)]
)
def test_sizes_of_a_depth(depth: int, width: int, heads: int) -> None:
    resolved = resolve(f"depth-{depth}")
    model = resolved.config.model.resolve(50257)
    assert (model.n_layer, model.d_model, model.n_head, model.d_ff) == (
        depth,
        width,
        heads,
        4 * width,
    )
    assert resolved.config.budget.tokens == 20 * count_matmul_parameters(
        replace(model, value_embeddings=False)
    )
    assert resolved.config.optim.schedule == resolve("modern-124m").config.optim.schedule


def test_deeper_runs_are_longer_with_larger_batches() -> None:
    runs = [resolve(f"depth-{depth}").config for depth in range(1, 40)]
    for values in ([run.budget.tokens for run in runs], [run.budget.batch_tokens for run in runs]):
        assert values == sorted(values)


def test_rates_follow_width_and_batch() -> None:
    """Both by the root of the batch, AdamW's by the inverse root of the width, too."""
    small, large = (resolve(f"depth-{depth}").config for depth in (6, 24))
    batches = (large.budget.batch_tokens / small.budget.batch_tokens) ** 0.5
    assert large.optim.matrix_lr / small.optim.matrix_lr == pytest.approx(batches, rel=0.01)
    assert large.optim.lr / small.optim.lr == pytest.approx(batches / 4**0.5, rel=0.01)


def test_what_is_derived_says_how_and_may_be_overridden(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "depth-6", "budget.tokens=1e6", "data.path=data/web"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[2] == "# model.d_model=384: 64 a layer, as nanochat (Karpathy 2025)"
    values = {
        line.split("#")[0].strip(): line.split("# ")[-1]
        for line in printed
        if line.startswith("  ")
    }
    assert values["n_head: 3"] == "depth-6: heads of 128"
    assert values["tokens: 1000000"] == values["path: data/web"] == "command line"
    assert (
        values["matrix_lr: 0.00707"]
        == "depth-6: modern-124m's times the root of the batch (Malladi et al. 2022)"
    )


def test_a_name_like_it_is_pointed_to_it() -> None:
    with pytest.raises(
        ConfigError,
        match=r"no recipe named 'depth12' — did you mean 'depth-12'\? known: .*, depth-N",
    ):
        resolve("depth12")


@pytest.mark.parametrize("name", ["depth-0", "depth-201"])
def test_a_depth_that_no_run_has_is_refused(name: str) -> None:
    with pytest.raises(
        ConfigError, match=r"no run is \d+ layers deep — recipe — give 1 to 200, such as depth-12"
    ):
        resolve(name)
