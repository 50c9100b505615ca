import pytest
import torch

from megatoken.base.errors import ConfigError
from megatoken.base.system import torch_compat


@pytest.mark.parametrize("name", torch_compat.DRY_RUN_NAMES)
def test_torch_has_the_private_name(name: str):
    getattr(torch_compat, name)  # a ConfigError names the feature that breaks


def test_a_name_that_torch_has_moved_breaks_its_feature_only(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(torch._guards, "active_fake_mode")
    with pytest.raises(ConfigError):
        torch_compat.active_fake_mode  # noqa: B018
    torch_compat.foreach_copy([torch.zeros(1)], [torch.ones(1)])
    with pytest.raises(AttributeError):
        torch_compat.no_such_name  # noqa: B018


def test_scaler_found_inf_names_an_overflow():
    weight = torch.ones(1, requires_grad=True)
    optimizer, scaler = torch.optim.SGD([weight]), torch.amp.GradScaler("cpu")
    weight.grad = scaler.scale(torch.full((1,), float("inf")))
    scaler.unscale_(optimizer)
    assert [float(flag) for flag in torch_compat.scaler_found_inf(scaler, optimizer)] == [1.0]
