"""The server counts right and wrong drafts by source and position."""

import random
from collections import Counter

from sglang_qspec.policy.positions import POSITIONS, Positions
from sglang_qspec.trie import DraftTree, DraftTrees, Source

QUEUE, STEP = Source.QUEUE, Source.STEP


def tree(parents: tuple[int, ...], sources: tuple[Source, ...]) -> DraftTree:
    size = len(parents)
    return DraftTree(tuple(range(size)), parents, sources, (1.0,) * size)


def test_only_children_of_accepted_nodes_are_judged() -> None:
    # 0 - 1 - 3 - 5,  0 - 2 - 4: the target accepts 1 and rejects 3.
    branching = tree((0, 0, 0, 1, 2, 3), (QUEUE, QUEUE, STEP, STEP, STEP, QUEUE))
    chain = tree((0, 0), (QUEUE, STEP))
    positions = Positions()
    positions.record(DraftTrees.of([branching, chain], 6), [[1], [1]])
    described = positions.describe()
    assert described["queue"]["judged"][:3] == [1, 0, 0]
    assert described["queue"]["right"][:3] == [1, 0, 0]
    assert described["step"]["judged"][:3] == [2, 1, 0]
    assert described["step"]["right"][:3] == [1, 0, 0]
    assert sum(described["prompt"]["judged"]) == 0


def test_the_last_position_counts_all_later_ones() -> None:
    size = POSITIONS + 4
    chain = tree((0, *range(size - 1)), (STEP,) * size)
    positions = Positions()
    positions.record(DraftTrees.of([chain], size), [list(range(1, size))])
    assert positions.right[STEP].tolist() == [1] * (POSITIONS - 1) + [4]
    assert (positions.judged == positions.right).all()


def test_roots_and_padding_are_never_judged() -> None:
    positions = Positions()
    positions.record(DraftTrees.of([tree((0,), (QUEUE,))] * 3, 1), [[], [], []])
    positions.record(DraftTrees.of([tree((0, 0), (QUEUE, QUEUE))], 8), [[1]])
    assert positions.judged.sum() == 1


def test_random_trees_are_counted_as_a_plain_walk_counts_them() -> None:
    rng = random.Random(3)
    positions = Positions()
    judged: Counter[tuple[Source, int]] = Counter()
    right: Counter[tuple[Source, int]] = Counter()
    for _ in range(50):
        batch, paths = [], []
        for _ in range(rng.randint(1, 4)):
            size = rng.randint(1, 24)
            parents = (0, *(rng.randrange(node) for node in range(1, size)))
            sources = tuple(rng.choices(list(Source), k=size))
            path: list[int] = []
            at = 0
            while children := [n for n in range(at + 1, size) if parents[n] == at]:
                for node in children:
                    judged[sources[node], min(len(path), POSITIONS - 1)] += 1
                if rng.random() < 0.3:
                    break
                at = rng.choice(children)
                right[sources[at], min(len(path), POSITIONS - 1)] += 1
                path.append(at)
            batch.append(tree(parents, sources))
            paths.append(path)
        # `best` returns views of wider arrays, which are not contiguous.
        positions.record(DraftTrees.of(batch, 32).best(24), paths)
    for source in Source:
        for place in range(POSITIONS):
            assert positions.judged[source, place] == judged[source, place]
            assert positions.right[source, place] == right[source, place]
