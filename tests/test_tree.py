"""The dynamic tree against a brute-force oracle, ties and connectivity; the walk; the masks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax import InputError, TreeShape
from eagle_jax.decode.verify import walk
from eagle_jax.tree import Expansion, grow, link

VOCAB = 7
SHAPES = [(2, 1, 1), (5, 4, 1), (6, 2, 3), (9, 3, 3), (14, 4, 2), (22, 3, 3)]


def table(seed, ties):
    """Log-probabilities of a token given the one before it, with the level as a second key."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(8, VOCAB, VOCAB)).astype(np.float32)
    if ties == "some":
        logits = np.round(logits)
    if ties == "all":
        logits[:] = 0.0
    if ties == "certain":  # children as likely as their parents
        logits[:] = -1e9
        logits[..., 2] = 0.0
    return np.asarray(jax.nn.log_softmax(jnp.asarray(logits)))


def jax_tree(scores, roots, shape):
    scores = jnp.asarray(scores)

    def deepen(level, frontier, carried):
        return Expansion(scores[level][frontier.tokens], None), ()

    return grow(roots, Expansion(scores[0][roots][:, None], None), deepen, shape)


def oracle(scores, root, shape):
    """The same tree in plain Python, written from the paper: list nodes, sort, keep."""
    f32 = np.float32

    def best(row):
        order = sorted(range(VOCAB), key=lambda token: (-row[token], token))
        return order[: shape.top_k]

    pool = [(f32(scores[0][root][t]), t, None) for t in best(scores[0][root])]
    frontier = list(range(len(pool)))
    for level in range(1, shape.depth):
        children = []
        for node in frontier:
            score, token, _ = pool[node]
            for child in best(scores[level][token]):
                children.append((f32(score + scores[level][token][child]), child, node))
        first = len(pool)
        pool += children
        ranked = sorted(range(len(children)), key=lambda i: (-children[i][0], i))
        frontier = [first + i for i in ranked[: shape.top_k]]
    kept = sorted(range(len(pool)), key=lambda i: (-pool[i][0], i))[: shape.nodes - 1]
    kept.sort()
    place = {None: 0} | {index: number + 1 for number, index in enumerate(kept)}
    return [root] + [pool[i][1] for i in kept], [0] + [place[pool[i][2]] for i in kept]


@pytest.mark.parametrize("ties", ["none", "some", "all", "certain"])
@pytest.mark.parametrize("sizes", SHAPES)
def test_against_brute_force(sizes, ties):
    shape = TreeShape(*sizes)
    scores = table(sum(sizes), ties)
    roots = jnp.array([0, 3, 5])
    tree = jax.jit(jax_tree, static_argnums=2)(scores, roots, shape)
    for row, root in enumerate(roots.tolist()):
        tokens, parents = oracle(scores, root, shape)  # KeyError where a parent was not kept
        assert tree.tokens[row].tolist() == tokens
        assert tree.parents[row].tolist() == parents


def test_scores_that_are_not_numbers_keep_the_tree_connected():
    scores = np.full((8, VOCAB, VOCAB), np.nan, np.float32)
    tree = jax_tree(scores, jnp.array([1]), TreeShape(9, 3, 3))
    parents = tree.parents[0].tolist()
    assert all(parent < node for node, parent in enumerate(parents) if node)


def test_ancestors_and_depth_against_a_loop():
    tree = jax_tree(table(1, "none"), jnp.array([0, 3]), TreeShape(14, 4, 3))
    for row in range(2):
        parents = tree.parents[row].tolist()
        for node in range(14):
            line, at = {node}, node
            while at:
                at = parents[at]
                line.add(at)
            assert set(np.flatnonzero(tree.ancestors[row, node])) == line
            assert tree.depth[row, node] == len(line) - 1


def test_ancestors_of_a_chain_are_the_causal_mask():
    tree = jax_tree(table(2, "none"), jnp.array([4]), TreeShape(5, 4, 1))
    np.testing.assert_array_equal(tree.ancestors[0], np.tril(np.ones((5, 5), bool)))
    np.testing.assert_array_equal(tree.depth[0], np.arange(5))


def test_walk_against_a_loop():
    rng = np.random.default_rng(0)
    nodes, depth, batch = 12, 4, 200
    tokens = rng.integers(0, 3, (batch, nodes))
    parents = np.array([[0] + [rng.integers(0, n) for n in range(1, nodes)] for _ in range(batch)])
    # Siblings hold distinct tokens: a node that repeats an elder sibling's token gets a fresh one.
    for row in range(batch):
        seen = set()
        for node in range(1, nodes):
            while (parents[row, node], tokens[row, node]) in seen:
                tokens[row, node] += 1
            seen.add((parents[row, node], tokens[row, node]))
    drawn = rng.integers(0, 4, (batch, nodes))
    tree = link(jnp.asarray(tokens), jnp.asarray(parents), nodes)
    found = walk(tree, jnp.asarray(drawn), depth)
    lengths = set()
    for row in range(batch):
        at, path = 0, [0]
        while len(path) <= depth:
            child = [
                n
                for n in range(1, nodes)
                if parents[row, n] == at and tokens[row, n] == drawn[row, at]
            ]
            if not child:
                break
            at = child[0]
            path.append(at)
        assert found.accepted[row] == len(path) - 1
        assert found.path[row, : len(path)].tolist() == path
        assert found.drawn[row, : len(path)].tolist() == drawn[row, path].tolist()
        lengths.add(len(path))
    assert len(lengths) >= 4


@pytest.mark.parametrize("sizes", [(0, 0, 1), (4, 4, 1), (9, 2, 2), (5, 3, 1), (2, 1, 0)])
def test_impossible_trees_are_refused(sizes):
    with pytest.raises(InputError):
        TreeShape(*sizes)
