"""Compute log-likelihoods of continuations, running the model once for each shared prefix.

The sequences of an example become a prefix tree, which is one row of a batch with a tree-shaped
attention mask. Equal choices get bit-equal scores, and scores do not depend on the number of ranks.

Shapes: B trees in a batch, T nodes, S sequences, R targets, U nodes that predict a target, C
d_model, V vocabulary.
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

from megatoken.base.errors import NumericsError
from megatoken.base.system.device import Device
from megatoken.base.system.torch_compat import uncompiled
from megatoken.data.vocabulary import Ints
from megatoken.distributed.comm import Comm
from megatoken.distributed.tensor_parallel import gather_lm_head
from megatoken.model.gpt import GPT
from megatoken.model.loss import cap_logits
from megatoken.model.masks import TreeMask
from megatoken.model.memory import LOSS_CHUNK

BATCH_NODES = {"cpu": 2048, "mps": 8192, "cuda": 32768}  # nodes per forward, including padding


class ScoredSequence(NamedTuple):
    """At least two token ids; the last `n_targets` are scored."""

    ids: list[int]
    n_targets: int


@dataclass(frozen=True, eq=False)
class Tree:
    """The prefix tree of S sequences.

    Nodes are input tokens, numbered depth first. A sequence's last id is only a target, not a node.

    ids, positions, ends (T,): for each node, its id, its position in the sequence, and the number
    after that of the last node of its subtree. targets, parents (R,): for each target, sequence by
    sequence, its id and the node that predicts it. n_targets (S,): number of targets of each
    sequence.
    """

    ids: Ints
    positions: Ints
    ends: Ints
    targets: Ints
    parents: Ints
    n_targets: Ints


class TreeScores(NamedTuple):
    """Scores of the sequences (S,) of a tree.

    log_p: summed log-likelihood of the targets, in nats. greedy: whether all targets are the
    argmax.
    """

    log_p: NDArray[np.float64]
    greedy: NDArray[np.bool_]


def build_tree(sequences: Sequence[ScoredSequence]) -> Tree:
    ids: list[int] = []
    positions: list[int] = []
    ends = np.empty(sum(len(sequence.ids) for sequence in sequences), np.int64)
    parents: list[list[int]] = [[] for _ in sequences]
    previous: list[int] = []  # inputs of the previous sequence
    path: list[int] = []  # nodes of these inputs
    # In lexicographic order, sequences that share a prefix are adjacent.
    for i in sorted(range(len(sequences)), key=lambda i: sequences[i].ids[:-1]):
        inputs = sequences[i].ids[:-1]
        shared = count_shared([previous, inputs])
        ends[path[shared:]] = len(ids)
        path = [*path[:shared], *range(len(ids), len(ids) + len(inputs) - shared)]
        ids += inputs[shared:]
        positions += range(shared, len(inputs))
        parents[i] = path[len(path) - sequences[i].n_targets :]
        previous = inputs
    ends[path] = len(ids)
    targets = [sequence.ids[len(sequence.ids) - sequence.n_targets :] for sequence in sequences]
    return Tree(
        ids=np.array(ids),
        positions=np.array(positions),
        ends=ends[: len(ids)],
        targets=np.array(list(itertools.chain(*targets)), np.int64),
        parents=np.array(list(itertools.chain(*parents)), np.int64),
        n_targets=np.array([sequence.n_targets for sequence in sequences]),
    )


def count_shared(sequences: Sequence[Sequence[int]]) -> int:
    """Return the length of the longest common prefix."""
    columns = zip(*sequences, strict=False)
    return len(list(itertools.takewhile(lambda ids: len(set(ids)) == 1, columns)))


def stack_trees(trees: Sequence[Tree], device: torch.device) -> tuple[Tensor, TreeMask]:
    """Return padded ids (B, T), and a mask: each node attends only to its path from the root."""
    T = max(len(tree.ids) for tree in trees)
    padded = np.zeros((3, len(trees), T), np.int64)
    padded[2] = np.arange(1, T + 1)  # padding attends to itself only
    for row, tree in enumerate(trees):
        padded[:, row, : len(tree.ids)] = tree.ids, tree.positions, tree.ends
    ids, positions, ends = torch.from_numpy(padded).to(device)
    nodes_T = torch.arange(T, device=device)
    is_earlier_TT = nodes_T <= nodes_T[:, None]
    mask_BTT = is_earlier_TT & (nodes_T[:, None] < ends[:, None, :])
    return ids, TreeMask(positions_BT=positions, attn_mask=mask_BTT[:, None])


@torch.no_grad()
def score_trees(
    model: GPT,
    trees: Sequence[Tree],
    device: Device,
    comm: Comm,
    on_batch: Callable[[], None] | None = None,
) -> list[TreeScores]:
    """Return the scores of all trees, in order, on every rank; the log-softmax is in fp32.

    on_batch: called before each batch; every rank has the same number of batches. Raises
    NumericsError for scores that are not finite.
    """
    firsts = np.cumsum([0, *(len(tree.n_targets) for tree in trees)])  # sequence numbers
    sums = np.zeros((firsts[-1], 2))  # log-likelihood, number of targets that are not the argmax
    batches = plan_batches([len(tree.ids) for tree in trees], BATCH_NODES[device.type])
    was_training = model.training
    model.eval()
    with uncompiled(model) as plain:  # a compiled model would recompile for every new shape
        for first in range(0, len(batches), comm.dist_env.world_size):
            if on_batch is not None:
                on_batch()
            number = first + comm.dist_env.rank
            # A rank without a batch repeats the last one: all ranks must gather sharded weights.
            batch = batches[min(number, len(batches) - 1)]
            scores_R2 = _score_batch(plain, [trees[i] for i in batch], device)
            if number < len(batches):
                sequences = [np.arange(firsts[i], firsts[i + 1]) for i in batch]
                counts = [trees[i].n_targets for i in batch]
                rows_R = np.repeat(np.concatenate(sequences), np.concatenate(counts))
                np.add.at(sums, rows_R, scores_R2)
    model.train(was_training)
    total = comm.sum(torch.from_numpy(sums).to(device.torch_device, device.widest))
    log_p, missed = total.cpu().numpy().T
    if not np.isfinite(log_p).all():
        raise NumericsError(
            "log-likelihoods are not finite numbers", fix="use an earlier checkpoint"
        )
    return [TreeScores(log_p[a:b], missed[a:b] == 0) for a, b in itertools.pairwise(firsts)]


def plan_batches(sizes: Sequence[int], max_nodes: int) -> list[list[int]]:
    """Group tree numbers, largest tree first, into batches of at most `max_nodes` padded nodes.

    A tree with more than `max_nodes` nodes gets its own batch. The batches do not depend on the
    number of ranks.
    """
    batches: list[list[int]] = []
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        if not batches or (len(batches[-1]) + 1) * sizes[batches[-1][0]] > max_nodes:
            batches.append([])
        batches[-1].append(i)
    return batches


def _score_batch(model: GPT, trees: Sequence[Tree], device: Device) -> NDArray[np.float64]:
    """Return for each target (R, 2) its log-probability, and 0 if it is the argmax, else 1."""
    ids_BT, tree_mask = stack_trees(trees, device.torch_device)
    T = ids_BT.shape[1]
    parents_R = np.concatenate([row * T + tree.parents for row, tree in enumerate(trees)])
    nodes_U, index_R = np.unique(parents_R, return_inverse=True)
    targets_R = np.concatenate([tree.targets for tree in trees])
    scores_R2 = np.empty((len(targets_R), 2))
    chunk = LOSS_CHUNK[device.type]
    with device.autocast():
        hidden_BTC = model(ids_BT, tree_mask=tree_mask)
        hidden_UC = hidden_BTC.flatten(0, 1)[torch.from_numpy(nodes_U).to(device.torch_device)]
        weight_VC = gather_lm_head(model.lm_head_weight)
        for start in range(0, len(nodes_U), chunk):
            logits_UV = F.linear(hidden_UC[start : start + chunk], weight_VC)
            log_p_UV = cap_logits(logits_UV.float(), model.config.logit_softcap)
            log_p_UV[:, model.config.vocab_size :] = -torch.inf  # ids that pad the vocabulary
            torch.log_softmax(log_p_UV, -1, out=log_p_UV)
            in_chunk = np.flatnonzero(index_R // chunk == start // chunk)
            rows = torch.from_numpy(index_R[in_chunk] - start).to(device.torch_device)
            targets = torch.from_numpy(targets_R[in_chunk]).to(device.torch_device)
            scores_R2[in_chunk, 0] = log_p_UV[rows, targets].cpu()
            scores_R2[in_chunk, 1] = (log_p_UV.argmax(-1)[rows] != targets).cpu()
    return scores_R2
