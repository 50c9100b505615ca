"""Composer's and llm-foundry's files are translated field by field, with equal weight decay."""

from pathlib import Path

import pytest
import torch

from megatoken.base.config.schema import OptimConfig
from megatoken.base.errors import ConfigError
from megatoken.convert.recipes.composer import translate as translate_composer
from megatoken.optim.optimizer import build_optimizer
from tests.convert.models import translated_values
from tests.tables import read_table

GPT3_350M = """\
# GPT-3 350M in the form of Composer's files.
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


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "file.yaml"
    path.write_text(text)
    return path


GPT3_FIELDS = """
seed 17
model.n_layer 24
model.n_head 16
model.d_model 1024
model.d_ff 4096
model.seq_len 2048
model.vocab_size 50257
model.dropout 0.0
optim.lr 0.0003
optim.schedule cosine
optim.warmup 0.01dur
optim.min_lr_ratio 0.0
optim.beta1 0.9
optim.beta2 0.95
optim.eps 1e-08
optim.grad_clip 1.0
budget.steps 20000
budget.batch_tokens 524288
machine.precision bf16
evaluate.every 1000steps
"""


def test_gpt3_350m_field_by_field(tmp_path: Path):
    path = write(tmp_path, GPT3_350M)
    resolved = translate_composer(path).resolve([])
    decay = str(1e-5 / 3e-4)
    assert translated_values(resolved) == read_table(f"{GPT3_FIELDS}optim.weight_decay {decay}")
    assert resolved.config.optim.warmup.steps(batch_tokens=524288, total_steps=20000) == 200
    batch_line = GPT3_350M.splitlines().index("train_batch_size: 256") + 1
    assert resolved.origins["budget.batch_tokens"].startswith(f"{path}:{batch_line}, ")


def test_weight_decay_equals_decoupled_adamw():
    """A weight without a gradient shrinks by 1 - wd lr(t)/lr a step, as in Composer's optimizer."""
    lr, decoupled, share = 3e-4, 1e-5, 0.37
    layer = torch.nn.Linear(3, 3, bias=False).double()
    expected = layer.weight.detach() * (1 - decoupled * share)
    optim = OptimConfig(lr=lr, weight_decay=decoupled / lr)
    optimizer = build_optimizer(layer, optim, implementation="loop")
    for group in optimizer.param_groups:
        group["lr"] = lr * share
    layer.weight.grad = torch.zeros_like(layer.weight)
    optimizer.step()
    torch.testing.assert_close(layer.weight.detach(), expected, rtol=1e-15, atol=0)


FOUNDRY_FIELDS = """
seed 17
model.n_layer 2
model.n_head 2
model.d_model 64
model.d_ff 256
model.seq_len 128
model.vocab_size 50368
model.mlp gelu-erf
optim.lr 0.0006
optim.schedule linear
optim.warmup 100steps
optim.min_lr_ratio 0.1
optim.beta1 0.9
optim.beta2 0.999
optim.eps 1e-08
optim.weight_decay 0.01
optim.grad_clip 0.0
budget.tokens 10000000
budget.batch_tokens 1024
machine.precision bf16
machine.micro_batch auto
evaluate.every 1ep
save.every 500steps
save.keep_last 3
"""


def test_llm_foundry_field_by_field(tmp_path: Path):
    translation = translate_composer(write(tmp_path, FOUNDRY))
    assert translated_values(translation.resolve([])) == read_table(FOUNDRY_FIELDS)
    assert (translation.name, translation.out) == ("tiny-mpt", Path("tiny/checkpoints"))


def test_deepspeeds_clipping_and_epochs_of_a_truncated_dataset(tmp_path: Path):
    text = GPT3_350M.replace(
        "algorithms:\n  gradient_clipping:", "callbacks:\n  lr_monitor: {}\nlogger:\n  x:"
    )
    text = text.replace("zero_optimization:", "gradient_clipping: 0.5\n  zero_optimization:")
    text = text.replace("20000ba", "2ep")
    for size, tokens in (("num_tokens: 1000000", 2_000_000), ("max_samples: 500", 2 * 500 * 2048)):
        path = write(tmp_path, text.replace("shuffle: true", size))
        config = translate_composer(path).resolve([]).config
        assert (config.optim.grad_clip, config.budget.tokens) == (0.5, tokens)


REFUSED = r"""
max_duration: 20000ba -> max_duration: 20000
max_duration: 20000ba -> max_duration: 1dur
max_duration: 20000ba -> max_duration: 1ep\ntrain_loader:\n  epoch_size: 10K
seed: 17 -> seed: x
seed: 17 -> seed: ${nothing}
seed: 17 -> seed: 17\nseed: 18
seed: 17 -> seed: 17\nglobal_seed: 18
seed: 17 -> seed: 17\nload_path: old.pt
seed: 17 -> seed: 17\ncallbacks:\n  early_stopper:\n    monitor: loss
decoupled_adamw -> lion
cosine_decay_with_warmup -> step
t_warmup: 0.01dur -> t_max: 1dur
t_warmup: 0.01dur -> t_warmup: 1ba\n      t_max: 0.5dur
gelu_new -> relu
embd_pdrop: 0.0 -> embd_pdrop: 0.1
n_layer: 24 -> n_layers_: 24
max_seq_len: 2048\n    tokenizer_name: gpt2\n    shuffle: true -> max_seq_len: 1024
use_pretrained: false -> use_pretrained: true
clipping_type: "norm" -> clipping_type: value
algorithms: -> algorithms:\n  alibi:\n    max_sequence_length: 8
"""


def test_refused_settings(tmp_path: Path):
    head, _, rest = GPT3_350M.partition("optimizers:")
    path = write(tmp_path, head + rest[rest.index("schedulers:") :])
    assert translate_composer(path).resolve([]).config.optim.lr == OptimConfig().lr
    for row in REFUSED.strip().splitlines():
        old, new = row.replace(r"\n", "\n").split(" -> ")
        assert old in GPT3_350M
        write(tmp_path, GPT3_350M.replace(old, new))
        with pytest.raises(ConfigError):
            translate_composer(path).resolve([])
