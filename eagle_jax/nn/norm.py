"""Root-mean-square normalisation (Zhang and Sennrich 2019), in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx


class RMSNorm(nnx.Module):
    """Scales the last axis to unit root mean square, then by a learnt weight `[size]`.

    A shifted norm scales by one plus its weight, in float32, as Gemma does.
    """

    def __init__(self, size: int, eps: float, *, shifted: bool = False):
        self.weight = nnx.Param(jnp.zeros(size) if shifted else jnp.ones(size))
        self.eps, self.shifted = eps, shifted

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        if self.shifted:
            return (wide * (1.0 + self.weight[...].astype(jnp.float32))).astype(x.dtype)
        return wide.astype(x.dtype) * self.weight[...]
