"""Keeps what the target computes while it writes, so that training need not run it again."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from eagle_jax.drafters.none import NoDrafter
from eagle_jax.target.transformer import Transformer


class Recorder(NoDrafter):
    """Drafts nothing; its state `[B, slots, (1 + len(taps)) * hidden]` float16 holds the features
    and taps of every committed token."""

    method = "record"

    def __init__(self, model: Transformer, taps: Sequence[int]):
        """Records the features of `model` and the inputs of the layers `taps`."""
        # The last layer's output stands for the features: its final norm is theirs.
        self.taps = (model.config.num_layers, *taps)
        self.norm, self.hidden = model.norm, model.config.hidden_size

    def init(self, batch: int, length: int) -> jax.Array:
        return jnp.zeros((batch, length, len(self.taps) * self.hidden), jnp.float16)

    def observe(self, state, tokens, features, length, count) -> jax.Array:
        final = self.norm(features[..., : self.hidden])
        rows = jnp.concatenate([final, features[..., self.hidden :]], axis=-1).astype(state.dtype)
        write = jax.vmap(lambda into, new, at: jax.lax.dynamic_update_slice(into, new, (at, 0)))
        return write(state, rows, length)
