"""LoRA adapters against PEFT's, on transformers' models with the same weights."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from megatoken.base.errors import CheckpointError
from megatoken.convert.export import export
from megatoken.convert.hf.peft import CONFIG, WEIGHTS, write_peft
from megatoken.model.gpt import GPT
from megatoken.posttrain.lora import LoRA, merge, without_adapters
from megatoken.text.load_pretrained import LoadedModel, load_pretrained
from tests.convert.models import BYTES, FAMILIES, byte_tokenizer, draw_model, relative

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
IDS = torch.randint(BYTES, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=["gpt2", "llama-tied", "qwen3-untied"])
def models(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[GPT, GPT, Any]:
    """Return a base model, the same with random adapters, and PEFT's model from its export."""
    base = draw_model(FAMILIES[request.param])
    export(LoadedModel(base, byte_tokenizer(), "base"), "hf", tmp_path / "hf")
    model = draw_model(replace(base.config, lora_rank=4, lora_alpha=5.0, init=f"{tmp_path}/hf"))
    model.load_state_dict(base.state_dict(), strict=False)
    write_peft(tmp_path, model, "fp32")
    hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    return base, model, peft.PeftModel.from_pretrained(hf, tmp_path, is_trainable=True).eval()


def test_logits_loss_and_gradients_are_those_of_peft(models: tuple[GPT, GPT, Any], tmp_path: Path):
    base, model, theirs = models
    outputs = theirs(IDS, labels=IDS)
    assert relative(base.logits(IDS), outputs.logits) > 0.01
    assert relative(model.logits(IDS), outputs.logits) < 2e-6
    loss = model.loss(IDS[:, :-1], IDS[:, 1:])
    assert loss.item() == pytest.approx(outputs.loss.item(), rel=1e-6)
    loss.backward()
    outputs.loss.backward()
    assert all((".lora." in name) == (p.grad is not None) for name, p in model.named_parameters())
    for part in model.modules():
        if isinstance(part, LoRA):
            part.a.data, part.b.data = part.a.grad, part.b.grad
    write_peft(tmp_path, model, "fp32")  # their names for our gradients
    expected = dict(theirs.named_parameters())
    for name, gradient in load_file(tmp_path / WEIGHTS).items():
        wanted = expected.pop(name.replace(".weight", ".default.weight")).grad
        if "c_attn.lora_B" in name:  # PEFT's is not block-diagonal, and ours is written times 3
            wanted = wanted * (gradient != 0) * 9
        assert relative(gradient, wanted) < 1e-5, name
    assert not any(parameter.requires_grad for parameter in expected.values())


def test_merged_adapters_compute_the_same(models: tuple[GPT, GPT, Any], tmp_path: Path):
    base, model, _ = models
    applied = model.logits(IDS)
    with without_adapters(model):
        assert torch.equal(model.logits(IDS), base.logits(IDS))
    assert torch.equal(model.logits(IDS), applied)
    assert relative(load_pretrained(tmp_path).model.eval().logits(IDS), applied) < 2e-6
    merge(model)
    assert relative(model.logits(IDS), applied) < 2e-6
    assert model.config == base.config
    assert model.state_dict().keys() == base.state_dict().keys()


UNSUPPORTED = """
- peft_type: LOHA
- bias: all
- use_dora: true
- modules_to_save: [lm_head]
- lora_alpha: null
- a_new_variant: {rank: 2}
- init_lora_weights: pissa
- init_lora_weights: pissa_niter_4
- init_lora_weights: olora
- init_lora_weights: loftq
- base_model_name_or_path: null
- base_model_name_or_path: absent/base
"""


@pytest.mark.parametrize("models", ["llama-tied"], indirect=True)
@pytest.mark.filterwarnings("ignore:.*eva_config")
def test_configs_that_keep_the_base_load_and_others_are_named(
    models: tuple[GPT, GPT, Any], tmp_path: Path
):
    path = tmp_path / CONFIG
    written = json.loads(path.read_text())
    hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    for value in (False, "gaussian", "orthogonal", "eva"):
        path.write_text(json.dumps(written | {"init_lora_weights": value}))
        theirs = peft.PeftModel.from_pretrained(copy.deepcopy(hf), tmp_path).eval()
        ours = load_pretrained(tmp_path).model.eval()
        assert relative(ours.logits(IDS), theirs(IDS).logits) < 2e-6
    for change in yaml.safe_load(UNSUPPORTED):
        path.write_text(json.dumps(written | change))
        ((field, value),) = change.items()
        with pytest.raises(CheckpointError, match="absent" if value == "absent/base" else field):
            load_pretrained(tmp_path)


@pytest.mark.parametrize("models", ["llama-tied"], indirect=True)
def test_tensors_that_do_not_fit_are_refused(models: tuple[GPT, GPT, Any], tmp_path: Path):
    tensors = load_file(tmp_path / WEIGHTS)
    name = next(key for key in tensors if "lora_A" in key)
    for changed in (
        tensors | {name.replace("A.weight", "A.bias"): tensors[name].clone()},
        tensors | {name: tensors[name][:, 1:].contiguous()},
        tensors | {name: tensors[name] * float("nan")},
        tensors | {"base_model.model.lm_head.lora_A.weight": tensors[name].clone()},
        {key: tensor for key, tensor in tensors.items() if key != name},
        {},
    ):
        save_file(changed, tmp_path / WEIGHTS)
        with pytest.raises(CheckpointError):
            load_pretrained(tmp_path)
