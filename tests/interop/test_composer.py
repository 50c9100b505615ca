"""Composer's and llm-foundry's files: the recipe they become, field by field, and the same decay of weights."""

from pathlib import Path

import pytest
import torch

from megatoken.cli import main
from megatoken.config import Optim, flatten
from megatoken.errors import Exit, Fault
from megatoken.interop.composer import translate_composer
from megatoken.optim.groups import build_optimizer
from tests.interop.models import UNCHOSEN

GPT3_350M = """\
# The GPT-3 350M of MosaicML's post, in the form of Composer's own files.
train_dataset:
  c4:
    split: train
    max_seq_len: 2048
    tokenizer_name: gpt2
    shuffle: true
val_dataset:
  c4:
    split: validation
    max_samples: 102400
    max_seq_len: 2048
    tokenizer_name: gpt2
model:
  gpt2:
    use_pretrained: false
    tokenizer_name: gpt2
    model_config:
      activation_function: gelu_new
      architectures:
        - GPT2LMHeadModel
      attn_pdrop: 0.0
      bos_token_id: 50256
      embd_pdrop: 0.0
      eos_token_id: 50256
      initializer_range: 0.02
      layer_norm_epsilon: 1.0e-05
      model_type: gpt2
      n_embd: 1024
      n_head: 16
      n_inner: 4096
      n_layer: 24
      n_positions: 2048
      resid_pdrop: 0.0
      scale_attn_weights: true
      summary_activation: null
      task_specific_params:
        text-generation:
          do_sample: true
      vocab_size: 50257
optimizers:
  decoupled_adamw:
    lr: 3.0e-4
    betas:
      - 0.9
      - 0.95
    eps: 1.0e-08
    weight_decay: 1.0e-5
schedulers:
  - cosine_decay_with_warmup:
      t_warmup: 0.01dur
max_duration: 20000ba
train_batch_size: 256
grad_accum: auto
precision: bf16
seed: 17
dataloader:
  pin_memory: true
deepspeed_config:
  zero_optimization:
    stage: 0
algorithms:
  gradient_clipping:
    clipping_type: "norm"
    clipping_threshold: 1.0
eval_interval: 1000ba
"""

FOUNDRY = """\
variables:
  global_seed: 17
  max_seq_len: 128
run_name: tiny-mpt
model:
  name: mpt_causal_lm
  init_device: meta
  d_model: 64
  n_heads: 2
  n_layers: 2
  expansion_ratio: 4
  max_seq_len: ${max_seq_len}
  vocab_size: 50368
  attn_config:
    alibi: false
tokenizer:
  name: EleutherAI/gpt-neox-20b
train_loader:
  name: text
  dataset:
    local: ./my-copy-c4
scheduler:
  name: linear_decay_with_warmup
  t_warmup: 100ba
  alpha_f: 0.1
optimizer:
  name: adamw
  lr: 6.0e-4
max_duration: 10e6tok
eval_interval: 1ep
eval_subset_num_batches: 10
eval_loader:
  name: text
device_eval_batch_size: 16
global_train_batch_size: 8
seed: ${variables.global_seed}
device_train_microbatch_size: auto
precision: amp_bf16
fsdp_config:
  sharding_strategy: FULL_SHARD
callbacks:
  lr_monitor: {}
save_interval: 500ba
save_num_checkpoints_to_keep: 3
save_folder: ./tiny/checkpoints
"""


def line_of(word: str) -> int:
    """The line of the reference file that a word is on."""
    return next(n for n, line in enumerate(GPT3_350M.splitlines(), 1) if word in line)


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "file.yaml"
    path.write_text(text)
    return path


def told_values(path: Path) -> dict[str, str]:
    resolved = translate_composer(path).resolve([])
    values = {key: str(value) for key, value in flatten(resolved.run).items()}
    return {key: values[key] for key, origin in resolved.origins.items() if origin != "default"}


def test_gpt3_350m_field_by_field(tmp_path: Path) -> None:
    path = write(tmp_path, GPT3_350M)
    assert told_values(path) == {
        "seed": "17",
        "model.n_layer": "24",
        "model.n_head": "16",
        "model.d_model": "1024",
        "model.d_ff": "4096",
        "model.seq_len": "2048",
        "model.vocab_size": "50257",
        "model.dropout": "0.0",
        "optim.lr": "0.0003",
        "optim.schedule": "cosine",
        "optim.warmup": "0.01dur",
        "optim.floor": "0.0",
        "optim.beta1": "0.9",
        "optim.beta2": "0.95",
        "optim.eps": "1e-08",
        "optim.weight_decay": str(1e-5 / 3e-4),
        "optim.clip": "1.0",
        "budget.steps": "20000",
        "budget.batch_tokens": "524288",
        "machine.precision": "bf16",
        "machine.micro_batch": "auto",
        "evaluate.every": "1000steps",
        "evaluate.tokens": str(102400 * 2048),
    }
    told = translate_composer(path)
    resolved = told.resolve([])
    assert resolved.run.optim.warmup.steps(batch_tokens=524288, total_steps=20000) == 200
    assert resolved.origins["budget.batch_tokens"] == f"{path}:{line_of('train_batch_size')}: x 2048 tokens"
    assert any("wd = 1e-05 / 0.0003" in note for note in told.notes)


def test_an_epoch_of_a_dataset_that_is_cut_short(tmp_path: Path) -> None:
    text = GPT3_350M.replace("20000ba", "1ep").replace("split: train\n", "split: train\n    max_samples: 5120000\n")
    values = told_values(write(tmp_path, text))
    assert values["budget.tokens"] == str(20000 * 256 * 2048)
    assert "budget.epochs" not in values


def test_decay_is_that_of_decoupled_adamw() -> None:
    """A weight without a gradient shrinks by 1 - wd lr(t)/lr a step, as Composer's optimizer has it."""
    lr, decoupled, share = 3e-4, 1e-5, 0.37
    layer = torch.nn.Linear(3, 3, bias=False).double()
    before = layer.weight.detach().clone()
    kept = dict(layer.named_parameters())
    sizes = {name: parameter.shape for name, parameter in kept.items()}
    optimizer = build_optimizer(kept, sizes, Optim(lr=lr, weight_decay=decoupled / lr), form="loop")
    for group in optimizer.param_groups:
        group["lr"] = lr * share
    layer.weight.grad = torch.zeros_like(layer.weight)
    optimizer.step()
    torch.testing.assert_close(layer.weight.detach(), before * (1 - decoupled * share), rtol=1e-15, atol=0)


def test_llm_foundry_field_by_field(tmp_path: Path) -> None:
    path = write(tmp_path, FOUNDRY)
    assert told_values(path) == {
        "seed": "17",
        "model.n_layer": "2",
        "model.n_head": "2",
        "model.d_model": "64",
        "model.d_ff": "256",
        "model.seq_len": "128",
        "model.vocab_size": "50368",
        "model.mlp": "gelu-erf",
        "optim.lr": "0.0006",
        "optim.schedule": "linear",
        "optim.warmup": "100steps",
        "optim.floor": "0.1",
        "optim.beta1": "0.9",
        "optim.beta2": "0.999",
        "optim.eps": "1e-08",
        "optim.weight_decay": "0.01",
        "optim.clip": "0.0",
        "budget.tokens": "10000000",
        "budget.batch_tokens": "1024",
        "machine.precision": "bf16",
        "machine.micro_batch": "auto",
        "evaluate.every": "1ep",
        "evaluate.tokens": str(10 * 16 * 128),
        "save.every": "500steps",
        "save.keep_last": "3",
    }
    told = translate_composer(path)
    assert (told.name, told.out) == ("tiny-mpt", Path("tiny/checkpoints"))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("max_duration: 20000ba", "max_durations: 20000ba", r"no max_duration — .*file\.yaml"),
        ("max_duration: 20000ba", "max_duration: 20000", r"'20000' is no length of time — .*:LINE"),
        ("max_duration: 20000ba", "max_duration: 1dur", r"max_duration 1dur is no length"),
        ("seed: 17", "seeed: 17", r"seeed is not understood, and what is not understood is not dropped — .*:LINE"),
        ("seed: 17", "seed: x", r"seed is 'x', not a number — .*:LINE"),
        ("train_batch_size: 256", "train_batch_size: 2.5", r"train_batch_size is '2\.5', not a whole number"),
        ("decoupled_adamw", "lion", r"no optimizer called 'lion' — .*file\.yaml:"),
        ("cosine_decay_with_warmup", "step", r"no schedule like 'step'"),
        ("t_warmup: 0.01dur", "t_max: 1dur", r"cosine_decay_with_warmup without t_warmup"),
        ("t_warmup: 0.01dur", "t_warmup: 1ba\n      t_max: 0.5dur", r"t_max 0\.5dur has no equal here"),
        ("gelu_new", "relu", r"activation_function relu is not computed here — .*:LINE"),
        ("embd_pdrop: 0.0", "embd_pdrop: 0.1", r"different dropout, here it is one number"),
        ("n_layer: 24", "n_layers_: 24", r"no model\.gpt2\.model_config\.n_layer"),
        ("precision: bf16", "precision: int8", r"no precision 'int8'"),
        ('clipping_type: "norm"', "clipping_type: value", r"clipping by value is not done here"),
        (
            "algorithms:",
            "algorithms:\n  alibi:\n    max_sequence_length: 8",
            r"algorithms\.alibi\..* is not understood",
        ),
        ("seed: 17", "seed: ${nothing}", r"seed names \$\{nothing\}, which is not given — .*:LINE"),
        ("seed: 17", "seed: [", r"not valid YAML: .*file\.yaml:"),
        ("seed: 17", "seed: inf", r"seed is 'inf', not a number"),
        ("seed: 17", "seed: &a [*a]", r"cannot read it: maximum recursion"),
        (
            "seed: 17",
            "a: &a [1,1,1,1,1,1,1,1,1,1]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b,"
            "*b,*b]\nd: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c,*c]\ne: [*d,*d,*d,*d,*d,*d,*d,*d,*d,*d]",
            r"more than 100,000 values",
        ),
    ],
)
def test_what_cannot_be_told_is_one_line(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in GPT3_350M
    with pytest.raises(Fault, match=said.replace("LINE", rf"{line_of(old)}\b")) as caught:
        translate_composer(write(tmp_path, GPT3_350M.replace(old, new)))
    assert caught.value.code == Exit.CONFIG


def test_other_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Fault, match="no model called 'hf_t5'"):
        translate_composer(write(tmp_path, FOUNDRY.replace("mpt_causal_lm", "hf_t5")))
    with pytest.raises(Fault, match="ALiBi is not computed here"):
        translate_composer(write(tmp_path, FOUNDRY.replace("alibi: false", "alibi: true")))


def test_a_published_shape_by_its_name_on_the_hub(tmp_path: Path) -> None:
    begin, end = FOUNDRY.index("model:"), FOUNDRY.index("tokenizer:")
    model = "model:\n  name: hf_causal_lm\n  pretrained_model_name_or_path: gpt2\n  config_overrides:\n"
    model += "    n_positions: ${max_seq_len}\n  pretrained: false\n"
    values = told_values(write(tmp_path, FOUNDRY[:begin] + model + FOUNDRY[end:]))
    assert (values["model.preset"], values["model.seq_len"], values["model.dropout"]) == ("gpt2-124m", "128", "0.1")
    assert values["budget.batch_tokens"] == "1024"
    assert "model.init" not in values
    with pytest.raises(Fault, match="the shape of 'opt-3b' is not known here"):
        translate_composer(write(tmp_path, FOUNDRY[:begin] + model.replace(": gpt2", ": opt-3b") + FOUNDRY[end:]))


def test_it_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, corpus = write(tmp_path, GPT3_350M), tmp_path / "text.txt"
    corpus.write_text("the cat sat on the mat. " * 400)
    assert main(["prepare", str(corpus), "--out", str(tmp_path / "data"), "--tokenizer", "bytes"]) == Exit.DONE
    small = ["model.n_layer=1", "model.n_head=2", "model.d_model=32", "model.d_ff=0", "model.seq_len=64"]
    small += ["model.vocab_size=0", "budget.batch_tokens=256", "budget.steps=2", "machine.micro_batch=4"]
    small += [*UNCHOSEN, f"data.path={tmp_path / 'data'}"]
    words = ["train", "--composer", str(path), "--out", str(tmp_path / "run"), *small]
    assert main(words) == Exit.DONE
    said = capsys.readouterr().out
    assert f"weight_decay: {1e-5 / 3e-4}" in said
    assert "step 2" in said
