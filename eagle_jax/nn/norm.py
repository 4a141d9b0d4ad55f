"""Root-mean-square normalisation (Zhang and Sennrich 2019), in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx


class RMSNorm(nnx.Module):
    """Scales the last axis to unit root mean square, then by a learnt weight `[size]`."""

    def __init__(self, size: int, eps: float):
        self.weight = nnx.Param(jnp.ones(size))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return wide.astype(x.dtype) * self.weight[...]
