"""Other programs' training steps: forward, mean loss, backward, clipping, AdamW, zero_grad.

Each model, loss and optimizer is built as in the program's own training; `transformers` has no
optimizer, so it gets torch's fused AdamW. All use the padded vocabulary, tied embeddings,
no dropout and GPT-2's initialization.
"""

import ast
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.llmc import LlmcTrainer
from megatoken.base.config.model_config import ModelConfig
from megatoken.base.config.schema import OptimConfig
from megatoken.base.system.device import Device
from megatoken.data.dataloader import Batch
from megatoken.study.bench.training import Training
from megatoken.study.bench.worker import WorkerSpec

OPTIM = OptimConfig()  # the same for all programs
BETAS = (OPTIM.beta1, OPTIM.beta2)

# A model on its device, its optimizer, and a function (forward, inputs, targets) -> mean loss.
Baseline = tuple[nn.Module, torch.optim.Optimizer, Callable[[Any, Tensor, Tensor], Tensor]]


def build_baseline(spec: WorkerSpec, stack: ExitStack) -> Training:
    """Build a program's step, which waits for its loss."""
    device, step = build_step(spec)
    return Training(
        spec=spec,
        device=device,
        step=lambda batch: float(step(batch)),
        chosen=spec.configuration,
        peak_memory_bytes=device.peak_memory_bytes,
    )


def build_step(spec: WorkerSpec) -> tuple[Device, Callable[[Batch], Tensor]]:
    """Build a program's step, which returns the mean loss on the device.

    Spec options: precision, compile, source (the program's file). Gradients accumulate over
    micro-batches as in nanoGPT's train.py.
    """
    torch_device = torch.device(spec.device)
    if torch_device.type == "cuda":
        torch.cuda.set_device(torch_device)
        torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    model, optimizer, compute_loss = BASELINES[spec.name](spec, torch_device)
    model.train()
    forward = torch.compile(model) if spec.options["compile"] else model
    parameters = list(model.parameters())
    low_precision = spec.options["precision"] == "bf16"

    def step(batch: Batch) -> Tensor:
        micro_batches = batch.split(spec.micro_batch or spec.batch_seqs)
        losses = []
        for micro_batch in micro_batches:
            autocast = torch.autocast(torch_device.type, dtype=torch.bfloat16)
            with autocast if low_precision else nullcontext():
                loss = compute_loss(forward, micro_batch.inputs_BT, micro_batch.targets_BT)
                loss = loss / len(micro_batches)
            loss.backward()
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(parameters, OPTIM.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).sum()

    return make_device(torch_device, spec.options["precision"]), step


def make_device(torch_device: torch.device, precision: str) -> Device:
    """Return a device for timing a program that sets up its own."""
    return Device(
        torch_device=torch_device,
        name="",
        precision=precision,
        peak_flops=0.0,
        peak_source="unknown",
    )


def build_llmc(spec: WorkerSpec, stack: ExitStack) -> Training:
    """Start llm.c's C trainer in its own process."""
    start = time.perf_counter()
    source = Path(spec.options["source"])
    trainer = LlmcTrainer(source, spec.model_config, OPTIM, spec.batch_seqs)
    stack.callback(trainer.close)
    return Training(
        spec=spec,
        device=make_device(torch.device("cpu"), "fp32"),
        step=lambda batch: trainer.step(batch.inputs_BT, batch.targets_BT),
        chosen=f"{spec.configuration}, no gradient clipping",
        tuning_seconds=time.perf_counter() - start,
        peak_memory_bytes=trainer.peak_memory_bytes,
    )


def build_transformers(spec: WorkerSpec, device: torch.device) -> Baseline:
    """Build GPT2LMHeadModel with its own loss."""
    model = build_gpt2(spec.model_config, spec.model_config.padded_vocab_size).to(device)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": OPTIM.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]

    def compute_loss(forward: Any, inputs: Tensor, targets: Tensor) -> Tensor:
        mean: Tensor = forward(
            input_ids=inputs, labels=inputs, shift_labels=targets, use_cache=False
        ).loss
        return mean

    optimizer = torch.optim.AdamW(groups, lr=OPTIM.lr, betas=BETAS, eps=OPTIM.eps, fused=True)
    return model, optimizer, compute_loss


def build_gpt2(config: ModelConfig, vocab_size: int) -> Any:
    """Build transformers' GPT-2 without dropout or end-of-text. Raises ImportError."""
    import transformers

    transformers.logging.disable_progress_bar()
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=config.n_layer,
            n_head=config.n_head,
            n_embd=config.d_model,
            n_inner=config.d_ff,
            n_positions=config.seq_len,
            vocab_size=vocab_size,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def build_nanogpt(spec: WorkerSpec, device: torch.device) -> Baseline:
    """Build the model of nanoGPT's model.py or build-nanogpt's train_gpt2.py."""
    config = spec.model_config
    module = load_definitions(Path(spec.options["source"]))
    sizes = {
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_embd": config.d_model,
        "block_size": config.seq_len,
        "vocab_size": config.padded_vocab_size,
    }
    if spec.name == "nanogpt":
        model = module.GPT(module.GPTConfig(**sizes, dropout=0.0, bias=True)).to(device)
        optimizer = model.configure_optimizers(OPTIM.weight_decay, OPTIM.lr, BETAS, device.type)
    else:
        module.master_process = False  # a global of the script: whether to print
        model = module.GPT(module.GPTConfig(**sizes)).to(device)
        optimizer = model.configure_optimizers(OPTIM.weight_decay, OPTIM.lr, device.type)
    return model, optimizer, lambda forward, x, y: forward(x, y)[1]


class DefinitionsLoader(InspectLoader):
    """Run only the imports, classes and functions of a training script.

    Skips imports of packages that are not installed, and writes no bytecode.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def get_source(self, fullname: str) -> str:
        tree = ast.parse(self.path.read_text(encoding="utf-8"), str(self.path))
        tree.body = [node for node in tree.body if _is_definition(node)]
        return ast.unparse(tree)


def load_definitions(path: Path) -> ModuleType:
    """Import the classes and functions of a standalone script."""
    spec = ModuleSpec(f"baseline_{path.stem}", DefinitionsLoader(path))
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look up field types
    spec.loader.exec_module(module)
    return module


def _is_definition(node: ast.stmt) -> bool:
    if isinstance(node, ast.Import | ast.ImportFrom):
        names = (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
        )
        return all(name and find_spec(name.partition(".")[0]) for name in names)
    return isinstance(node, ast.ClassDef | ast.FunctionDef)


BASELINES: dict[str, Callable[[WorkerSpec, torch.device], Baseline]] = {
    "transformers": build_transformers,
    "nanogpt": build_nanogpt,
    "build-nanogpt": build_nanogpt,
}
