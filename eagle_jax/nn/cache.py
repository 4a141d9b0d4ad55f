"""Caches of committed keys and values, and the rows of a pass that are committed."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from eagle_jax.config import ModelConfig
from eagle_jax.nn.attention import LayerCache


def empty_layer(batch: int, kv_heads: int, head_dim: int, slots: int, dtype) -> LayerCache:
    """One layer's cache with `slots` free slots."""
    return LayerCache(
        keys=jnp.zeros((batch, kv_heads, head_dim, slots), dtype),
        values=jnp.zeros((batch, kv_heads, slots, head_dim), dtype),
    )


def empty_cache(config: ModelConfig, batch: int, slots: int, dtype) -> tuple[LayerCache, ...]:
    """One empty cache a layer of the target."""
    return tuple(
        empty_layer(batch, config.num_kv_heads, config.head_dim, slots, dtype)
        for _ in range(config.num_layers)
    )


def select_rows(fresh: LayerCache, path: jax.Array) -> LayerCache:
    """The rows `path` `[B, T]` int32 of a pass, in that order."""
    return LayerCache(
        keys=jnp.take_along_axis(fresh.keys, path[:, None, None, :], axis=3),
        values=jnp.take_along_axis(fresh.values, path[:, None, :, None], axis=2),
    )


def commit_rows(cache: LayerCache, rows: LayerCache, length: jax.Array) -> LayerCache:
    """Writes rows at slots length, length + 1, ... of each batch row.

    The window has a static width; what lies beyond the rows that count stays invisible (attention
    sees slots below the length only) and is overwritten by the next commit. The caller provides
    slots for the whole window.

    Args:
      cache: `S` slots.
      rows: `T` rows.
      length: `[B]` slots already in use, at most S - T.
    """
    if len(length) == 1:  # a plain slice update is quicker than the scatter that vmap makes of it
        at = length[0]
        return LayerCache(
            keys=jax.lax.dynamic_update_slice(cache.keys, rows.keys, (0, 0, 0, at)),
            values=jax.lax.dynamic_update_slice(cache.values, rows.values, (0, 0, at, 0)),
        )

    def write_keys(into, rows, at):
        return jax.lax.dynamic_update_slice(into, rows, (0, 0, at))

    def write_values(into, rows, at):
        return jax.lax.dynamic_update_slice(into, rows, (0, at, 0))

    return LayerCache(
        keys=jax.vmap(write_keys)(cache.keys, rows.keys, length),
        values=jax.vmap(write_values)(cache.values, rows.values, length),
    )
