"""The same optimizer step in ours and in each peer: forward, mean loss, backward, clipping, AdamW, gradients cleared.

In: a `Spec`. Out: a `Rival` that trains on batch after batch of the same ids. Each peer is as its own training program
builds it: its model, its loss, its optimizer; `transformers` and `litgpt`, which leave the optimizer to the user, get
torch's fused AdamW. All have the padded vocabulary, tied embeddings, no dropout and GPT-2's distribution of initial
weights. Absent: equal weights, a schedule of the learning rate, accumulation.
"""

import ast
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from importlib.abc import InspectLoader
from importlib.util import find_spec, module_from_spec, spec_from_loader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from megatoken.bench.spec import OURS, Spec
from megatoken.bench.workload import ALONE, STEPS, build_workload, draw_ids
from megatoken.config import Machine, Optim
from megatoken.device import Device, open_device, wants_compile
from megatoken.model.gpt import INIT_STD
from megatoken.parallel.ranks import Ranks, join
from megatoken.train.probe import pick_micro_batch, rate_micro_batches, try_compile
from megatoken.train.step import train_step

OPTIM = Optim()  # our defaults, for everybody

Train = Callable[[Tensor, Tensor], float]  # inputs and targets (batch, seq_len) -> mean loss in nats
LossOf = Callable[[Any, Tensor, Tensor], Tensor]  # forward, inputs, targets -> mean loss


@dataclass(slots=True, kw_only=True)
class Rival:
    """A model that trains. choosing_seconds: what it took to measure, choose and compile before the first step."""

    spec: Spec
    device: Device
    train: Train
    chosen: str = ""
    choosing_seconds: float = 0.0
    steps: int = 0
    ranks: Ranks = field(default_factory=lambda: Ranks(ALONE))
    joined: ExitStack = field(default_factory=ExitStack)  # what ends with it

    def turn(self, steps: int) -> dict[str, Any]:
        """Train on the next batches; drawing them is not timed."""
        shape, seconds, loss = self.spec.shape, [], 0.0
        for _ in range(steps):
            ids = draw_ids(self.spec.batch_seqs, shape.seq_len + 1, shape.vocab_size, seed=self.steps)
            ids = ids.to(self.device.place).chunk(self.spec.nproc)[self.spec.rank]
            inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
            self.device.synchronize()
            began = time.perf_counter()
            loss = self.train(inputs, targets)
            self.device.synchronize()
            seconds.append(time.perf_counter() - began)
            self.steps += 1
        if self.device.place.type == "cuda":
            torch.cuda.empty_cache()  # the next contender may need it
        memory = self.device.peak_memory_bytes()
        if self.device.place.type == "cpu":  # the same memory for all of them
            memory = int(self.ranks.sum(torch.tensor(memory)))
        return {"seconds": seconds, "loss": loss, "peak_memory_bytes": memory}


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """What a peer's program would have built, on the device."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: LossOf


def build_rival(spec: Spec) -> Rival:
    """Ours or a peer, built in this process."""
    return build_ours(spec) if spec.name == OURS else run_peer(spec, PEERS[spec.name])


def build_ours(spec: Spec) -> Rival:
    """What `megatoken train` would run with nothing set: precision, forms, micro-batch and compilation chosen here."""
    machine = replace(Machine(device=spec.device), **spec.machine)
    began = time.perf_counter()
    share = spec.batch_seqs // spec.nproc
    size = spec.micro_batch or share
    topology = replace(
        ALONE,
        rank=spec.rank,
        world_size=spec.nproc,
        local_rank=spec.rank,
        local_world_size=spec.nproc,
        port=spec.port,
    )
    kind, said = wants_compile(machine, open_device(machine), STEPS)
    work = build_workload(
        spec.shape, machine, batch_seqs=spec.batch_seqs, micro_batch=size, compiled=kind != "off", topology=topology
    )
    joined = ExitStack()
    ranks = joined.enter_context(join(topology, work.device.place.type))
    steady = replace(work.plan.schedule, kind="constant", warmup_steps=0)
    work = replace(work, plan=replace(work.plan, schedule=steady))
    if not spec.micro_batch:
        size = ranks.agree(pick_micro_batch(rate_micro_batches(work.state, work.plan, work.device, share)))
        work = replace(work, plan=work.plan.with_micro_batch(size))
    if kind != "off":
        said = try_compile(work.state, work.plan, work.device, kind)
    work.state.share(ranks)
    precision = f"{work.device.precision}{' masters' if work.choice.masters else ''}"
    forms = said or {"off": "eager", "on": "compile"}.get(kind, f"compile {kind}")
    return Rival(
        spec=spec,
        device=work.device,
        train=lambda inputs, targets: train_step(work.state, work.plan, work.device, inputs, targets).loss,
        chosen=f"{precision}, {work.choice.kernels}, micro-batch {work.plan.micro_batch}, {forms}",
        choosing_seconds=time.perf_counter() - began,
        ranks=ranks,
        joined=joined,
    )


def run_peer(spec: Spec, build: Callable[[Spec, torch.device], Peer]) -> Rival:
    """A peer's step in the spec's precision and compilation, with torch's own settings but for TF32 on CUDA."""
    place = torch.device(spec.device)
    if place.type == "cuda":
        torch.cuda.set_device(place)
        torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    peer = build(spec, place)
    peer.model.train()
    forward = torch.compile(peer.model) if spec.compile else peer.model
    parameters = list(peer.model.parameters())

    def autocast() -> AbstractContextManager[object]:
        return torch.autocast(place.type, dtype=torch.bfloat16) if spec.precision == "bf16" else nullcontext()

    def train(inputs: Tensor, targets: Tensor) -> float:
        with autocast():
            loss = peer.loss(forward, inputs, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, OPTIM.clip)
        peer.optimizer.step()
        peer.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    device = Device(place=place, name="", precision=spec.precision, peak_flops=0.0, peak_source="unknown")
    return Rival(spec=spec, device=device, train=train, chosen=spec.configuration)


def build_transformers(spec: Spec, place: torch.device) -> Peer:
    """GPT2LMHeadModel with its own loss. Source: huggingface.co/docs/transformers/model_doc/gpt2."""
    import transformers

    shape = spec.shape
    config = transformers.GPT2Config(
        n_layer=shape.n_layer,
        n_head=shape.n_head,
        n_embd=shape.d_model,
        n_inner=shape.d_ff,
        n_positions=shape.seq_len,
        vocab_size=shape.padded_vocab_size,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.GPT2LMHeadModel(config).to(place)

    def loss(forward: Any, inputs: Tensor, targets: Tensor) -> Tensor:
        found: Tensor = forward(input_ids=inputs, labels=inputs, shift_labels=targets).loss
        return found

    return Peer(model=model, optimizer=_build_adamw(model), loss=loss)


def build_litgpt(spec: Spec, place: torch.device) -> Peer:
    """litgpt's GPT in GPT-2's shape, but for rotary positions, which are the only ones it has; its chunked loss."""
    from litgpt.config import Config
    from litgpt.model import GPT
    from litgpt.utils import chunked_cross_entropy

    shape = spec.shape
    config = Config(
        block_size=shape.seq_len,
        n_layer=shape.n_layer,
        n_head=shape.n_head,
        n_embd=shape.d_model,
        intermediate_size=shape.d_ff,
        vocab_size=shape.vocab_size,
        padded_vocab_size=shape.padded_vocab_size,
        parallel_residual=False,
        attn_bias=True,
        gelu_approximate="tanh",
    )
    model = GPT(config)
    model.lm_head.weight = model.transformer.wte.weight
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() >= 2:
                weight.normal_(0.0, INIT_STD)
    model.to(place)
    return Peer(
        model=model, optimizer=_build_adamw(model), loss=lambda forward, x, y: chunked_cross_entropy(forward(x), y)
    )


def _build_adamw(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": OPTIM.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=OPTIM.lr, betas=(OPTIM.beta1, OPTIM.beta2), eps=OPTIM.eps, fused=True)


def build_nanogpt(spec: Spec, place: torch.device) -> Peer:
    """nanoGPT's model.py: the user's own copy."""
    module = load_definitions(Path(spec.source))
    model = module.GPT(module.GPTConfig(**_name_sizes(spec), dropout=0.0, bias=True)).to(place)
    betas = (OPTIM.beta1, OPTIM.beta2)
    optimizer = model.configure_optimizers(OPTIM.weight_decay, OPTIM.lr, betas, place.type)
    return Peer(model=model, optimizer=optimizer, loss=lambda forward, x, y: forward(x, y)[1])


def build_build_nanogpt(spec: Spec, place: torch.device) -> Peer:
    """build-nanogpt's train_gpt2.py: the user's own copy, the model without the training."""
    module = load_definitions(Path(spec.source))
    module.master_process = False  # type: ignore[attr-defined]  # one of the script's variables: whether to print
    model = module.GPT(module.GPTConfig(**_name_sizes(spec))).to(place)
    optimizer = model.configure_optimizers(OPTIM.weight_decay, OPTIM.lr, place.type)
    return Peer(model=model, optimizer=optimizer, loss=lambda forward, x, y: forward(x, y)[1])


def _name_sizes(spec: Spec) -> dict[str, int]:
    """A shape in the words of nanoGPT, whose MLP is always 4 times as wide as the model."""
    shape = spec.shape
    return {
        "block_size": shape.seq_len,
        "vocab_size": shape.padded_vocab_size,
        "n_layer": shape.n_layer,
        "n_head": shape.n_head,
        "n_embd": shape.d_model,
    }


class Definitions(InspectLoader):
    """Loads only what a file imports and defines: a training script yields its model without training.

    Imports of what is not installed are passed over; the model does not need them, or its definition says so.
    Nothing is written beside the file, unlike what Python's own loader does.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def get_source(self, fullname: str) -> str:
        return self.path.read_text(encoding="utf-8")

    def get_code(self, fullname: str) -> CodeType:
        tree = ast.parse(self.get_source(fullname), str(self.path))
        tree.body = [node for node in tree.body if _defines(node)]
        return compile(tree, str(self.path), "exec")


def _defines(node: ast.stmt) -> bool:
    if isinstance(node, ast.Import):
        return all(find_spec(alias.name.partition(".")[0]) for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        return bool(node.module and not node.level and find_spec(node.module.partition(".")[0]))
    return isinstance(node, ast.ClassDef | ast.FunctionDef)


def load_definitions(path: Path) -> ModuleType:
    """The classes and functions of a Python file that is no part of any package."""
    name = f"peer_{path.stem}"
    spec = spec_from_loader(name, Definitions(path))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look up the types of their fields
    spec.loader.exec_module(module)
    return module


PEERS: dict[str, Callable[[Spec, torch.device], Peer]] = {
    "transformers": build_transformers,
    "litgpt": build_litgpt,
    "nanogpt": build_nanogpt,
    "build-nanogpt": build_build_nanogpt,
}
