"""Rotary positions (Su et al. 2021) in the half-rotation layout of Llama checkpoints."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from eagle_jax.config import RopeScaling


def rotation(
    positions: jax.Array, head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines `[..., head_dim // 2]` in float32 for integer positions `[...]`."""
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if scaling is not None:
        frequencies = _stretched(frequencies, scaling)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def _stretched(frequencies: jax.Array, scaling: RopeScaling) -> jax.Array:
    """Divided frequencies; Llama 3's rule is that of Meta's llama-models, `apply_scaling`."""
    divided = frequencies / scaling.factor
    if scaling.bands is None:
        return divided
    low, high, context = scaling.bands
    turns = context * frequencies / (2 * jnp.pi)
    kept = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - kept) * divided + kept * frequencies


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates heads x `[B, N, heads, head_dim]` by angles `[B, N, head_dim / 2]`."""
    cos, sin = cos[:, :, None, :].astype(x.dtype), sin[:, :, None, :].astype(x.dtype)
    low, high = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
