"""`megatoken eval`: a model by name; its scores in tasks, or its loss on any text or shards, as a table and as JSON."""

import itertools
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatoken.config import Machine
from megatoken.console import Console
from megatoken.data.dataset import Dataset, open_dataset
from megatoken.data.loader import evaluation_windows
from megatoken.data.prepare import prepare
from megatoken.data.shards import MANIFEST_NAME
from megatoken.data.tokenizer import Tokenizer, load_saved_tokenizer
from megatoken.data.tokens import Tokens
from megatoken.device import Device, open_device
from megatoken.errors import Exit, Fault
from megatoken.evaluate.choice import SCORES, Answer, answer_questions, grade, list_cells, read_questions
from megatoken.evaluate.loss import held_out_loss
from megatoken.evaluate.rows import read_examples
from megatoken.evaluate.score import BATCH_NODES
from megatoken.evaluate.tasks import TASKS, Example, find_tasks
from megatoken.interop.weights import Loaded, load_weights
from megatoken.parallel.ranks import Ranks, join
from megatoken.parallel.topology import read_topology
from megatoken.train.state import LOSS_CHUNK

Exam = Callable[[Loaded, Device, Ranks, Console], dict[str, Any]]
WHOLE = "all"  # the only split of a text


def judge(options: Namespace, exam: Exam) -> dict[str, Any] | None:
    """Load the model and put it to an exam; the answer is None on every rank but the first."""
    topology = read_topology()
    console = Console(to_stderr=options.json, quiet=not topology.is_first)
    device = open_device(
        Machine(device=options.device, precision=options.precision),
        rank=topology.local_rank,
        ranks=topology.local_world_size,
    )
    with join(topology, device.place.type) as ranks:
        loaded = load_weights(options.model, console.warn)
        loaded.model.to(device.place)
        answer = exam(loaded, device, ranks, console)
    return {"model": loaded.source, **answer} if topology.is_first else None


def choose_exam(options: Namespace) -> Exam:
    """Our own tasks, with their examples read and checked, or a loss.

    Raises Fault(CONFIG) when there is nothing to evaluate on, Fault(DATA) for files that are missing or malformed.
    """
    if not options.tasks and not options.data:
        fix = f"give --tasks ({', '.join(TASKS)}), or --data with shards or text"
        raise Fault(Exit.CONFIG, "nothing to evaluate on", "megatoken eval", fix)
    if not options.tasks:
        return partial(measure_loss, options)
    return partial(score_tasks, options, read_examples(find_tasks(options.tasks), options.data, options.limit))


def score_tasks(
    options: Namespace,
    examples: dict[str, list[Example]],
    loaded: Loaded,
    device: Device,
    ranks: Ranks,
    console: Console,
) -> dict[str, Any]:
    """Grades of every task by name; with `--examples` also what was chosen in each example, in the file's order."""
    seq_len = loaded.model.shape.seq_len
    graded = {}
    for name, some in examples.items():
        began = time.perf_counter()
        questions = read_questions(some, loaded.tokenizer, seq_len, token_mean=not options.no_token_mean)
        answers = answer_questions(loaded.model, questions, device, ranks)
        graded[name] = grade(answers) | {"seconds": time.perf_counter() - began}
        if options.examples:
            graded[name]["examples"] = [show_answer(answer) for answer in answers]
    if not options.json:
        show_grades(graded, console)
    return {"tasks": graded}


def show_answer(answer: Answer) -> dict[str, int | None]:
    """The choice under each score, and the right one."""
    return {name: getattr(answer, name) for name in (*SCORES.values(), "gold")}


def show_grades(graded: dict[str, dict[str, Any]], console: Console) -> None:
    """A line a task, percentages with their standard errors."""
    width = max(map(len, graded)) + 2
    console.say(f"{'task':<{width}}{'n':>7}" + "".join(f"{score:>18}" for score in SCORES))
    for name, grades in graded.items():
        extra = f"   perplexity {grades['perplexity']:.2f}" if "perplexity" in grades else ""
        console.say(f"{name:<{width}}{grades['n']:>7,}" + "".join(f"{cell:>18}" for cell in list_cells(grades)) + extra)


def measure_loss(options: Namespace, loaded: Loaded, device: Device, ranks: Ranks, console: Console) -> dict[str, Any]:
    """Loss, perplexity and bits per byte over a split of shards, or over a text, in windows as in training.

    Every token but the first is a target; with `--limit`, as many as fill whole windows from the start.
    """
    seq_len = loaded.model.shape.seq_len
    with open_split(options, loaded, ranks) as (tokens, split):
        windows = evaluation_windows(tokens, seq_len=seq_len, limit_tokens=options.limit or len(tokens))
        if not len(windows):
            raise Fault(Exit.DATA, f"no tokens to predict in {split}", str(options.data), "give more text")
        size = max(1, BATCH_NODES[device.place.type] // windows.seq_len)
        turns = range(ranks.topology.rank * size, len(windows), ranks.topology.world_size * size)
        rest = 0 if options.limit or not ranks.topology.is_first else len(tokens) - 1 - windows.n_targets
        tails = (tokens.gather(np.array([windows.n_targets]), rest + 1) for _ in range(rest > 0))
        held = held_out_loss(
            loaded.model,
            itertools.chain((windows.rows(first, size) for first in turns), tails),
            device,
            chunk=LOSS_CHUNK[device.place.type],
            ranks=ranks,
            byte_lengths=loaded.tokenizer.byte_lengths,
        )
    console.table(
        [
            ("loss", f"{held.loss:.4f} nats a token, perplexity {held.perplexity:.3f}"),
            ("bits per byte", f"{held.bits_per_byte:.4f}"),
            ("over", f"{held.targets:,} tokens that spell {held.text_bytes:,} bytes, {split} of {options.data}"),
        ]
    )
    return {
        "loss": held.loss,
        "perplexity": held.perplexity,
        "bits_per_byte": held.bits_per_byte,
        "target_tokens": held.targets,
        "text_bytes": held.text_bytes,
        "split": split,
        "data": str(options.data),
    }


@contextmanager
def open_split(options: Namespace, loaded: Loaded, ranks: Ranks) -> Iterator[tuple[Tokens, str]]:
    """Tokens of shards, or of text made into shards while they are needed, and which split of the data they are."""
    if is_shards(options.data):
        dataset = open_dataset(options.data)
        check_tokenizer(dataset, loaded.tokenizer)
        split = options.split or ("val" if len(dataset.val) else "train")
        yield getattr(dataset, split), split
        return
    with tempfile.TemporaryDirectory(prefix="megatoken-") as own:
        folder = Path(ranks.agree(own))
        if ranks.topology.is_first:
            loaded.tokenizer.save(folder / "tokenizer")
            try:
                prepare(str(options.data), folder / "data", tokenizer=str(folder / "tokenizer"), val_fraction=0.0)
            except Fault as fault:
                if fault.code != Exit.DATA:
                    raise
                told, _, _ = str(fault).rpartition(" — ")  # its advice is about `prepare`
                fix = "give text or shards; examples of a task need --tasks NAME"
                raise Fault(Exit.DATA, told, fix=fix) from None
        ranks.wait()
        yield open_dataset(folder / "data").train, WHOLE
        ranks.wait()


def is_shards(path: Path) -> bool:
    """Whether this means tokens rather than text."""
    if path.is_dir():
        return (path / MANIFEST_NAME).is_file() or any(path.glob("*.bin")) or any(path.glob("*.npy"))
    return path.suffix in (".bin", ".npy")


def check_tokenizer(dataset: Dataset, tokenizer: Tokenizer) -> None:
    """Raise Fault(DATA) unless the shards are in the model's ids; of foreign ones only the vocabulary is known."""
    made_by, folder = dataset.manifest.tokenizer, dataset.path / "tokenizer"
    known = bool(made_by["fingerprint"]) and folder.is_dir()
    same = (
        load_saved_tokenizer(folder).shares_ids(tokenizer) if known else made_by["vocab_size"] == tokenizer.vocab_size
    )
    if not same:
        theirs = f"{made_by['name']} ({made_by['vocab_size']:,} ids)"
        what = f"shards were made by tokenizer {theirs}, the model's is {tokenizer.name} ({tokenizer.vocab_size:,} ids)"
        raise Fault(Exit.DATA, what, str(dataset.path), "give the text itself, or shards of the model's tokenizer")
    dataset.limit_ids(tokenizer.vocab_size)
