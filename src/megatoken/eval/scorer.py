"""Log-likelihoods of continuations, computed once per shared prefix; the same for any number of ranks.

The sequences of an example are merged into a prefix tree, whose nodes are one row of a batch with a tree-shaped
attention mask. The choices of an example share their context; equal choices get equal scores to the bit.

Shapes: B trees of a batch, T nodes, S sequences, R scored targets, U nodes before a target, C d_model, V vocabulary.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from megatoken.distributed.comm import Comm
from megatoken.distributed.tensor_parallel import gather_lm_head
from megatoken.errors import NumericsError
from megatoken.model.gpt import GPT, TreeMask
from megatoken.model.loss import cap_logits
from megatoken.model.memory import LOSS_CHUNK
from megatoken.system.device import Device
from megatoken.system.torch_compat import uncompiled

Ints = NDArray[np.int64]

BATCH_NODES = {"cpu": 2048, "mps": 8192, "cuda": 32768}  # per forward, including padding


class ScoredSequence(NamedTuple):
    """Token ids (at least two); the last `n_targets` are scored, each given its prefix."""

    ids: list[int]
    n_targets: int


@dataclass(frozen=True, slots=True, eq=False)
class Tree:
    """The prefix tree of S sequences, nodes in depth-first order. A sequence's last id is a target, not a node.

    Per node (T,): id, position in its sequence, end of its subtree. Per target (R,), by sequence: id, node before it.
    n_targets (S,): targets per sequence.
    """

    ids: Ints
    positions: Ints
    ends: Ints
    targets: Ints
    before: Ints
    n_targets: Ints


class TreeScores(NamedTuple):
    """Per sequence of a tree (S,): summed log-likelihood of its targets in nats; whether each target is the argmax."""

    log_p: NDArray[np.float64]
    greedy: NDArray[np.bool_]


def build_tree(sequences: Sequence[ScoredSequence]) -> Tree:
    ids: list[int] = []
    positions: list[int] = []
    ends = np.empty(sum(len(sequence.ids) for sequence in sequences), np.int64)
    before: list[list[int]] = [[] for _ in sequences]
    previous: list[int] = []  # inputs of the sequence added last, and their nodes
    path: list[int] = []
    # In lexicographic order, a prefix that two sequences share is shared by all between them.
    for i in sorted(range(len(sequences)), key=lambda i: sequences[i].ids[:-1]):
        inputs = sequences[i].ids[:-1]
        pairs = zip(previous, inputs, strict=False)
        shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        ends[path[shared:]] = len(ids)
        path = [*path[:shared], *range(len(ids), len(ids) + len(inputs) - shared)]
        ids += inputs[shared:]
        positions += range(shared, len(inputs))
        before[i] = path[len(path) - sequences[i].n_targets :]
        previous = inputs
    ends[path] = len(ids)
    return Tree(
        ids=np.array(ids),
        positions=np.array(positions),
        ends=ends[: len(ids)],
        targets=np.array(
            [id for each in sequences for id in each.ids[len(each.ids) - each.n_targets :]],
            np.int64,
        ),
        before=np.array([node for nodes in before for node in nodes], np.int64),
        n_targets=np.array([sequence.n_targets for sequence in sequences]),
    )


def stack_trees(trees: Sequence[Tree], device: torch.device) -> tuple[Tensor, TreeMask]:
    """Trees as rows padded to the longest: ids (B, T), and the mask by which a node attends to its path to the root."""
    T = max(len(tree.ids) for tree in trees)
    padded = np.zeros((3, len(trees), T), np.int64)
    padded[2] = np.arange(1, T + 1)  # padding attends to itself only
    for row, tree in enumerate(trees):
        padded[:, row, : len(tree.ids)] = tree.ids, tree.positions, tree.ends
    ids, positions, ends = torch.from_numpy(padded).to(device)
    nodes_T = torch.arange(T, device=device)
    mask_BTT = (nodes_T[None, None, :] <= nodes_T[None, :, None]) & (
        nodes_T[None, :, None] < ends[:, None, :]
    )
    return ids, TreeMask(positions_BT=positions, attn_mask_BTT=mask_BTT)


@torch.no_grad()
def score_trees(
    model: GPT,
    trees: Sequence[Tree],
    device: Device,
    comm: Comm,
    on_batch: Callable[[], None] | None = None,
) -> list[TreeScores]:
    """Return the scores of every tree, in order, on every rank, from an fp32 log-softmax.

    on_batch: called on every rank before each batch; all ranks have the same number of batches.
    Raises NumericsError for scores that are not finite.
    """
    firsts = np.cumsum([0, *(len(tree.n_targets) for tree in trees)])
    sums = np.zeros((2, firsts[-1]))  # of log-likelihoods, of targets that are not the argmax
    batches = plan_batches([len(tree.ids) for tree in trees], BATCH_NODES[device.type])
    was_training = model.training
    model.eval()
    with uncompiled(model) as plain:  # a compiled model would recompile for every new shape
        for first in range(0, len(batches), comm.dist_env.world_size):
            if on_batch is not None:
                on_batch()
            number = first + comm.dist_env.rank
            # A rank without a batch repeats the last: sharded weights are gathered by all ranks together.
            batch = batches[min(number, len(batches) - 1)]
            log_p_R, missed_R = _score_batch(plain, [trees[i] for i in batch], device)
            if number < len(batches):
                rows = [
                    np.repeat(np.arange(firsts[i], firsts[i + 1]), trees[i].n_targets)
                    for i in batch
                ]
                np.add.at(sums.T, np.concatenate(rows), np.stack([log_p_R, missed_R], 1))
    model.train(was_training)
    log_p, missed = (
        comm.sum(torch.from_numpy(sums).to(device.torch_device, device.widest)).cpu().numpy()
    )
    if not np.isfinite(log_p).all():
        raise NumericsError(
            "log-likelihoods are not finite numbers", "the model", "use an earlier checkpoint"
        )
    return [TreeScores(log_p[a:b], missed[a:b] == 0) for a, b in itertools.pairwise(firsts)]


def plan_batches(sizes: Sequence[int], max_nodes: int) -> list[list[int]]:
    """Group tree numbers by size, largest first, into batches of at most `max_nodes` nodes including padding.

    A larger tree is a batch by itself. The batches do not depend on the number of ranks.
    """
    batches: list[list[int]] = []
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        if not batches or (len(batches[-1]) + 1) * sizes[batches[-1][0]] > max_nodes:
            batches.append([])
        batches[-1].append(i)
    return batches


def _score_batch(
    model: GPT, trees: Sequence[Tree], device: Device
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Per target (R,), tree after tree: its log-probability, and 1 if it is not the argmax."""
    ids_BT, tree_mask = stack_trees(trees, device.torch_device)
    flat_R = np.concatenate([row * ids_BT.shape[1] + tree.before for row, tree in enumerate(trees)])
    nodes_U, index_R = np.unique(flat_R, return_inverse=True)
    targets_R = np.concatenate([tree.targets for tree in trees])
    log_p_R, missed_R = np.empty((2, len(targets_R)))
    chunk = LOSS_CHUNK[device.type]
    with device.autocast():
        hidden_UC = model(ids_BT, tree_mask=tree_mask).flatten(0, 1)[
            torch.from_numpy(nodes_U).to(device.torch_device)
        ]
        weight_VC = gather_lm_head(model.lm_head_weight)
        for start in range(0, len(nodes_U), chunk):
            logits_UV = F.linear(hidden_UC[start : start + chunk], weight_VC)
            scores_UV = cap_logits(logits_UV.float(), model.config.logit_softcap)
            scores_UV[:, model.config.vocab_size :] = -torch.inf  # padding ids
            torch.log_softmax(scores_UV, -1, out=scores_UV)
            of_chunk = np.flatnonzero(index_R // chunk == start // chunk)
            rows = torch.from_numpy(index_R[of_chunk] - start).to(device.torch_device)
            targets = torch.from_numpy(targets_R[of_chunk]).to(device.torch_device)
            log_p_R[of_chunk] = scores_UV[rows, targets].cpu()
            missed_R[of_chunk] = (scores_UV.argmax(-1)[rows] != targets).cpu()
    return log_p_R, missed_R
