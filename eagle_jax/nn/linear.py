"""Matrix products with weights stored `[out, in]`, laid out for the backend at hand."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx


def matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`x @ weight.T` for x `[..., in]` and weight `[out, in]`; returns `[..., out]` in x's dtype.

    XLA's CPU backend multiplies a few rows 1.4 to 1.9 times faster as `weight @ x.T` with the
    small operand transposed for real: 30 matrices of 3072x576 in float32 on 2 cores take 12.3 ms
    against 22.1 ms for 4 rows and 19.4 against 29.7 for 16; one row is quickest as written, and
    from 64 rows on both are equal. The barriers keep XLA from folding the transposes back.
    TPU and GPU choose layouts themselves.
    """
    rows = math.prod(x.shape[:-1])
    if jax.default_backend() != "cpu" or rows == 1 or rows >= 64:
        return jnp.einsum("...i,oi->...o", x, weight)
    columns = jax.lax.optimization_barrier(x.reshape(rows, x.shape[-1]).T)
    product = jax.lax.optimization_barrier(weight @ columns)
    return product.T.reshape(*x.shape[:-1], weight.shape[0])


class Linear(nnx.Module):
    """A linear map with a weight `[out, in]` and an optional bias `[out]`."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False, rngs: nnx.Rngs):
        scale = inputs**-0.5
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (outputs, inputs)) * scale)
        self.bias = nnx.Param(jnp.zeros(outputs)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = matmul(x, self.weight[...])
        return y if self.bias is None else y + self.bias[...]
