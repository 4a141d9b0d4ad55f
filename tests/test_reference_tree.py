"""The reference's tree against the enumeration of every path over a small vocabulary."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from reference.head_eagle1 import Eagle1
from reference.head_eagle3 import Eagle3, Switches
from reference.layer import Sizes, log_softmax
from reference.tree import grow

VOCAB, DEPTH = 4, 3


def table(seed: int, kind: str = "random") -> dict[tuple[int, ...], np.ndarray]:
    """Log-probabilities of what follows every path, shorter than DEPTH, over VOCAB tokens."""
    rng = np.random.default_rng(seed)
    out = {}
    for length in range(DEPTH):
        for path in itertools.product(range(VOCAB), repeat=length):
            logits = rng.normal(size=VOCAB)
            if kind == "even":
                logits[:] = 0.0
            if kind == "certain":  # a child that is as likely as its parent
                logits = np.where(np.arange(VOCAB) == 2, 0.0, -1e4)
            out[path] = log_softmax(logits)
    return out


def every_path(scores: dict) -> dict[tuple[int, ...], np.float32]:
    """The score of each path below the root, all VOCAB + VOCAB^2 + ... of them."""
    out: dict[tuple[int, ...], np.float32] = {}
    for length in range(1, DEPTH + 1):
        for path in itertools.product(range(VOCAB), repeat=length):
            above = out.get(path[:-1], np.float32(0))
            out[path] = np.float32(above + np.float32(scores[path[:-1]][path[-1]]))
    return out


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("nodes", [2, 3, 4, 5])
def test_a_tree_no_larger_than_the_frontier_is_the_best_of_all_paths(seed, nodes):
    """With nodes - 1 <= top_k nothing that belongs among the best can fall off a frontier."""
    scores = table(seed)
    tree = grow(scores.__getitem__, 9, nodes, DEPTH, top_k=VOCAB)
    paths = every_path(scores)
    ranked = sorted(paths, key=lambda path: -paths[path])
    assert set(tree.paths[1:]) == set(ranked[: nodes - 1])
    assert tree.scores[1:] == [paths[path] for path in tree.paths[1:]]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_a_tree_is_the_best_of_the_paths_that_the_frontiers_leave(seed, top_k):
    """A path is a candidate if each of its nodes is among its parent's best children, and each of
    its inner nodes among the candidates that are best at their depth."""
    scores = table(seed)
    paths = every_path(scores)

    def ranks_below(path, rivals, score):
        return sum(score(rival) > score(path) for rival in rivals) < top_k

    def a_best_child(path):
        row = scores[path[:-1]]
        return ranks_below(path[-1], range(VOCAB), lambda token: row[token])

    frontier, candidates = {()}, []
    for length in range(1, DEPTH + 1):
        level = [
            path
            for path in paths
            if len(path) == length and path[:-1] in frontier and a_best_child(path)
        ]
        frontier = {path for path in level if ranks_below(path, level, paths.get)}
        candidates += level
    nodes = 1 + min(len(candidates), 6)
    tree = grow(scores.__getitem__, 9, nodes, min(DEPTH, nodes - 1), top_k)
    ranked = sorted(candidates, key=lambda path: -paths[path])
    assert set(tree.paths[1:]) == set(ranked[: nodes - 1])


@pytest.mark.parametrize("kind", ["random", "even", "certain"])
@pytest.mark.parametrize("sizes", [(4, 3, 1), (9, 3, 3), (16, 3, 4), (21, 3, 3)])
def test_shape_of_a_tree(kind, sizes):
    """Connected, parents first, depth and ancestors as the paths say, siblings distinct."""
    tree = grow(table(0, kind).__getitem__, 9, *sizes)
    assert len(tree.tokens) == sizes[0] and len(set(tree.paths)) == sizes[0]
    assert (tree.tokens[0], tree.parents[0], tree.depth[0]) == (9, 0, 0)
    for node in range(1, sizes[0]):
        path, parent = tree.paths[node], tree.parents[node]
        assert parent < node and tree.paths[parent] == path[:-1]
        assert tree.tokens[node] == path[-1] and tree.depth[node] == len(path)
        assert tree.scores[node] <= tree.scores[parent]
        above = {tree.paths.index(path[:length]) for length in range(len(path) + 1)}
        assert set(np.flatnonzero(tree.ancestors[node])) == above
    assert tree.depth == sorted(tree.depth)


def test_equal_scores_go_to_the_shallow_and_the_first():
    even = grow(table(0, "even").__getitem__, 9, nodes=8, depth=3, top_k=4)
    assert even.paths[1:] == [(0,), (1,), (2,), (3,), (0, 0), (0, 1), (0, 2)]
    certain = grow(table(0, "certain").__getitem__, 9, nodes=4, depth=3, top_k=4)
    assert certain.paths[1:] == [(2,), (2, 2), (2, 2, 2)]


def test_a_chain_takes_the_best_token_at_each_step():
    scores = table(3)
    tree = grow(scores.__getitem__, 9, nodes=4, depth=3, top_k=1)
    path: tuple[int, ...] = ()
    for _ in range(3):
        path += (int(np.argmax(scores[path])),)
    assert tree.paths[-1] == path


def random_eagle3(switches: Switches) -> Eagle3:
    rng = np.random.default_rng(0)
    shapes = {
        "fc.weight": (8, 24),
        "midlayer.self_attn.q_proj.weight": (8, 16),
        "midlayer.self_attn.k_proj.weight": (4, 16),
        "midlayer.self_attn.v_proj.weight": (4, 16),
        "midlayer.self_attn.o_proj.weight": (8, 8),
        "midlayer.mlp.gate_proj.weight": (12, 8),
        "midlayer.mlp.up_proj.weight": (12, 8),
        "midlayer.mlp.down_proj.weight": (8, 12),
        "midlayer.hidden_norm.weight": (8,),
        "midlayer.input_layernorm.weight": (8,),
        "midlayer.post_attention_layernorm.weight": (8,),
        "norm.weight": (8,),
        "lm_head.weight": (5, 8),
        "input_norm.weight": (24,),
        **{f"fc_norm.{i}.weight": (8,) for i in range(3)},
    }
    weights = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    embed = rng.normal(size=(6, 8))
    return Eagle3(weights, Sizes(2, 1, 4), embed, embed, np.arange(5), 3, switches)


@pytest.mark.parametrize("switch", [field.name for field in dataclasses.fields(Switches)])
def test_each_switch_of_eagle3_matters(switch):
    taps = np.random.default_rng(1).normal(size=(4, 24))
    results = []
    for head in (random_eagle3(Switches()), random_eagle3(Switches(**{switch: True}))):
        outputs, logits = head.forward(head.fuse(taps), [1, 2, 3, 4])
        again, logits_again = head.forward(outputs, [2, 3, 4, 5])
        results.append((logits, logits_again))
    (first, second), (other_first, other_second) = results
    assert np.allclose(first, other_first) == (switch == "norm_output")
    assert not np.allclose(second, other_second)


def test_an_eagle1_head_of_zero_layers_is_its_fc():
    """With attention and feed-forward silenced only fc([embedding; feature]) is left."""
    rng = np.random.default_rng(0)
    weights = {
        f"layers.0.self_attn.{part}_proj.weight": np.zeros((4, 4)) for part in ("q", "k", "v", "o")
    } | {f"layers.0.mlp.{part}_proj.weight": np.zeros((4, 4)) for part in ("gate", "up", "down")}
    weights |= {"fc.weight": rng.normal(size=(4, 8)), "fc.bias": rng.normal(size=4)}
    weights["layers.0.post_attention_layernorm.weight"] = np.ones(4)
    embed, lm_head, feature = (rng.normal(size=(7, 4)) for _ in range(3))
    head = Eagle1(weights, Sizes(1, 1, 4), embed, lm_head, np.array([1, 4]))
    output, logits = head.forward(feature[:3], [6, 0, 2])
    expected = embed[[6, 0, 2]] @ weights["fc.weight"][:, :4].T
    expected += feature[:3] @ weights["fc.weight"][:, 4:].T + weights["fc.bias"]
    np.testing.assert_allclose(output, expected)
    np.testing.assert_allclose(logits, expected @ lm_head[[1, 4]].T)
