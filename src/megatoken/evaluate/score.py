"""How likely a live model finds what trees of sequences ask for; the same for any number of ranks.

In: trees (tree.py), a model, compiled or not. Out: Sums of log-probabilities, fp32 log-softmax in whatever precision
the model computes. Trees of about the same size make a batch, so that little is filled up; the batches are the same
for any number of ranks, which take them in turn; logits exist only where something is asked for, a chunk at a time.

Shapes: B trees, T nodes, U nodes after which something is asked, C d_model, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from megatoken.device import Device
from megatoken.evaluate.tree import Ints, Tree, put_in_rows
from megatoken.model.gpt import GPT
from megatoken.parallel.ranks import Ranks
from megatoken.parallel.tensor import gather_unembedding
from megatoken.train.state import LOSS_CHUNK

BATCH_NODES = {"cpu": 2048, "mps": 8192, "cuda": 32768}  # of one forward, with what fills up


@dataclass(frozen=True, slots=True)
class Sums:
    """Of each sequence of a tree: the log-likelihood in nats of what it asks for, how many ids that is, and whether
    each of them was the likeliest (True where nobody asked)."""

    log_p: NDArray[np.float64]
    counts: Ints
    greedy: NDArray[np.bool_]


@torch.no_grad()
def score_trees(model: GPT, trees: Sequence[Tree], device: Device, ranks: Ranks, *, greedy: bool = False) -> list[Sums]:
    """Sums of every tree, in order, on every rank; greedy: look for the likeliest id too.

    The model is left in the mode it was in.
    """
    counts = [np.bincount(tree.askers) for tree in trees]
    firsts = np.cumsum([0, *map(len, counts)])
    found = np.zeros((2, firsts[-1]))  # log-likelihood, misses
    batches = plan_batches([len(tree) for tree in trees], BATCH_NODES[device.place.type])
    rank, world = ranks.topology.rank, ranks.topology.world_size
    was_training = model.training
    model.eval()
    with plainly(model) as plain:
        for turn in range(-(-len(batches) // world)):
            # Where batches run out a rank repeats the last: sharded weights are gathered by all or by none.
            index = turn * world + rank
            batch = batches[min(index, len(batches) - 1)]
            log_p, missed = _score_batch(plain, [trees[i] for i in batch], device, greedy)
            if index < len(batches):
                slots = np.concatenate([firsts[i] + trees[i].askers for i in batch])
                np.add.at(found[0], slots, log_p)
                np.add.at(found[1], slots, missed)
    model.train(was_training)
    log_p, misses = ranks.sum(torch.from_numpy(found).to(device.place, device.widest)).cpu().numpy()
    return [
        Sums(log_p[first : first + len(count)], count, misses[first : first + len(count)] == 0)
        for first, count in zip(firsts, counts, strict=False)
    ]


def plan_batches(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Numbers of trees that go together, the largest first: rows of the longest's length hold at most `most` nodes."""
    batches: list[list[int]] = []
    rows = 0
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        if not batches or len(batches[-1]) >= rows:
            batches.append([])
            rows = max(1, most // sizes[i])
        batches[-1].append(i)
    return batches


@contextmanager
def plainly(model: GPT) -> Iterator[GPT]:
    """The model without its compiler, which would begin anew for every shape of a batch."""
    plain: GPT = getattr(model, "_orig_mod", model)
    if all(part._compiled_call_impl is None for part in plain.modules()):
        yield plain
        return
    with torch.compiler.set_stance("force_eager"):  # its blocks are compiled one by one
        yield plain


def _score_batch(
    model: GPT, trees: Sequence[Tree], device: Device, greedy: bool
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Log-probability of every id that the trees ask for, one tree after another, and whether another was likelier."""
    ids_BT, branches = put_in_rows(trees, device.place)
    T = ids_BT.shape[1]
    after = np.concatenate([row * T + tree.after for row, tree in enumerate(trees)])
    nodes_U, rows = np.unique(after, return_inverse=True)
    order = np.argsort(rows, kind="stable")
    rows = rows[order]
    targets = torch.from_numpy(np.concatenate([tree.targets for tree in trees])[order]).to(device.place)
    log_p, missed = [], []
    with device.autocast():
        hidden_UC = model(ids_BT, branches=branches).flatten(0, 1)[torch.from_numpy(nodes_U).to(device.place)]
        weight_VC, chunk = gather_unembedding(model.unembedding), LOSS_CHUNK[device.place.type]
        for start in range(0, len(nodes_U), chunk):
            first, last = np.searchsorted(rows, [start, start + chunk])
            some = torch.from_numpy(rows[first:last] - start).to(device.place)
            log_p_UV = log_softmax(F.linear(hidden_UC[start : start + chunk], weight_VC), model)
            log_p.append(log_p_UV[some, targets[first:last]])
            best_R = log_p_UV.argmax(-1)[some] if greedy else targets[first:last]
            missed.append(best_R != targets[first:last])
    back = np.argsort(order)
    return torch.cat(log_p).double().cpu().numpy()[back], torch.cat(missed).cpu().numpy()[back]


def log_softmax(logits_UV: Tensor, model: GPT) -> Tensor:
    """In fp32, in place where they are fp32 already; padding ids have no probability."""
    scores_UV = logits_UV.float()
    scores_UV[:, model.shape.vocab_size :] = -torch.inf
    return torch.log_softmax(scores_UV, -1, out=scores_UV)
