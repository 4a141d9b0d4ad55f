"""Rotary positions (Su et al. 2021) in the half-rotation layout of Llama checkpoints."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rotation(positions: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines `[..., head_dim // 2]` in float32 for integer positions `[...]`."""
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates heads x `[B, N, heads, head_dim]` by angles `[B, N, head_dim / 2]`."""
    cos, sin = cos[:, :, None, :].astype(x.dtype), sin[:, :, None, :].astype(x.dtype)
    low, high = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
