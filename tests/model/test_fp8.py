"""The FP8 output layer: errors within the bounds of the formats, and equal losses in training.

On a GPU with FP8 matmuls the tests run there; on a CPU, torch computes the same.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatoken.base.config.model_config import ModelConfig
from megatoken.base.config.schema import MachineConfig
from megatoken.base.errors import ConfigError
from megatoken.model.gpt import GPT
from megatoken.model.kernels import fp8
from megatoken.model.kernels.cross_entropy import OutputLayer
from megatoken.model.loss import cross_entropy
from megatoken.plan.tuning.kernels import apply_choice, autotune
from tests.tiny_model import CPU, TINY_GPT, differentiate, draw, relative_error, tiny_state

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS = [OutputLayer, fp8.FP8Layer]
HALF_ULP = {fp8.E4M3: 2.0**-4, fp8.E5M2: 2.0**-3}  # relative error of rounding a normal number
SMALLEST_NORMAL = {fp8.E4M3: 2.0**-6, fp8.E5M2: 2.0**-14}
# Of a matmul of independent normal numbers, whatever its sizes. Rounding them has a relative error
# (root mean square) of 2.7% in e4m3 and 5.3% in e5m2, and a product the root of the sum of squares.
BACKWARD = 0.065
TEXT = Path(__file__).parents[2] / "LICENSE"


def random(*sizes: int, seed: int = 0) -> Tensor:
    return draw(*sizes, seed=seed, dtype=torch.bfloat16).to(DEVICE)


@pytest.mark.parametrize("dtype", list(HALF_ULP), ids=str)
@pytest.mark.parametrize("magnitude", [1e-20, 1e-5, 1.0, 3e4])
def test_rounding_is_relative_at_every_magnitude(dtype: torch.dtype, magnitude: float):
    x = random(64, 48) * magnitude
    values, scale = fp8.round_to_fp8(x, dtype)
    errors = (values.double() * scale.double() - x.double()).abs() / x.double().abs()
    is_normal = values.double().abs() >= SMALLEST_NORMAL[dtype]
    assert is_normal.float().mean() > 0.99
    assert errors[is_normal].max() <= HALF_ULP[dtype]
    assert torch.finfo(dtype).max / 2 <= float(values.double().abs().max())
    assert float(torch.log2(scale)) % 1 == 0
    values, scale = fp8.round_to_fp8(0 * x, dtype)
    assert not (values.double() * scale.double()).any()


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_output_layer(softcap: float):
    inputs = random(2, 64, 64), 0.1 * random(112, 64, seed=1)
    targets = torch.arange(128, device=DEVICE).view(2, 64) * 7 % 97

    def loss(is_fp8, *inputs):
        options = {
            "vocab_size": 97,
            "softcap": softcap,
            "chunk": 48,
            "output_layer": LAYERS[is_fp8],
        }
        return cross_entropy(*inputs, targets, **options)[0]

    one = torch.tensor(1.0)
    results = [differentiate(partial(loss, is_fp8), inputs, one) for is_fp8 in (True, False)]
    (total, *gradients), (expected_total, *expected) = results
    assert 0 < abs(float(total / expected_total) - 1) < 2e-3
    assert 0.01 < relative_error(gradients[0], expected[0]) < BACKWARD
    assert relative_error(gradients[1], expected[1]) < 0.01  # only the logits' errors


def test_settings_choose_the_matmuls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("MEGATOKEN_CACHE", str(tmp_path))
    bf16 = replace(CPU, precision="bf16")
    for name, layer in zip(("off", "head"), LAYERS, strict=True):
        machine = MachineConfig(fp8=name, attention="flash", gemm_backend="torch", fused="off")
        choice = autotune(TINY_GPT, machine, bf16, micro_batch=2, key="")
        state = tiny_state()
        apply_choice(state, choice, bf16)
        assert state.compute.output_layer is layer
    for config, device in ((TINY_GPT, CPU), (replace(TINY_GPT, d_model=40), bf16)):
        with pytest.raises(ConfigError, match=r"machine\.fp8"):
            autotune(config, MachineConfig(fp8="head"), device, micro_batch=2, key="")


def train(*, is_fp8: bool) -> float:
    """Return the mean loss of the last 20 of 100 steps on bytes of the license.

    Gradients are as small as with 524,288 tokens a batch, and so are AdamW's eps.
    """
    config = ModelConfig(n_layer=2, n_head=2, d_model=64, d_ff=256, vocab_size=256, seq_len=32)
    model = GPT(config, seed=1).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), eps=1e-15)
    ids = torch.tensor(list(TEXT.read_bytes()), device=DEVICE)
    generator, losses = torch.Generator().manual_seed(0), []
    for _ in range(100):
        starts = torch.randint(len(ids) - 33, (16, 1), generator=generator).to(DEVICE)
        rows = ids[starts + torch.arange(33, device=DEVICE)]
        with torch.autocast(DEVICE, torch.bfloat16):
            hidden, weight = model(rows[:, :-1]), model.lm_head_weight
            options = {"vocab_size": 256, "chunk": 256, "output_layer": LAYERS[is_fp8]}
            total, count = cross_entropy(hidden, weight, rows[:, 1:], **options)
        optimizer.zero_grad()
        (total / 2**19).backward()
        optimizer.step()
        losses.append(total.item() / int(count))
    return sum(losses[-20:]) / 20


@pytest.mark.long
@pytest.mark.timeout(1500)  # torch's FP8 products on a CPU are slow: only a hang takes longer
def test_loss_is_that_of_bf16():
    """The losses of seeds differ by 0.1."""
    expected = train(is_fp8=False)
    assert expected < 2.6  # from 5.5
    assert train(is_fp8=True) == pytest.approx(expected, abs=0.15)
