"""Walking down the draft tree along the tokens that the target drew."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from eagle_jax.tree import DraftTree


@struct.dataclass
class Walk:
    """The accepted path of each batch row.

    Attributes:
      path: `[B, depth + 1]` int32 nodes, the root first; entries past `accepted` repeat the last.
      accepted: `[B]` int32 drafts accepted, 0 to depth.
      drawn: `[B, depth + 1]` int32 the token drawn at each node of the path; entry `accepted` is
        the new root, the entries before it are the accepted drafts.
    """

    path: jax.Array
    accepted: jax.Array
    drawn: jax.Array


def walk(tree: DraftTree, drawn: jax.Array, depth: int) -> Walk:
    """From the root, moves to the child that holds the drawn token, at most `depth` times.

    Args:
      tree: N nodes.
      drawn: `[B, N]` int32 the token that the target drew at each node.
      depth: levels below the root.
    """
    node = jnp.zeros(len(drawn), jnp.int32)
    accepted = jnp.zeros(len(drawn), jnp.int32)
    alive = jnp.ones(len(drawn), bool)
    path = [node]
    is_draft = jnp.arange(drawn.shape[1]) > 0
    for _ in range(depth):
        token = jnp.take_along_axis(drawn, node[:, None], axis=1)
        match = (tree.parents == node[:, None]) & (tree.tokens == token) & is_draft
        alive = alive & match.any(axis=1)
        node = jnp.where(alive, jnp.argmax(match, axis=1).astype(jnp.int32), node)
        accepted = accepted + alive
        path.append(node)
    path = jnp.stack(path, axis=1)
    return Walk(path, accepted, jnp.take_along_axis(drawn, path, axis=1))
