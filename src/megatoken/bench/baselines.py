"""The same optimizer step in ours and in each baseline: forward, mean loss, backward, clipping, AdamW, zero_grad.

Each baseline is as its own training program builds it: its model, loss and optimizer; `transformers`, which leaves the
optimizer to the user, gets torch's fused AdamW. All have the padded vocabulary, tied embeddings, no dropout and GPT-2's
distribution of initial weights.
"""

import ast
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from megatoken.bench.llmc import LlmcTrainer
from megatoken.bench.spec import LLMC, OURS, WorkerSpec
from megatoken.bench.workload import ONE_PROCESS, STEPS, build_workload, draw_ids
from megatoken.config.model_config import ModelConfig
from megatoken.config.schema import MachineConfig, OptimConfig
from megatoken.data.dataloader import Batch
from megatoken.distributed.comm import Comm, join_process_group
from megatoken.distributed.env import DistEnv
from megatoken.system.device import Device, open_device, wants_compile
from megatoken.train.compilation import compile_forward
from megatoken.train.micro_batch import pick_micro_batch, tune_micro_batch
from megatoken.train.step import train_step

OPTIM = OptimConfig()  # our defaults, for all
BETAS = OPTIM.beta1, OPTIM.beta2

# A model on its device, its optimizer, and the mean loss of forward, inputs and targets.
Baseline = tuple[nn.Module, torch.optim.Optimizer, Callable[[Any, Tensor, Tensor], Tensor]]


@dataclass(slots=True, kw_only=True)
class Training:
    """A model in training. tuning_seconds: measuring, choosing and compiling before the first step."""

    spec: WorkerSpec
    device: Device
    step: Callable[
        [Tensor, Tensor], float
    ]  # inputs and targets (batch, seq_len) -> mean loss in nats
    chosen: str
    tuning_seconds: float = 0.0
    steps: int = 0
    comm: Comm = field(default_factory=lambda: Comm(ONE_PROCESS))
    resources: ExitStack = field(default_factory=ExitStack)  # closed with the process
    peak_memory_bytes: Callable[[], int] | None = None  # None: of this process or its device

    def run(self, steps: int) -> dict[str, Any]:
        """Train on the next batches; drawing them is not timed."""
        config, seconds, loss = self.spec.model_config, [], 0.0
        for _ in range(steps):
            ids = draw_ids(
                self.spec.batch_seqs, config.seq_len + 1, config.vocab_size, seed=self.steps
            )
            ids = ids.to(self.device.torch_device).chunk(self.spec.nproc)[self.spec.rank]
            inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
            self.device.synchronize()
            start = time.perf_counter()
            loss = self.step(inputs, targets)
            self.device.synchronize()
            seconds.append(time.perf_counter() - start)
            self.steps += 1
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # the next worker may need it
        memory = (self.peak_memory_bytes or self.device.peak_memory_bytes)()
        if self.device.type == "cpu":  # all processes share it
            memory = int(self.comm.sum(torch.tensor(memory)))
        return {"seconds": seconds, "loss": loss, "peak_memory_bytes": memory}


def build_training(spec: WorkerSpec) -> Training:
    """Ours or a baseline, built in this process."""
    if spec.name == LLMC:
        return build_llmc(spec)
    return build_ours(spec) if spec.name == OURS else build_baseline(spec)


def build_ours(spec: WorkerSpec) -> Training:
    """What `megatoken train` would run by default: precision, kernels, micro-batch and compilation tuned here."""
    machine = replace(MachineConfig(device=spec.device), **spec.machine)
    start, share, resources = time.perf_counter(), spec.batch_seqs // spec.nproc, ExitStack()
    rank, nproc = spec.rank, spec.nproc
    dist_env = DistEnv(
        rank=rank, world_size=nproc, local_rank=rank, local_world_size=nproc, port=spec.port
    )
    mode, note = wants_compile(machine, open_device(machine), STEPS)
    workload = build_workload(
        spec.model_config,
        machine,
        batch_seqs=spec.batch_seqs,
        micro_batch=spec.micro_batch or share,
        compiled=mode != "off",
        dist_env=dist_env,
    )
    state, device = workload.state, workload.device
    comm = resources.enter_context(join_process_group(dist_env, device.type))
    constant = replace(workload.step_config.schedule, decay="constant", warmup=0)
    step_config = replace(workload.step_config, schedule=constant)
    if not spec.micro_batch:
        micro_batch = pick_micro_batch(tune_micro_batch(state, step_config, device, share))
        step_config = replace(step_config, micro_batch=comm.broadcast_from_rank0(micro_batch))
    if mode != "off":
        note = compile_forward(state, step_config, device, mode)
    state.start_grad_reduction(comm)
    compilation = note or {"off": "eager", "on": "compile"}.get(mode, f"compile {mode}")
    return Training(
        spec=spec,
        device=device,
        step=lambda inputs, targets: (
            train_step(state, step_config, device, Batch(inputs, targets)).loss
        ),
        chosen=f"{device.precision}, {workload.choice}, micro-batch {step_config.micro_batch}, {compilation}",
        tuning_seconds=time.perf_counter() - start,
        comm=comm,
        resources=resources,
    )


def build_baseline(spec: WorkerSpec) -> Training:
    """A baseline's step in the spec's precision and compilation; torch's settings stay, but for TF32 on CUDA."""
    torch_device = torch.device(spec.device)
    if torch_device.type == "cuda":
        torch.cuda.set_device(torch_device)
        torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    model, optimizer, compute_loss = BASELINES[spec.name](spec, torch_device)
    model.train()
    forward = torch.compile(model) if spec.compile else model
    parameters, low = list(model.parameters()), spec.precision == "bf16"

    def step(inputs: Tensor, targets: Tensor) -> float:
        with torch.autocast(torch_device.type, dtype=torch.bfloat16) if low else nullcontext():
            loss = compute_loss(forward, inputs, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, OPTIM.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    device = Device(
        torch_device=torch_device,
        name="",
        precision=spec.precision,
        peak_flops=0.0,
        peak_source="unknown",
    )
    return Training(spec=spec, device=device, step=step, chosen=spec.configuration)


def build_llmc(spec: WorkerSpec) -> Training:
    """llm.c's C trainer in a process of its own."""
    start = time.perf_counter()
    trainer = LlmcTrainer(Path(spec.source), spec.model_config, OPTIM, spec.batch_seqs)
    device = Device(
        torch_device=torch.device("cpu"),
        name="",
        precision="fp32",
        peak_flops=0.0,
        peak_source="unknown",
    )
    resources = ExitStack()
    resources.callback(trainer.close)
    return Training(
        spec=spec,
        device=device,
        step=trainer.step,
        chosen=f"{spec.configuration}, no gradient clipping",
        tuning_seconds=time.perf_counter() - start,
        resources=resources,
        peak_memory_bytes=trainer.peak_memory_bytes,
    )


def build_transformers(spec: WorkerSpec, device: torch.device) -> Baseline:
    """GPT2LMHeadModel with its own loss. Source: huggingface.co/docs/transformers/model_doc/gpt2."""
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

    return (
        model,
        torch.optim.AdamW(groups, lr=OPTIM.lr, betas=BETAS, eps=OPTIM.eps, fused=True),
        compute_loss,
    )


def build_gpt2(config: ModelConfig, vocab_size: int) -> Any:
    """transformers' GPT-2 without dropout, in which no id ends a text. Raises ImportError where it is not installed."""
    import transformers

    transformers.logging.disable_progress_bar()
    sizes = dict(
        n_layer=config.n_layer, n_head=config.n_head, n_embd=config.d_model, n_inner=config.d_ff
    )
    sizes |= dict(n_positions=config.seq_len, vocab_size=vocab_size)
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, **dropout, bos_token_id=None, eos_token_id=None)
    )


def build_nanogpt(spec: WorkerSpec, device: torch.device) -> Baseline:
    """nanoGPT's model.py or build-nanogpt's train_gpt2.py: the user's own copy. Its MLP is 4 times the width."""
    config, module = spec.model_config, load_definitions(Path(spec.source))
    sizes = {"n_layer": config.n_layer, "n_head": config.n_head, "n_embd": config.d_model}
    sizes |= {"block_size": config.seq_len, "vocab_size": config.padded_vocab_size}
    if spec.name == "nanogpt":
        model = module.GPT(module.GPTConfig(**sizes, dropout=0.0, bias=True)).to(device)
        optimizer = model.configure_optimizers(OPTIM.weight_decay, OPTIM.lr, BETAS, device.type)
    else:
        module.master_process = False  # type: ignore[attr-defined]  # a global of the script: whether to print
        model = module.GPT(module.GPTConfig(**sizes)).to(device)
        optimizer = model.configure_optimizers(OPTIM.weight_decay, OPTIM.lr, device.type)
    return model, optimizer, lambda forward, x, y: forward(x, y)[1]


class DefinitionsLoader(InspectLoader):
    """Runs only the imports, classes and functions of a file: a training script's model without its training.

    Imports of what is not installed are skipped. Nothing is written beside the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def get_source(self, fullname: str) -> str:
        tree = ast.parse(self.path.read_text(encoding="utf-8"), str(self.path))
        tree.body = [node for node in tree.body if _is_definition(node)]
        return ast.unparse(tree)


def load_definitions(path: Path) -> ModuleType:
    """The imports, classes and functions of a Python file that is no part of any package."""
    spec = ModuleSpec(f"baseline_{path.stem}", DefinitionsLoader(path))
    module = sys.modules[spec.name] = module_from_spec(
        spec
    )  # where dataclasses look up the types of their fields
    spec.loader.exec_module(module)  # type: ignore[union-attr]
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
