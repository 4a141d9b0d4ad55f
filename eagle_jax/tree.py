"""Growing the dynamic draft tree of EAGLE-2 (arXiv 2406.16858, section 4).

A candidate's score is the sum of log-probabilities along its path, in float32. Each level keeps the
best top_k candidates as the next frontier; at the end the best nodes - 1 of all candidates stay.
Candidates are numbered level by level and equal scores go to the lower number. A child's score is
never above its parent's and its number is always larger, so a kept node's parent is kept too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from eagle_jax.config import TreeShape
from eagle_jax.errors import InputError


@struct.dataclass
class DraftTree:
    """A tree of N nodes a batch row; node 0 is the root and a parent precedes its children.

    Attributes:
      tokens: `[B, N]` int32.
      parents: `[B, N]` int32; the root is its own parent.
      depth: `[B, N]` int32; the root has depth 0.
      ancestors: `[B, N, N]` bool; entry (n, m): m is n or an ancestor of n.
      scores: `[B, N]` float32 log-probability that the drafter gives the path to each node, 0 for
        the root; None where it gives none.
    """

    tokens: jax.Array
    parents: jax.Array
    depth: jax.Array
    ancestors: jax.Array
    scores: jax.Array | None = None


@struct.dataclass
class Frontier:
    """The nodes that a level expands.

    Attributes:
      tokens: `[B, k]` int32.
      parents: `[B, k]` int32 index of each node's parent within the frontier before.
      visible: `[B, k, k * level]` bool; which frontier nodes so far each node descends from or is.
    """

    tokens: jax.Array
    parents: jax.Array
    visible: jax.Array


@struct.dataclass
class Expansion:
    """Scores of all possible children.

    Attributes:
      log_probs: `[B, k, V]` float32.
      ids: `[V]` int32 token of each column, or None where the column is the token.
    """

    log_probs: jax.Array
    ids: jax.Array | None

    def best(self, top_k: int) -> tuple[jax.Array, jax.Array]:
        """The best children of each node: scores and tokens, both `[B, k, top_k]`.

        Raises:
          InputError: there are fewer tokens than that.
        """
        if top_k > self.log_probs.shape[-1]:
            raise InputError(
                f"the tree's top_k is {top_k}, but this drafter knows {self.log_probs.shape[-1]} "
                "tokens only; lower top_k"
            )
        safe = jnp.where(jnp.isnan(self.log_probs), -jnp.inf, self.log_probs)
        scores, columns = jax.lax.top_k(safe, top_k)
        return scores, columns if self.ids is None else self.ids[columns]


# Score, token, and parent as a number in the pool (-1: the root), each `[B, C]`.
Candidates = tuple[jax.Array, jax.Array, jax.Array]
Deepen = Callable[[int, Frontier, Any], tuple[Expansion, Any]]


def grow(root: jax.Array, first: Expansion, deepen: Deepen, shape: TreeShape) -> DraftTree:
    """Grows and prunes a tree.

    Args:
      root: `[B]` int32 the pending token.
      first: scores of the root's children, one row.
      deepen: scores the children of a frontier; called with (level, frontier, what the call before
        returned), level 1 being the root's children.
      shape: static size.
    """
    batch, k = len(root), shape.top_k
    scores, tokens = first.best(k)
    scores, tokens = scores[:, 0], tokens[:, 0]
    pool: list[Candidates] = [(scores, tokens, jnp.full((batch, k), -1, jnp.int32))]
    number = jnp.broadcast_to(jnp.arange(k, dtype=jnp.int32), (batch, k))
    eye = jnp.broadcast_to(jnp.eye(k, dtype=bool), (batch, k, k))
    frontier = Frontier(tokens, jnp.zeros((batch, k), jnp.int32), eye)
    carried: Any = None
    for level in range(1, shape.depth):
        expansion, carried = deepen(level, frontier, carried)
        gained, children = expansion.best(k)
        total = (scores[..., None] + gained).reshape(batch, k * k)
        children = children.reshape(batch, k * k)
        pool.append((total, children, jnp.repeat(number, k, axis=1)))
        scores, kept = jax.lax.top_k(total, k)
        number = (k + (level - 1) * k * k + kept).astype(jnp.int32)
        parents = (kept // k).astype(jnp.int32)
        lineage = jnp.take_along_axis(frontier.visible, parents[..., None], axis=1)
        frontier = Frontier(
            tokens=jnp.take_along_axis(children, kept, axis=1),
            parents=parents,
            visible=jnp.concatenate([lineage, eye], axis=2),
        )
    return prune(root, pool, shape)


def prune(root: jax.Array, pool: Sequence[Candidates], shape: TreeShape) -> DraftTree:
    """The tree of the best nodes - 1 candidates; equal scores go to the lower number.

    Args:
      root: `[B]` int32 the pending token.
      pool: candidates, numbered through: a parent's number is lower than its children's, and its
        score not below theirs.
      shape: static size; no candidate lies deeper than `depth`.
    """
    scores, tokens, parents = (jnp.concatenate(part, axis=1) for part in zip(*pool, strict=True))
    _, kept = jax.lax.top_k(scores, shape.nodes - 1)
    kept = jnp.sort(kept, axis=1)
    # Where each candidate stands in the tree; the root is node 0.
    rank = jax.vmap(lambda k: jnp.zeros(scores.shape[1], jnp.int32).at[k].set(_one_up(k)))(kept)
    parent = jnp.take_along_axis(parents, kept, axis=1)
    in_tree = jnp.take_along_axis(rank, jnp.maximum(parent, 0), axis=1)
    tree = link(
        jnp.concatenate([root[:, None], jnp.take_along_axis(tokens, kept, axis=1)], axis=1),
        jnp.pad(jnp.where(parent < 0, 0, in_tree), ((0, 0), (1, 0))),
        shape.depth,
    )
    scores = jnp.pad(jnp.take_along_axis(scores, kept, axis=1), ((0, 0), (1, 0)))
    return tree.replace(scores=scores)


def _one_up(kept: jax.Array) -> jax.Array:
    return jnp.arange(1, len(kept) + 1, dtype=jnp.int32)


def root_only(root: jax.Array) -> DraftTree:
    """The tree of one node, `root` `[B]`: plain decoding."""
    return link(root[:, None], jnp.zeros((len(root), 1), jnp.int32), 0)


def link(tokens: jax.Array, parents: jax.Array, max_depth: int) -> DraftTree:
    """A `DraftTree` from tokens and parents `[B, N]`, with depths and ancestors worked out.

    Args:
      parents: node 0 is the root (its own parent); a parent precedes its children.
      max_depth: depth of the deepest node, or more.
    """
    nodes = tokens.shape[1]
    root = jnp.arange(nodes) == 0
    ancestors = jnp.broadcast_to(jnp.eye(nodes, dtype=bool), (*tokens.shape, nodes))
    at = jnp.broadcast_to(jnp.arange(nodes, dtype=jnp.int32), tokens.shape)
    depth = jnp.zeros_like(parents)
    for _ in range(max_depth):
        depth = depth + (at != 0)
        at = jnp.where(root, 0, jnp.take_along_axis(parents, at, axis=1))
        ancestors = ancestors | (at[..., None] == jnp.arange(nodes))
    return DraftTree(tokens, parents, depth, ancestors)
