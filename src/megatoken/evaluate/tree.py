"""Token sequences that begin alike as one tree, so that a model computes what they share once.

In: the sequences of one question, each with how many of its last ids are asked for. Out: a Tree, whose nodes are ids
in the order of a walk from the root, and several trees as rows for the model. The choices of a question share
their context, and often the first words of the answer; equal choices get equal scores to the bit.

Shapes: B trees of a batch, T nodes of a tree, R ids asked for.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatoken.model.gpt import Branches

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A sequence of ids, of which the probability of the last `count` is asked for, each after all before it."""

    ids: Ints
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class Tree:
    """Nodes (T,): id, place in its sequence, last node below it. Reads (R,): the node after which an id is asked for,
    that id, and the number of the sequence that asks. The last id of a sequence is never a node on its account."""

    ids: Ints
    places: Ints
    ends: Ints
    after: Ints
    targets: Ints
    askers: Ints

    def __len__(self) -> int:
        return len(self.ids)


def build_tree(sequences: Sequence[Asked]) -> Tree:
    """The tree of one question's sequences, every one of at least two ids."""
    inputs = [sequence.ids[:-1] for sequence in sequences]
    # In lexicographic order whatever two have in common is common to all between them.
    order = sorted(range(len(inputs)), key=lambda i: inputs[i].astype(">i8").tobytes())
    path = before = np.empty(0, np.int64)  # nodes and ids of the sequence added last
    ends = np.empty(sum(map(len, inputs)), np.int64)
    ids, places, after = [], [], [np.empty(0, np.int64)] * len(inputs)
    count = 0
    for i in order:
        shared = _count_shared(before, inputs[i])
        ends[path[shared:]] = count - 1
        new = np.arange(count, count + len(inputs[i]) - shared)
        ids.append(inputs[i][shared:])
        places.append(np.arange(shared, len(inputs[i])))
        path, before, count = np.concatenate([path[:shared], new]), inputs[i], count + len(new)
        after[i] = path[len(path) - sequences[i].count :]
    ends[path] = count - 1
    return Tree(
        ids=np.concatenate(ids),
        places=np.concatenate(places),
        ends=ends[:count],
        after=np.concatenate(after),
        targets=np.concatenate([sequence.ids[len(sequence.ids) - sequence.count :] for sequence in sequences]),
        askers=np.repeat(np.arange(len(sequences)), [sequence.count for sequence in sequences]),
    )


def _count_shared(a: Ints, b: Ints) -> int:
    """How many first ids two sequences have in common."""
    length = min(len(a), len(b))
    differs = np.flatnonzero(a[:length] != b[:length])
    return int(differs[0]) if len(differs) else length


def put_in_rows(trees: Sequence[Tree], place: torch.device) -> tuple[Tensor, Branches]:
    """Ids (B, T) of trees as rows, filled up to the longest, and what each node is and sees: its way to the root."""
    longest = max(map(len, trees))
    ids_BT, places_BT = np.zeros((2, len(trees), longest), np.int64)
    ends_BT = np.tile(np.arange(longest), (len(trees), 1))  # what fills up a row sees nothing but itself
    for row, tree in enumerate(trees):
        ids_BT[row, : len(tree)], places_BT[row, : len(tree)] = tree.ids, tree.places
        ends_BT[row, : len(tree)] = tree.ends
    ids, places, ends = (torch.from_numpy(rows).to(place) for rows in (ids_BT, places_BT, ends_BT))
    nodes_T = torch.arange(longest, device=place)
    sees_BTT = (nodes_T[None, None, :] <= nodes_T[None, :, None]) & (nodes_T[None, :, None] <= ends[:, None, :])
    return ids, Branches(places_BT=places, sees_BTT=sees_BTT)
