"""No drafts: a tree of one node, plain decoding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from eagle_jax.config import TreeShape
from eagle_jax.sampling import Draw
from eagle_jax.tree import DraftTree, root_only


class NoDrafter(nnx.Module):
    """Proposes nothing, so that plain decoding runs the same cycle as speculation."""

    method = "none"
    taps = ()

    def init(self, batch: int, length: int) -> tuple:
        return ()

    def observe(self, state, tokens, features, length, count) -> tuple:
        return state

    def propose(
        self, state: tuple, root: jax.Array, length: jax.Array, draw: Draw, shape: TreeShape
    ) -> DraftTree:
        return root_only(root)

    def promise(self, state: tuple, draw: Draw) -> jax.Array:
        return jnp.zeros(len(draw.sampler.key))
