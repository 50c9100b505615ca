"""Evaluate a model on multiple-choice tasks, or measure its loss on text or token shards."""

import itertools
import math
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatoken.config.schema import MachineConfig
from megatoken.data.chat_dataset import require_kind
from megatoken.data.corpus_reader import ReadPosition, read_chunks
from megatoken.data.dataloader import evaluation_windows
from megatoken.data.dataset import Tokens, load_dataset
from megatoken.data.documents import PrepareOptions, encode_segments
from megatoken.data.prepare import prepare
from megatoken.data.remote import local_dataset
from megatoken.data.sources import find_source
from megatoken.data.tokenizer import Tokenizer
from megatoken.distributed.comm import Comm
from megatoken.distributed.env import DistEnv
from megatoken.errors import ConfigError, DataError, NumericsError
from megatoken.eval.multiple_choice import compute_metrics, encode_examples, score_examples
from megatoken.eval.scorer import BATCH_NODES
from megatoken.eval.tasks import SCORES, TASKS, Example, find_tasks, read_examples
from megatoken.eval.val_loss import loss_metrics, validation_loss
from megatoken.model.gpt import GPT
from megatoken.model.memory import LOSS_CHUNK
from megatoken.system.device import Device, choose_device

SPLITS = ("train", "val")


def evaluate(
    model: GPT,
    tokenizer: Tokenizer,
    *,
    tasks: str | Sequence[str] | Mapping[str, Sequence[Example]] = (),
    data: str | Path | None = None,
    limit: int | None = None,
    split: str | None = None,
    token_mean: bool = True,
    per_example: bool = False,
    device: Device | None = None,
    comm: Comm | None = None,
) -> dict[str, Any]:
    """Scores in `tasks`, or without tasks the loss on `data`: the dictionary of `megatoken eval --json`.

    tasks: names such as "hellaswag,piqa" or ["hellaswag", "piqa"], or examples by task name. data: with tasks, a file
    for one, a folder with a file for each, or None for the Hugging Face hub; otherwise token shards, also at an
    address, or any text that `prepare` reads. limit: the first examples of each task, or targets, spread evenly. split:
    of shards, train or val. token_mean=False leaves out acc_token_mean; per_example adds every prediction. device: None
    computes where the weights are, in their dtype. comm: ranks that share the work and all return the same.

    Returns {"tasks": {name: acc, acc_norm, acc_token_mean, stderr, n, seconds}}; or loss (nats per target), perplexity,
    bits_per_byte (None without text), target_tokens, text_bytes, split and data. Raises ConfigError for an unknown task
    or a split of text, DataError for missing or malformed data or shards of another tokenizer, NumericsError for scores
    that are not finite.
    """
    if (limit or 0) < 0:
        raise ConfigError(f"limit is {limit}", "evaluate", "give a number, or 0 for all")
    comm = comm or Comm(DistEnv())
    device = device or choose_device(
        MachineConfig(device=str(model.lm_head_weight.device), precision="fp32")
    )
    if not tasks:
        if data is None:
            raise ConfigError(
                "nothing to evaluate on", "evaluate", f"give tasks ({', '.join(TASKS)}) or data"
            )
        folder = local_dataset(data)
        return evaluate_loss(model, tokenizer, folder, limit or 0, split, device, comm) | {
            "data": str(data)
        }
    if not isinstance(tasks, Mapping):
        tasks = read_examples(find_tasks(tasks), Path(data) if data else None, limit or 0)
    metrics = {}
    for name, examples in tasks.items():
        started = time.perf_counter()
        encoded = encode_examples(examples, tokenizer, model.config.seq_len, token_mean=token_mean)
        results = score_examples(model, encoded, device, comm)
        metrics[name] = compute_metrics(results) | {"seconds": time.perf_counter() - started}
        if per_example:
            fields = (*SCORES.values(), "gold")
            metrics[name]["examples"] = [
                {field: getattr(result, field) for field in fields} for result in results
            ]
    return {"tasks": metrics}


def evaluate_loss(
    model: GPT,
    tokenizer: Tokenizer,
    data: Path,
    limit: int,
    split: str | None,
    device: Device,
    comm: Comm,
) -> dict[str, Any]:
    """Loss, perplexity and bits per byte on shards or text, in windows of the model's context.

    Every token but the first is a target; with a limit, whole windows of as many, spread evenly.
    """
    rank, world_size = comm.dist_env.rank, comm.dist_env.world_size
    with open_tokens(data, tokenizer, split, comm) as (tokens, split):
        windows = evaluation_windows(
            tokens, seq_len=model.config.seq_len, limit_tokens=limit or len(tokens)
        )
        if not len(windows):
            raise DataError(f"no tokens to predict in {split}", str(data), "give more text")
        size = max(1, BATCH_NODES[device.type] // windows.seq_len)
        batches: Iterable[np.ndarray] = (
            windows.rows(first, size)
            for first in range(rank * size, len(windows), world_size * size)
        )
        if (
            rest := 0 if limit or rank else len(tokens) - 1 - windows.n_targets
        ):  # behind the last whole window
            batches = itertools.chain(
                batches, [tokens.gather(np.array([windows.n_targets]), rest + 1)]
            )
        chunk, count_bytes = LOSS_CHUNK[device.type], tokenizer.count_bytes
        metrics = validation_loss(
            model, batches, device, chunk=chunk, comm=comm, count_bytes=count_bytes
        )
        if split == "all" and tokenizer.split_points == "nowhere":  # else ids alone tell the bytes
            ends, count = measure_text(str(data), tokenizer), metrics["target_tokens"]
            starts = windows.starts(0, len(windows))
            text_bytes = (
                (ends[starts + windows.seq_len] - ends[starts]).sum()
                if limit
                else ends[-1] - ends[0]
            )
            metrics = loss_metrics(metrics["loss"] * count, count, int(text_bytes))
    if not math.isfinite(metrics["loss"]):
        raise NumericsError(
            "the loss is not a finite number", str(data), "use an earlier checkpoint"
        )
    if not metrics["text_bytes"]:
        metrics["bits_per_byte"] = None  # JSON has no NaN
    return {**metrics, "split": split, "data": str(data)}


@contextmanager
def open_tokens(
    data: Path, tokenizer: Tokenizer, split: str | None, comm: Comm
) -> Iterator[tuple[Tokens, str]]:
    """Tokens of a split of shards (val if there is one), or of text, "all", prepared in a temporary folder.

    Raises DataError for shards of another tokenizer, ConfigError for a split of text.
    """
    if any(path.suffix in (".bin", ".npy") for path in (data, *data.glob("*"))):
        dataset = load_dataset(data)
        require_kind(dataset, "text", "the loss on shards")
        made_by = dataset.manifest.tokenizer
        # Shards of other programs record the size of the vocabulary only.
        known = made_by["fingerprint"] and (data / "tokenizer").is_dir()
        if not (
            dataset.tokenizer.shares_ids(tokenizer)
            if known
            else made_by["vocab_size"] == tokenizer.vocab_size
        ):
            what = (
                f"shards were made by tokenizer {made_by['name']} ({made_by['vocab_size']:,} ids)"
            )
            what += f", the model's is {tokenizer.name} ({tokenizer.vocab_size:,} ids)"
            raise DataError(
                what, str(data), "give the text itself, or shards of the model's tokenizer"
            )
        dataset.set_vocab_size(tokenizer.vocab_size)
        split = split or ("val" if len(dataset.val) else "train")
        if split not in SPLITS:
            raise ConfigError(f"no split {split!r}", str(data), f"choose of {', '.join(SPLITS)}")
        yield getattr(dataset, split), split
        return
    if split:
        raise ConfigError(
            f"text has no split {split!r}", str(data), "leave it out: all of the text is read"
        )
    with tempfile.TemporaryDirectory(prefix="megatoken-") as own:
        folder = Path(comm.broadcast_from_rank0(own))

        def prepare_text() -> None:
            tokenizer.save(folder / "tokenizer")
            prepare(
                str(data), folder / "data", tokenizer=str(folder / "tokenizer"), val_fraction=0.0
            )

        comm.run_on_rank0(prepare_text)
        yield load_dataset(folder / "data").train, "all"
        comm.barrier()


def measure_text(source: str, tokenizer: Tokenizer) -> NDArray[np.int64]:
    """Return the bytes of a source's text up to the end of each token that `prepare` makes of it."""
    meter: Any = SimpleNamespace(
        eot=0, vocab_size=1 << 32, encode=tokenizer.measure_tokens
    )  # sizes in place of ids
    chunks = read_chunks(find_source(source), options := PrepareOptions(), ReadPosition())
    sizes = np.concatenate(
        [encode_segments(chunk.segments, options, meter).train for chunk in chunks]
    )
    return sizes[1:].cumsum(dtype=np.int64)  # no end-of-text token is before the first document
