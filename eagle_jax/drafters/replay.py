"""Drafts a recorded answer: the ceiling of what a machine can gain, or its worst case."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from eagle_jax.config import TreeShape
from eagle_jax.errors import InputError
from eagle_jax.sampling import Draw
from eagle_jax.tree import DraftTree, link


class ReplayDrafter(nnx.Module):
    """Proposes the chain that a recorded run went on to write.

    With the recording of a plain run every draft is accepted, so speed shows what the target's cost
    curve allows. With `offset` every draft is wrong.
    """

    method = "replay"
    taps = ()

    def __init__(self, recorded: jax.Array, vocab_size: int, offset: int = 0):
        """Takes `recorded` `[B, W]` int32: prompt and answer of each row, padded with any id."""
        self.recorded = nnx.Variable(jnp.asarray(recorded, jnp.int32))
        self.vocab_size, self.offset = vocab_size, offset

    def init(self, batch: int, length: int) -> tuple:
        if batch != len(self.recorded[...]):
            raise InputError(f"recorded {len(self.recorded[...])} rows, asked to draft for {batch}")
        return ()

    def observe(self, state, tokens, features, length, count) -> tuple:
        return state

    def promise(self, state: tuple, draw: Draw) -> jax.Array:
        return jnp.ones(len(draw.sampler.key))

    def propose(
        self, state: tuple, root: jax.Array, length: jax.Array, draw: Draw, shape: TreeShape
    ) -> DraftTree:
        at = length[:, None] + 1 + jnp.arange(shape.depth)
        at = jnp.minimum(at, self.recorded[...].shape[1] - 1)
        chain = jnp.take_along_axis(self.recorded[...], at, axis=1) + self.offset
        # Nodes beyond the chain hang on the root and hold tokens that differ from its first draft.
        spare = jnp.arange(1, shape.nodes - shape.depth)
        spare = chain[:, :1] + spare if shape.depth else root[:, None] + spare
        tokens = jnp.concatenate([root[:, None], chain, spare], axis=1) % self.vocab_size
        line = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.arange(shape.depth, dtype=jnp.int32)])
        parents = jnp.pad(line, (0, shape.nodes - shape.depth - 1))
        return link(tokens, jnp.broadcast_to(parents, tokens.shape), shape.depth)
