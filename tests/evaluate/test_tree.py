"""Trees: what sequences share is there once, everything asked for is asked for, and nobody sees another branch."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatoken.evaluate.tree import Asked, build_tree, put_in_rows

CPU = torch.device("cpu")


def ask(ids: list[int], count: int) -> Asked:
    return Asked(np.array(ids, np.int64), count)


def test_a_context_is_there_once_and_the_last_ids_are_not() -> None:
    tree = build_tree([ask([5, 6, 7, 1, 2], 2), ask([5, 6, 7, 1, 3, 4], 3), ask([5, 6, 7, 9], 1)])
    assert tree.ids.tolist() == [5, 6, 7, 1, 3]
    assert tree.places.tolist() == [0, 1, 2, 3, 4]
    assert tree.ends.tolist() == [4, 4, 4, 4, 4]
    assert list(zip(tree.askers.tolist(), tree.after.tolist(), tree.targets.tolist(), strict=True)) == [
        (0, 2, 1), (0, 3, 2),
        (1, 2, 1), (1, 3, 3), (1, 4, 4),
        (2, 2, 9),
    ]  # fmt: skip


def test_branches_do_not_see_each_other() -> None:
    tree = build_tree([ask([5, 8, 9, 0], 2), ask([5, 6, 7, 0], 2)])
    assert tree.ids.tolist() == [5, 6, 7, 8, 9]
    assert tree.places.tolist() == [0, 1, 2, 1, 2]
    assert tree.ends.tolist() == [4, 2, 2, 4, 4]
    shorter = build_tree([ask([1, 2], 1)])
    ids, branches = put_in_rows([tree, shorter], CPU)
    assert ids.tolist() == [[5, 6, 7, 8, 9], [1, 0, 0, 0, 0]]
    assert branches.places_BT.tolist() == [[0, 1, 2, 1, 2], [0, 0, 0, 0, 0]]
    sees = branches.sees_BTT.int().tolist()
    assert sees[0] == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 0, 0, 1, 0], [1, 0, 0, 1, 1]]
    assert sees[1] == torch.eye(5).int().tolist()  # what fills up sees itself, so that no row is empty


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=7), min_size=1, max_size=6), st.integers(1, 6))
def test_every_branch_is_its_sequence(sequences: list[list[int]], count: int) -> None:
    tree = build_tree([ask(ids, min(count, len(ids) - 1)) for ids in sequences])
    sees = put_in_rows([tree], CPU)[1].sees_BTT[0].numpy()
    for number, ids in enumerate(sequences):
        asked = min(count, len(ids) - 1)
        nodes = tree.after[tree.askers == number]
        assert tree.targets[tree.askers == number].tolist() == ids[-asked:]
        for back, node in zip(range(asked, 0, -1), nodes, strict=True):
            way = np.flatnonzero(sees[node])
            assert tree.ids[way].tolist() == ids[: len(ids) - back]
            assert tree.places[way].tolist() == list(range(len(ids) - back))
    different = {tuple(ids[:length]) for ids in sequences for length in range(1, len(ids))}
    assert len(tree) == len(different)
