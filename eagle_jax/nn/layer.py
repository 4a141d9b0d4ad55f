"""The decoder layer that targets and drafters share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from eagle_jax.nn.attention import Attention, LayerCache, Visible
from eagle_jax.nn.linear import Linear
from eagle_jax.nn.norm import RMSNorm


class SwiGLU(nnx.Module):
    """Gated feed-forward block (Shazeer 2020) with one fused projection `[gate; up]`."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, rngs: nnx.Rngs):
        self.gate_up = Linear(hidden_size, 2 * intermediate_size, rngs=rngs)
        self.down = Linear(intermediate_size, hidden_size, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(jax.nn.silu(gate) * up)


class DecoderLayer(nnx.Module):
    """Pre-norm attention and feed-forward with residuals, as in Llama.

    `input_norm=False` leaves out the norm before attention, as EAGLE-1 heads do.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        norm_eps: float,
        *,
        input_norm: bool = True,
        rngs: nnx.Rngs,
    ):
        self.input_norm = RMSNorm(hidden_size, norm_eps) if input_norm else None
        self.attention = Attention(hidden_size, num_heads, num_kv_heads, head_dim, rngs=rngs)
        self.mlp_norm = RMSNorm(hidden_size, norm_eps)
        self.mlp = SwiGLU(hidden_size, intermediate_size, rngs=rngs)

    def __call__(
        self,
        x: jax.Array,
        angles: tuple[jax.Array, jax.Array],
        visible: Visible,
        cache: LayerCache | None,
        earlier: LayerCache | None = None,
    ) -> tuple[jax.Array, LayerCache]:
        """Maps rows `[B, N, hidden]` to rows of the same shape; see `Attention` for the rest."""
        normed = x if self.input_norm is None else self.input_norm(x)
        attended, fresh = self.attention(normed, angles, visible, cache, earlier)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), fresh
