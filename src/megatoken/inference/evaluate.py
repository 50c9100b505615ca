"""Evaluate a model on multiple-choice tasks, or measure its loss on text or token shards."""

import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from megatoken.base.config.schema import MachineConfig
from megatoken.base.errors import ConfigError, DataError, NumericsError
from megatoken.base.system.device import Device, choose_device
from megatoken.data.dataloader import evaluation_windows
from megatoken.data.dataset import Dataset, Folder, load_dataset, open_folder
from megatoken.data.shard_format import MANIFEST_NAME
from megatoken.distributed.comm import Comm
from megatoken.distributed.env import DistEnv
from megatoken.inference.dclm_core import CoreTask, center_accuracy, encode_core_task, read_bundle
from megatoken.inference.multiple_choice import compute_metrics, encode_examples, score_examples
from megatoken.inference.scorer import BATCH_NODES
from megatoken.inference.tasks import CORE, SCORES, Example, find_tasks, read_examples
from megatoken.model.gpt import GPT
from megatoken.model.memory import LOSS_CHUNK
from megatoken.text.load_pretrained import LoadedModel
from megatoken.text.prepare import prepare
from megatoken.text.sources import find_source
from megatoken.text.tokenizer import Tokenizer
from megatoken.train.val_loss import validation_loss

Tasks = Mapping[str, Sequence[Example] | CoreTask]  # examples by task name


def evaluate(
    model: GPT,
    tokenizer: Tokenizer,
    *,
    tasks: str | Sequence[str] | Tasks = (),
    data: str | Path | None = None,
    limit: int = 0,
    split: str | None = None,
    device: Device | None = None,
) -> dict[str, Any]:
    """Score a model on `tasks`, or measure its loss on `data`, as `megatoken eval` does.

    tasks: names such as "hellaswag,piqa" or ["hellaswag", "piqa"], or a dict of examples by task
    name; if empty, the loss is measured. device: None to compute on the device and in the dtype of
    the weights.

    With tasks, `data` is the file of a single task or a folder with one file per task (default: the
    Hugging Face hub), and only the first `limit` examples of each task are used (0 for all). For
    "core", `data` is the folder of nanochat's bundle.

    Without tasks, `data` is token shards, their address, or text that `prepare` reads. `limit` is
    the maximum number of targets, spread evenly over the data (0 for all). `split` is the split of
    the shards to use.

    Returns what `evaluate_tasks` or `evaluate_loss` returns. Raises the errors of those functions,
    ConfigError for an unknown task, and DataError for missing or malformed examples.
    """
    loaded, comm = LoadedModel(model, tokenizer, "the model"), Comm(DistEnv())
    if device is None:
        weight_device = str(model.lm_head_weight.device)
        device = choose_device(MachineConfig(device=weight_device, precision="fp32"))
    if not tasks:
        if data is None:
            raise ConfigError("nothing to evaluate on", fix="pass tasks or data")
        return evaluate_loss(loaded, device, comm, data=data, limit=limit, split=split)
    if not isinstance(tasks, Mapping):
        tasks = read_tasks(tasks, Path(data) if data else None, limit)
    return evaluate_tasks(loaded, device, comm, tasks=tasks)


def read_tasks(names: str | Sequence[str], folder: Path | None, limit: int) -> Tasks:
    """Return the examples of tasks by name; `core` stands for all of CORE.

    folder, limit: `data` and `limit` of `evaluate`. Raises its errors.
    """
    if names == CORE:
        return read_bundle(folder, limit)
    return read_examples(find_tasks(names), folder, limit)


def evaluate_tasks(
    loaded: LoadedModel,
    device: Device,
    comm: Comm,
    *,
    tasks: Tasks,
    token_mean: bool = True,
    per_example: bool = False,
) -> dict[str, Any]:
    """Return {"tasks": {name: {acc, acc_norm, acc_token_mean, stderr, n, seconds}}}.

    A task of CORE also has `centered`, and their mean is returned as `core`.

    tasks: examples by task name. token_mean: whether to compute acc_token_mean. per_example:
    whether to add the prediction for each example. All ranks share the work and return the same
    result. Raises NumericsError for scores that are not finite.
    """
    metrics = {}
    tokenizer, seq_len = loaded.tokenizer, loaded.model.config.seq_len
    for name, examples in tasks.items():
        start = time.perf_counter()
        if isinstance(examples, CoreTask):
            encoded = encode_core_task(examples, tokenizer, seq_len)
        else:
            encoded = encode_examples(examples, tokenizer, seq_len, token_mean=token_mean)
        results = score_examples(loaded.model, encoded, device, comm)
        metrics[name] = compute_metrics(results) | {"seconds": time.perf_counter() - start}
        if per_example:
            fields = (*SCORES.values(), "gold")
            metrics[name]["examples"] = [
                {field: getattr(result, field) for field in fields} for result in results
            ]
        if isinstance(examples, CoreTask):
            metrics[name]["centered"] = center_accuracy(examples, metrics[name])
    centered = [row["centered"] for row in metrics.values() if "centered" in row]
    return {"tasks": metrics} | ({CORE: statistics.fmean(centered)} if centered else {})


def evaluate_loss(
    loaded: LoadedModel,
    device: Device,
    comm: Comm,
    *,
    data: str | Path,
    limit: int,
    split: str | None,
) -> dict[str, Any]:
    """Return `loss_metrics` over windows of shards or text, plus `split` and `data`.

    Windows have the length of the model's context. If `limit` is 0, every token but the first is a
    target. Otherwise, at most `limit` tokens are targets, in full windows spread evenly over the
    data. bits_per_byte is None if the targets hold no text. All ranks share the work and return the same
    result. Raises the errors of `open_text`, DataError for too few tokens, and NumericsError for
    a loss that is not finite.
    """
    model, tokenizer = loaded.model, loaded.tokenizer
    folder = open_folder(data)
    rank = comm.dist_env.rank
    with open_text(folder, tokenizer, split, comm) as dataset:
        split = split or ("val" if len(dataset.val) else "train")
        tokens = dataset.val if split == "val" else dataset.train
        count_bytes = dataset.byte_counter(split, tokenizer.vocabulary)
        split = split if dataset.path == folder.path else "all"
        windows = evaluation_windows(
            tokens, seq_len=model.config.seq_len, limit_tokens=limit or len(tokens)
        )
        if not len(windows):
            raise DataError(f"no tokens to predict in {split}", str(data), "use more text")
        size = max(1, BATCH_NODES[device.type] // windows.seq_len)
        firsts = range(rank * size, len(windows), comm.dist_env.world_size * size)
        batches: Iterable[np.ndarray] = (windows.rows(first, size) for first in firsts)
        n_rest = len(tokens) - 1 - windows.n_targets  # after the last full window
        if n_rest and not limit and rank == 0:
            rest = tokens.gather(np.array([windows.n_targets]), n_rest + 1)
            batches = itertools.chain(batches, [rest])
        chunk = LOSS_CHUNK[device.type]
        metrics = validation_loss(
            model, batches, device, chunk=chunk, comm=comm, count_bytes=count_bytes
        )
    if not math.isfinite(metrics["loss"]):
        raise NumericsError("the loss is not finite", str(data), "use an earlier checkpoint")
    if not metrics["text_bytes"]:
        metrics["bits_per_byte"] = None  # JSON has no NaN
    return {**metrics, "split": split, "data": str(data)}


@contextmanager
def open_text(
    folder: Folder, tokenizer: Tokenizer, split: str | None, comm: Comm
) -> Iterator[Dataset]:
    """Open token shards, or a temporary dataset with the text in its training split.

    Raises DataError for shards of another tokenizer, and ConfigError if a split of text is
    requested.
    """
    data = folder.path
    files = (data, *data.glob("*"))
    if any(path.suffix in (".bin", ".npy") or path.name == MANIFEST_NAME for path in files):
        yield open_shards(folder.where, tokenizer)
        return
    if split:
        raise ConfigError("text has no splits", str(data), "leave --split out")
    with tempfile.TemporaryDirectory(prefix="megatoken-") as local_folder:
        out = Path(comm.broadcast_from_rank0(local_folder))

        def prepare_text() -> None:
            tokenizer.vocabulary.save(out / "tokenizer")
            saved = str(out / "tokenizer")
            prepare(find_source(str(data)), out / "data", tokenizer=saved, val_fraction=0.0)

        comm.run_on_rank0(prepare_text)
        yield load_dataset(out / "data")
        comm.barrier()


def open_shards(data: str, tokenizer: Tokenizer) -> Dataset:
    """Open token shards. Raises DataError as `open_text` does."""
    dataset = load_dataset(data)
    dataset.require_kind("text", "the loss on shards")
    origin = dataset.manifest.tokenizer
    # External shards record only the size of their tokenizer's vocabulary.
    is_same = origin["vocab_size"] == tokenizer.vocab_size
    if origin["fingerprint"] and (dataset.path / "tokenizer").is_dir():
        is_same = dataset.vocabulary.shares_ids(tokenizer.vocabulary)
    if not is_same:
        what = f"shards of tokenizer {origin['name']}, but the model's is {tokenizer.name}"
        raise DataError(what, str(data), "use the text, or shards of the model's tokenizer")
    dataset.set_vocab_size(tokenizer.vocab_size)
    return dataset
