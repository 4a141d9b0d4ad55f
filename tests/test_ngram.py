"""The n-gram drafter against a search in plain Python; merged trees against sorting all paths."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_tree import jax_tree
from test_tree import table as random_table

from eagle_jax import InputError, TreeShape
from eagle_jax.drafters.merged import merge
from eagle_jax.drafters.ngram import CONFIDENCE, LONGEST, PLACES, SHARE, NgramDrafter, NgramState

ROWS, WIDTH, VOCAB = 24, 64, 40
SHAPES = [TreeShape(2, 1, 1), TreeShape(4, 3, 1), TreeShape(8, 2, 4), TreeShape(12, 5, 3)]


def texts(seed):
    """Rows of several lengths over small alphabets, one without any match, one that repeats."""
    rng = np.random.default_rng(seed)
    rows = [rng.integers(0, 2 + row % 6, rng.integers(2, 40)).tolist() for row in range(ROWS - 3)]
    return [*rows, [5], list(range(20)), [1, 2, 3] * 6]


def state_of(rows):
    tokens = np.full((len(rows), WIDTH), 1, np.int32)  # beyond the text lies what may look like it
    for row, text in enumerate(rows):
        tokens[row, : len(text)] = text
    return NgramState(jnp.asarray(tokens), jnp.array([len(text) for text in rows]))


def oracle(text, depth, top_k, shortest=1):
    """Score of each path of guesses: a dictionary from tuples of tokens."""
    f32, end, found = np.float32, len(text) - 1, []
    for at in range(end):
        length = 0
        while length <= at and length < LONGEST and text[at - length] == text[end - length]:
            length += 1
        if length:
            found.append((length, at))
    found = sorted(found, reverse=True)[:PLACES]
    found = [match for match in found if match[0] >= shortest]
    total = f32(sum(f32(SHARE**length) for length, _ in found))
    scores: dict[tuple, float] = {}
    for length, at in found:
        confidence, path, follow = f32(SHARE**length) / total, (), list(text)
        for level in range(depth):
            # Reading on from the match, into what has just been guessed when the text is over.
            path += (follow[at + 1 + level],)
            follow.append(path[-1])
            confidence *= f32(CONFIDENCE[min(length + level, LONGEST)])
            scores[path] = scores.get(path, f32(0)) + confidence
    for level in range(1, depth + 1):  # every node keeps its best children, the first among equals
        families: dict[tuple, list] = {}
        for path in [path for path in scores if len(path) == level]:
            families.setdefault(path[:-1], []).append(path)
        for paths in families.values():
            for path in sorted(paths, key=lambda path: -scores[path])[top_k:]:
                for longer in [p for p in scores if p[:level] == path]:
                    del scores[longer]
    return scores


def paths_of(tree, row):
    """Path of tokens from the root to each node but the root, checking the tree on the way."""
    tokens, parents = np.asarray(tree.tokens[row]), np.asarray(tree.parents[row])
    paths = {0: ()}
    for node in range(1, len(tokens)):
        assert parents[node] < node
        paths[node] = (*paths[parents[node]], int(tokens[node]))
        assert tree.depth[row, node] == len(paths[node])
    found = [paths[node] for node in range(1, len(tokens))]
    assert len(set(found)) == len(found), "siblings differ"
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_a_search(shape):
    rows = texts(shape.nodes)
    drafter = NgramDrafter(VOCAB)
    roots = jnp.array([text[-1] for text in rows])
    propose = jax.jit(functools.partial(drafter.propose, draw=None, shape=shape))
    tree = propose(state_of(rows), roots, jnp.array([len(text) - 1 for text in rows]))
    promise = np.asarray(drafter.promise(state_of(rows), None))
    real = 0
    for row, text in enumerate(rows):
        scores = oracle(text, shape.depth, shape.top_k)
        paths, found = paths_of(tree, row), np.exp(np.asarray(tree.scores[row, 1:]))
        assert tree.tokens[row, 0] == text[-1]
        wanted = sorted(scores.values(), reverse=True)[: shape.nodes - 1]
        wanted += [0.0] * (shape.nodes - 1 - len(wanted))
        np.testing.assert_allclose(np.sort(found)[::-1], wanted, rtol=1e-5)
        for path, score in zip(paths, found, strict=True):
            if score > 0:
                assert scores[path] == pytest.approx(score, rel=1e-5)
            else:
                assert len(path) == 1 and path not in scores  # hangs on the root, guesses nothing
        best = max((score for path, score in scores.items() if len(path) == 1), default=0.0)
        assert promise[row] == pytest.approx(best, rel=1e-5)
        real += sum(found > 0)
    assert real > ROWS // 2


def test_the_latest_of_the_longest_matches_leads():
    drafter, chain = NgramDrafter(VOCAB), TreeShape(4, 3, 1)

    def guess(text):
        state = state_of([text])
        tree = drafter.propose(state, state.tokens[:, 0], None, None, chain)
        return tree.tokens[0, 1:].tolist()

    assert guess([1, 2, 3, 4, 5, 6, 1, 2]) == [3, 4, 5]
    assert guess([1, 2, 3, 9, 2, 4, 8, 1, 2]) == [3, 9, 2]  # two tokens against one
    assert guess([1, 2, 3, 9, 8, 1, 2, 4, 7, 5, 1, 2]) == [4, 7, 5]  # the latest of two
    assert guess([1, 2, 3, 8, 1, 2, 3, 9, 1, 2, 4, 7, 1, 2])[0] == 3  # two places against one
    assert guess([4, 1, 2, 1, 2]) == [1, 2, 1]  # on and on


def test_reading_piece_by_piece_is_reading_at_once():
    """Rows of a batch that read at their own pace, with padding and pauses."""
    rng = np.random.default_rng(0)
    rows, drafter = [rng.integers(0, VOCAB, 30).tolist() for _ in range(3)], NgramDrafter(VOCAB)
    state = drafter.init(3, WIDTH)
    first = jnp.array([row[0] for row in rows])
    state = drafter.begin(state, first, jnp.array([True, True, False]))
    state = drafter.begin(state, first, jnp.array([False, False, True]))
    length = np.zeros(3, int)
    while (length < 29).any():
        count = np.minimum(rng.integers(0, 5, 3), 29 - length)
        window = np.full((3, 4), VOCAB - 1)
        for row in range(3):
            taken = rows[row][length[row] + 1 : length[row] + 1 + count[row]]
            window[row, : len(taken)] = taken
        state = drafter.observe(
            state, jnp.asarray(window, jnp.int32), None, jnp.asarray(length), jnp.asarray(count)
        )
        length += count
    assert state.known.tolist() == [30] * 3
    assert state.tokens[:, :30].tolist() == rows


def test_a_vocabulary_too_small_for_the_tree_is_refused():
    drafter, state = NgramDrafter(10), state_of([[1, 2, 1]])
    with pytest.raises(InputError, match="use 3 at most"):
        drafter.propose(state, state.tokens[:, 0], None, None, TreeShape(4, 3, 1))
    drafter.propose(state, state.tokens[:, 0], None, None, TreeShape(3, 2, 1))


@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
@pytest.mark.parametrize("shortest", [1, 3])
def test_merged_trees_hold_the_best_of_both(shape, shortest):
    """Against sorting all paths; the alphabets are small, so that many paths are in both trees."""
    rows = texts(shape.nodes + 1)
    roots = jnp.array([text[-1] % 7 for text in rows])
    base = jax_tree(random_table(3, "none") * 0.4, roots, shape)
    ngrams = NgramDrafter(VOCAB, shortest)
    levels = ngrams.candidates(state_of(rows), shape.depth, shape.top_k)
    tree = jax.jit(merge, static_argnums=2)(base, levels, shape)
    shared = gone = 0
    for row, text in enumerate(rows):
        own = dict(zip(paths_of(base, row), np.asarray(base.scores[row, 1:]), strict=True))
        added = oracle(text, shape.depth, shape.top_k, shortest)
        both = {path: np.log(score) for path, score in added.items()}
        shared += len(own.keys() & both.keys())
        for path, score in own.items():
            both[path] = max(score, both.get(path, -np.inf))
        assert tree.tokens[row, 0] == roots[row]
        paths, scores = paths_of(tree, row), np.asarray(tree.scores[row, 1:])
        wanted = sorted(both.values(), reverse=True)[: shape.nodes - 1]
        np.testing.assert_allclose(np.sort(scores)[::-1], wanted, atol=1e-4)
        for path, score in zip(paths, scores, strict=True):
            assert both[path] == pytest.approx(score, abs=1e-4)
        gone += len(own.keys() - set(paths))
        if not added:
            assert paths == list(own)
    assert shared and gone, "paths of both trees met, and some gave way"
