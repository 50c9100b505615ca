"""Everything between a checked recipe and the first step that is more than one call: the run's opening moves.

Each function does one of them and is called once, by pretrain.py, in the order in which they stand here.
"""

import dataclasses
import json
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatoken import __version__
from megatoken.checkpoint.manifest import read_manifest
from megatoken.checkpoint.restore import restore_state
from megatoken.checkpoint.store import Manifest, newest_valid, step_folder, steps, sweep
from megatoken.config import Run
from megatoken.console import Console, format_quantity
from megatoken.data.dataset import Dataset, open_dataset
from megatoken.data.loader import Loader
from megatoken.data.tokenizer import Tokenizer, load_saved_tokenizer, load_tokenizer
from megatoken.device import Device, wants_compile
from megatoken.errors import Exit, Fault
from megatoken.hardware import describe_settings, find_commit
from megatoken.interop.weights import load_weights
from megatoken.model.count import (
    count_matmul_parameters,
    count_parameters,
    expected_initial_loss,
    flops_per_token,
    state_bytes,
)
from megatoken.model.gpt import GPT, draw_weights
from megatoken.model.kernels import Kernels
from megatoken.parallel.layout import Layout, check_layout, lay_out
from megatoken.parallel.ranks import Ranks
from megatoken.parallel.topology import Topology
from megatoken.presets import Shape, describe_heads
from megatoken.recipe import Resolved, render, resolve, science_changes
from megatoken.train.choose import Choice, choose_forms, use_choice
from megatoken.train.journal import METRICS, STATUS, Journal, read_metrics, replace_file
from megatoken.train.probe import pick_micro_batch, rate_micro_batches, try_compile
from megatoken.train.state import Plan, State, build_state

CONFIG, MACHINE, PROVENANCE, TOKENIZER, CHECKPOINTS = (
    "config.yaml",
    "machine.json",
    "provenance.json",
    "tokenizer",
    "checkpoints",
)


def check_folder(out: Path, run: Run) -> None:
    """Raise Fault(CONFIG) if `out` holds something else, or, with a diff, a run of another science."""
    if (
        out.is_dir()
        and any(out.iterdir())
        and not any((out / name).exists() for name in (CONFIG, METRICS, CHECKPOINTS))
    ):
        what = "the folder holds something that is not a run"
        raise Fault(Exit.CONFIG, what, str(out.absolute()), "choose a new folder with --out")
    begun = steps(out / CHECKPOINTS)
    if not begun:
        return
    copy = step_folder(out / CHECKPOINTS, begun[-1]) / CONFIG  # every checkpoint holds one
    recipe = out / CONFIG if (out / CONFIG).is_file() else copy
    if changes := science_changes(resolve(str(recipe)).run, run):
        what = f"the run in this folder was begun with other science: {'; '.join(changes)}"
        raise Fault(Exit.CONFIG, what, str(out), "set these back to go on with it, or choose another --out")


def open_data(run: Run) -> tuple[Dataset, Tokenizer]:
    """The dataset and the tokenizer that made it.

    Raises Fault(DATA) when either is missing or damaged, Fault(CONFIG) when the model cannot hold its ids.
    """
    if not run.data.path:
        fix = "set data.path=FOLDER; `megatoken prepare SOURCE --out FOLDER` makes one"
        raise Fault(Exit.CONFIG, "no dataset given", "data.path", fix)
    dataset = open_dataset(run.data.path, foreign_tokenizer=run.data.tokenizer)
    saved = dataset.path / TOKENIZER
    tokenizer = load_saved_tokenizer(saved) if saved.is_dir() else load_tokenizer(run.data.tokenizer)
    made_by = dataset.manifest.tokenizer["fingerprint"]
    if made_by and made_by != tokenizer.fingerprint:
        what = f"shards were made by tokenizer {made_by[:12]}, the folder holds {tokenizer.fingerprint[:12]}"
        raise Fault(Exit.DATA, what, str(dataset.path), "prepare the dataset again")
    vocab_size = run.model.vocab_size or tokenizer.vocab_size
    if vocab_size < tokenizer.vocab_size:
        what = f"model.vocab_size {vocab_size} is smaller than the tokenizer's {tokenizer.vocab_size}"
        raise Fault(Exit.CONFIG, what, "model.vocab_size", "set it to 0 to take the tokenizer's")
    dataset.limit_ids(tokenizer.vocab_size)
    prompt_tokens = len(tokenizer.encode(run.sample.prompt))
    if run.sample.every.value and prompt_tokens >= run.model.seq_len:
        what = f"sample.prompt has {prompt_tokens} tokens, the model's context is {run.model.seq_len}"
        raise Fault(Exit.CONFIG, what, "sample.prompt", "shorten it, or set sample.every=0")
    return dataset, tokenizer


def check_space(out: Path, shape: Shape) -> None:
    """Raise Fault(STORAGE) unless a checkpoint and its replacement fit on the disk of the run folder."""
    needed, free = 2 * state_bytes(shape), shutil.disk_usage(out).free
    if free < needed:
        what = f"two checkpoints need {format_quantity(needed, 'B')}, {format_quantity(free, 'B')} are free"
        raise Fault(Exit.STORAGE, what, str(out), "free some space or choose another --out")


def introduce(
    console: Console,
    resolved: Resolved,
    out: Path,
    device: Device,
    dataset: Dataset,
    tokenizer: Tokenizer,
    loader: Loader,
    shape: Shape,
    layout: Layout,
) -> None:
    """Say what is about to happen: model, data, budget, machine, and the loss to expect first."""
    run = resolved.run
    epoch_tokens = loader.n_windows * shape.seq_len
    total_steps = run.total_steps(epoch_tokens)
    tokens = total_steps * run.budget.batch_tokens
    flops = flops_per_token(shape, causal=False)
    peak = f"peak {format_quantity(device.peak_flops, 'FLOP/s')} ({device.peak_source})" if device.peak_flops else ""
    rows = [
        ("run", f"{resolved.name} in {out}"),
        (
            "model",
            f"{shape.n_layer} layers, {describe_heads(shape)}, width {shape.d_model}, context {shape.seq_len}: "
            f"{count_parameters(shape):,} parameters, {count_matmul_parameters(shape):,} in matrix products",
        ),
        (
            "data",
            f"{dataset.path}: {len(dataset.train):,} train and {len(dataset.val):,} held-out tokens, "
            f"tokenizer {tokenizer.name} ({tokenizer.vocab_size:,} ids)",
        ),
        (
            "budget",
            f"{total_steps:,} steps of {run.budget.batch_tokens:,} tokens = {format_quantity(tokens)} tokens = "
            f"{tokens / epoch_tokens:.3g} epochs",
        ),
        ("work", f"{flops:,} FLOPs a token (full attention), {format_quantity(flops * tokens, 'FLOP')} in all"),
        ("machine", ", ".join(part for part in (str(device.place), device.name, device.precision, peak) if part)),
        ("loss", f"expected at first: ln({shape.vocab_size:,}) = {expected_initial_loss(shape):.2f} nats"),
    ]
    rows[-1:-1] = [("layout", str(layout))] if layout != Layout() else []
    console.table(rows)
    if not len(dataset.val):
        console.warn("the dataset has no validation split: no held-out loss will be measured")
    used = tokenizer.vocab_size
    if shape.padded_vocab_size >= used + 256:
        console.warn(f"model.vocab_size {shape.vocab_size:,} for a tokenizer of {used:,} ids wastes memory and time")


def open_loader(run: Run, dataset: Dataset, shape: Shape, topology: Topology) -> Loader:
    """The batches of this rank. Raises Fault(CONFIG) when they do not divide, Fault(DATA) when there is not one.

    Who reads what does not depend on how the model is sharded: tensor neighbours read the same.
    """
    layout = lay_out("none", run.machine.tensor_parallel, rank=topology.rank, world_size=topology.world_size)
    check_layout(layout, shape)
    return Loader(
        dataset.train,
        seq_len=shape.seq_len,
        batch_seqs=run.batch_seqs,
        seed=run.seed,
        rank=layout.reader,
        world_size=layout.readers,
    )


def build(
    run: Run,
    shape: Shape,
    tokenizer: Tokenizer,
    device: Device,
    out: Path,
    console: Console,
    layout: Layout,
    ranks: Ranks,
) -> State:
    """A model with initial, given (`model.init`) or yet to be restored weights, on its device, with its optimizer."""
    with torch.device("cpu" if layout.is_whole else "meta"):
        model = GPT(shape, dropout=run.model.dropout)
    state = build_state(model, run, device, layout)
    state.ranks = ranks
    if not run.model.init:
        state.placement.fill(draw_weights(model, run.seed))
    elif not steps(out / CHECKPOINTS):
        state.placement.fill(_adopt(shape, run.model.init, tokenizer, console))
    return state


def _adopt(want: Shape, name: str, tokenizer: Tokenizer, console: Console) -> Iterator[tuple[str, Tensor]]:
    """The weights of a run or a Hugging Face model; a shorter context takes the first of learned positions."""
    loaded = load_weights(name, console.warn)
    have = loaded.model.shape
    sizes, wanted = (dataclasses.asdict(shape) | {"n_kv_head": shape.kv_heads} for shape in (have, want))
    differs = [f"model.{name}={size}" for name, size in sizes.items() if name != "seq_len" and size != wanted[name]]
    if want.positions == "learned" and have.seq_len < want.seq_len:
        differs.append(f"model.seq_len={have.seq_len}")
    if differs:
        raise Fault(Exit.CONFIG, "model.init is of another shape", name, f"set {' '.join(differs)}")
    if not loaded.tokenizer.shares_ids(tokenizer):
        mine, theirs = (f"{t.name} ({t.fingerprint[:8]})" for t in (tokenizer, loaded.tokenizer))
        what = f"model.init was trained with tokenizer {theirs}, the dataset is made by {mine}"
        raise Fault(Exit.DATA, what, name, "prepare the dataset with the model's tokenizer")
    for weight, values in loaded.model.state_dict().items():
        yield weight, values[: want.seq_len] if weight == "positions.weight" else values
    console.say(f"weights from {loaded.source}")


def restore(out: Path, state: State, dataset: Dataset, journal: Journal, console: Console, ranks: Ranks) -> None:
    """Bring the state to the newest whole checkpoint, if there is one, and the journal back to its step.

    Damaged checkpoints are named and passed over. Rank 0 looks and tidies, the others read what it found. Raises
    Fault(DATA) when the dataset is not the one trained on.
    """
    root = out / CHECKPOINTS
    if ranks.topology.is_first:
        _restore_newest(root, state, dataset, journal, console)
    step = ranks.agree(state.step)
    if not ranks.topology.is_first and step:
        folder = step_folder(root, step)
        restore_state(folder, read_manifest(folder), state, verified=False)


def _restore_newest(root: Path, state: State, dataset: Dataset, journal: Journal, console: Console) -> None:
    sweep(root)

    def tell(path: Path, fault: Fault) -> None:
        console.warn(f"{fault}: passing over {path.name}")
        journal.write("event", 0, 0, what="damaged checkpoint", checkpoint=path.name, message=str(fault))

    found = newest_valid(root, tell)
    if found is None:
        if steps(root):
            raise Fault(Exit.CHECKPOINT, "no checkpoint of this run is whole", str(root), "choose another --out")
        journal.rewind(0)
        return
    folder, manifest = found
    _check_same_data(manifest, dataset)
    restore_state(folder, manifest, state)
    journal.rewind(state.step)
    console.say(f"going on from {folder.name}")


def _check_same_data(manifest: Manifest, dataset: Dataset) -> None:
    if manifest.meta.get("dataset") != dataset.fingerprint:
        what = f"checkpoint was trained on dataset {manifest.meta.get('dataset')}, this one is {dataset.fingerprint}"
        fix = "point data.path at the dataset the run began with, or choose another --out"
        raise Fault(Exit.DATA, what, str(dataset.path), fix)


def is_finished(out: Path, state: State, plan: Plan) -> bool:
    """Whether the restored state is the end of a run that said so itself."""
    return state.step >= plan.total_steps and _read_facts(out / STATUS).get("state") == "done"


def _read_facts(path: Path) -> dict[str, Any]:
    """A JSON object; empty when there is none, or when a power loss left half of one."""
    try:
        facts = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def choose_kernels(
    out: Path, run: Run, state: State, plan: Plan, device: Device, console: Console, ranks: Ranks, *, explain: bool
) -> None:
    """Compute with the forms of the operations that the recipe names, the run began with, or are fastest here.

    What a run began with is kept in its folder: a resume must add in the same order to end bit-identical. Rank 0
    chooses for all.
    """
    mine = None
    if ranks.topology.is_first:
        mine = dataclasses.asdict(_choose_forms(out, run, state, plan, device))
    chosen = ranks.agree(mine)
    choice = Choice(**chosen | {"kernels": Kernels(**chosen["kernels"])})
    use_choice(state, choice, device)
    console.say(f"forms    {choice}")
    if choice.note:
        console.warn(choice.note)
    for name, said in [*choice.explain(), *describe_settings()] if explain else []:
        console.say(f"  {name:<9} {said}")


def _choose_forms(out: Path, run: Run, state: State, plan: Plan, device: Device) -> Choice:
    wishes = {name: getattr(run.machine, name) for name in ("linear", "attention", "mixed", "fused", "threads")}
    compiled = wants_compile(run.machine, device, plan.total_steps)[0] != "off"
    circumstances: dict[str, object] = {
        "device": device.name,
        "precision": device.precision,
        "dropout": run.model.dropout,
        "compiled": compiled,
        **wishes,
    }
    memory = out / MACHINE
    facts = _read_facts(memory)
    kept = facts.get("forms", {})
    if kept.get("circumstances") == circumstances:
        choice = Choice(kernels=Kernels(**kept["kernels"]), masters=kept["masters"], seconds=kept["seconds"])
    else:
        size = run.machine.micro_batch if run.machine.micro_batch != "auto" else run.batch_seqs
        choice = choose_forms(
            state.model.shape,
            run.machine,
            device,
            micro_batch=size,
            dropout=run.model.dropout,
            compiled=compiled,
        )
        forms = {"circumstances": circumstances, **dataclasses.asdict(choice)}
        replace_file(memory, json.dumps({**facts, "forms": forms}, indent=1) + "\n")
    return choice


def choose_micro_batch(out: Path, run: Run, state: State, plan: Plan, device: Device, console: Console) -> int:
    """The micro-batch asked for, the one remembered in the run folder, or the fastest that all ranks measure now."""
    if run.machine.micro_batch != "auto":
        return run.machine.micro_batch
    share = run.batch_seqs // state.layout.readers
    circumstances = {
        "device": device.name,
        "precision": device.precision,
        "batch_seqs": share,
        "loss_chunk": plan.loss_chunk,
    }
    memory, first = out / MACHINE, state.ranks.topology.is_first
    remembered = _read_facts(memory) if first else {}
    kept = remembered.get("micro_batch") if remembered.get("circumstances") == circumstances else None
    if kept := state.ranks.agree(kept):
        return int(kept)
    rates = rate_micro_batches(state, plan, device, share)
    best = pick_micro_batch(rates)
    said = ", ".join(f"{size}: {rate:,.0f}" for size, rate in rates.items() if rate)
    console.say(f"micro-batch {best} of {share} sequences" + (f" (tokens/s by size: {said})" if said else ""))
    if first:
        record = {**remembered, "micro_batch": best, "circumstances": circumstances, "tokens_per_second": rates}
        replace_file(memory, json.dumps(record, indent=1) + "\n")
    return best


def compile_model(run: Run, state: State, plan: Plan, device: Device, console: Console) -> None:
    """Compile the forward where that is wanted and works; say so in one line where it does not."""
    kind, said = wants_compile(run.machine, device, plan.total_steps)
    if kind != "off" and not state.layout.is_whole:
        kind = "blocks"  # between them weights are gathered
    if kind != "off":
        said = try_compile(state, plan, device, kind)
    if said:
        console.warn(said)


def list_seen(out: Path) -> list[tuple[str, int]]:
    """(kind, step) of what the journal already tells: a resume repeats nothing."""
    return sorted({(row["kind"], row["step"]) for row in read_metrics(out)})


def record_start(
    out: Path, resolved: Resolved, tokenizer: Tokenizer, journal: Journal, device: Device, topology: Topology
) -> None:
    """Write what the run is made of: resolved recipe, tokenizer, versions and machine."""
    replace_file(out / CONFIG, render(resolved.run, resolved.origins))
    tokenizer.save(out / TOKENIZER)  # also over that of a start that came to nothing
    facts: dict[str, Any] = {
        "megatoken": __version__,
        "commit": find_commit(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "device": device.name,
        "precision": device.precision,
        "processes": topology.world_size,
        "peak_flops": device.peak_flops,
        "peak_source": device.peak_source,
        "command": sys.argv,
    }
    replace_file(out / PROVENANCE, json.dumps(facts, indent=1) + "\n")
    journal.status(state="running", message="")
