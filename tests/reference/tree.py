"""The dynamic draft tree of EAGLE-2 (arXiv 2406.16858, section 4): expand, re-rank, prune."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from reference.layer import log_softmax

Path = tuple[int, ...]


@dataclasses.dataclass
class Tree:
    """A pruned tree; node 0 is the root, and a parent comes before its children.

    Attributes:
      tokens, parents, depth: [N]; the root's parent is 0.
      ancestors: [N, N], row i marks i and everything above it.
      paths: tokens from below the root down to each node, that node included.
      scores: sum of log-probabilities on the path, float32 [N]; the root's is 0.
      margin: the smallest lead by which any choice on the way was made; a node's over its own
        descendants does not count, for they never exceed it.
    """

    tokens: list[int]
    parents: list[int]
    depth: list[int]
    ancestors: np.ndarray
    paths: list[Path]
    scores: list[np.float32]
    margin: float


@dataclasses.dataclass
class _Candidate:
    flat_id: int
    parent: int
    path: Path
    score: np.float32


def best(scores: list[np.float32], count: int) -> tuple[list[int], float]:
    """The indices of the `count` highest scores, equal ones in order of their index.

    Returns also by how much every chosen one leads the next, at the smallest; scores that are
    equal by construction (-inf, of tokens that sampling cuts) do not count.
    """
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    leads = [
        float(scores[a] - scores[b])
        for a, b in zip(order[:count], order[1:], strict=False)
        if np.isfinite(scores[b])
    ]
    return order[:count], min(leads, default=np.inf)


def grow(
    log_probs: Callable[[Path], np.ndarray], root: int, nodes: int, depth: int, top_k: int
) -> Tree:
    """The tree of `nodes` tokens, root included, at most `depth` levels below it.

    Args:
      log_probs: log-probabilities [V] of what follows the root and a path below it.
    """
    margin = np.inf

    def children(parent: _Candidate | None) -> list[_Candidate]:
        nonlocal margin
        path, score = (parent.path, parent.score) if parent else ((), np.float32(0))
        row = np.asarray(log_probs(path), np.float32)
        chosen, lead = best(list(row), top_k)
        margin = min(margin, lead)
        above = parent.flat_id if parent else -1
        return [_Candidate(-1, above, (*path, token), score + row[token]) for token in chosen]

    pool: list[_Candidate] = []
    frontier: list[_Candidate | None] = [None]
    for _ in range(depth):
        level = [child for node in frontier for child in children(node)]
        for child in level:
            child.flat_id = len(pool)
            pool.append(child)
        chosen, lead = best([child.score for child in level], top_k)
        margin = min(margin, lead)
        frontier = [level[i] for i in chosen]

    ranked = sorted(pool, key=lambda candidate: (-candidate.score, candidate.flat_id))
    kept = sorted(candidate.flat_id for candidate in ranked[: nodes - 1])
    if nodes - 1 < len(pool):
        last, out = ranked[nodes - 2 : nodes]
        if np.isfinite(out.score) and out.path[: len(last.path)] != last.path:
            margin = min(margin, float(last.score - out.score))
    place = {flat_id: i + 1 for i, flat_id in enumerate(kept)} | {-1: 0}
    tree = Tree([root], [0], [0], np.eye(nodes, dtype=bool), [()], [np.float32(0)], 0.0)
    tree.margin = margin
    for i, flat_id in enumerate(kept, start=1):
        node = pool[flat_id]
        parent = place[node.parent]
        tree.tokens.append(node.path[-1])
        tree.parents.append(parent)
        tree.depth.append(len(node.path))
        tree.ancestors[i] |= tree.ancestors[parent]
        tree.paths.append(node.path)
        tree.scores.append(node.score)
    return tree


def continuations(head, features: np.ndarray, tokens: list[int]):
    """What a head says below the root, by plain causal passes over prefix and path together.

    The head is fed its own output for every token of the path; no tree is involved.

    Args:
      features: the target's, of every committed token, [n, F].
      tokens: the tokens after those, the last being the root, [n].

    Returns:
      A function from a path of target ids below the root to the outputs [n + len(path), hd] and
      the logits [Vd] of what follows.
    """

    @functools.cache
    def after(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if path:
            earlier, outputs, _ = after(path[:-1])
            rows = np.concatenate([earlier, outputs[-1:]])
        else:
            rows = head.fuse(features)
        outputs, logits = head.forward(rows, [*tokens, *path])
        return rows, outputs, logits[-1]

    return lambda path: after(path)[1:]


def propose(
    head,
    features: np.ndarray,
    tokens: list[int],
    nodes: int,
    depth: int,
    top_k: int,
    perturb: Callable[[np.ndarray, int, np.ndarray], np.ndarray] | None = None,
) -> Tree:
    """The tree that a head drafts after the root, the last of `tokens`; see `continuations`.

    Choices are made among draft ids; the tokens of the tree are the target's ids.

    Args:
      perturb: what is done to draft logits [Vd] of a position, given the target's ids of the
        columns, before they become scores (a Gumbel coupling); nothing by default.
    """
    after = continuations(head, features, tokens)

    def log_probs(path: Path) -> np.ndarray:
        _, logits = after(tuple(int(head.ids[i]) for i in path))
        if perturb is not None:
            logits = perturb(logits, len(tokens) + 1 + len(path), head.ids)
        return log_softmax(logits)

    tree = grow(log_probs, tokens[-1], nodes, depth, top_k)
    tree.paths = [tuple(int(head.ids[i]) for i in path) for path in tree.paths]
    tree.tokens = [tokens[-1], *(path[-1] for path in tree.paths[1:])]
    return tree
