"""The decoder layer that targets and drafters share."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from eagle_jax.config import LLAMA, LayerSwitches
from eagle_jax.nn.attention import Attention, LayerCache, Visible
from eagle_jax.nn.experts import Experts
from eagle_jax.nn.linear import Linear
from eagle_jax.nn.norm import RMSNorm


class SwiGLU(nnx.Module):
    """Gated feed-forward block (Shazeer 2020) with one fused projection `[gate; up]`."""

    activation = staticmethod(jax.nn.silu)

    def __init__(self, hidden_size: int, intermediate_size: int, *, rngs: nnx.Rngs):
        self.gate_up = Linear(hidden_size, 2 * intermediate_size, rngs=rngs)
        self.down = Linear(intermediate_size, hidden_size, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(self.activation(gate) * up)


class GeGLU(SwiGLU):
    """The same with GELU in its tanh approximation."""

    activation = staticmethod(functools.partial(jax.nn.gelu, approximate=True))


class DecoderLayer(nnx.Module):
    """Attention and feed-forward with residuals; pre-norm as in Llama, unless switches differ.

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
        switches: LayerSwitches = LLAMA,
        rngs: nnx.Rngs,
    ):
        def norm(wanted: bool) -> RMSNorm | None:
            return (
                RMSNorm(hidden_size, norm_eps, shifted=switches.shifted_norms) if wanted else None
            )

        before, after = switches.norms != "after", switches.norms != "before"
        self.input_norm = norm(before and input_norm)
        self.attention = Attention(
            hidden_size,
            num_heads,
            num_kv_heads,
            head_dim,
            switches=switches,
            norm_eps=norm_eps,
            rngs=rngs,
        )
        self.attention_out_norm = norm(after)
        self.mlp_norm = norm(before)
        if switches.experts is not None:
            self.mlp = Experts(hidden_size, switches.experts, rngs=rngs)
        else:
            kind = GeGLU if switches.gelu else SwiGLU
            self.mlp = kind(hidden_size, intermediate_size, rngs=rngs)
        self.mlp_out_norm = norm(after)

    def __call__(
        self,
        x: jax.Array,
        angles: tuple[jax.Array, jax.Array] | None,
        visible: Visible,
        cache: LayerCache | None,
        earlier: LayerCache | None = None,
    ) -> tuple[jax.Array, LayerCache]:
        """Maps rows `[B, N, hidden]` to rows of the same shape; see `Attention` for the rest."""
        attended, fresh = self.attention(
            _maybe(self.input_norm, x), angles, visible, cache, earlier
        )
        x = x + _maybe(self.attention_out_norm, attended)
        return x + _maybe(self.mlp_out_norm, self.mlp(_maybe(self.mlp_norm, x))), fresh


def _maybe(norm: RMSNorm | None, x: jax.Array) -> jax.Array:
    return x if norm is None else norm(x)
