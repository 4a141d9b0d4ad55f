"""EAGLE-3 head: direct token prediction from fused low, middle and high layers of the target.

Li et al. 2025, EAGLE-3 (arXiv 2503.01840), section 3: `fc` fuses three residual streams into u_t;
one layer attends with queries, keys and values of [norm(embedding of x_{t+1}); norm(u_t)] over the
un-normed residual u_t; its output g_t takes the place of u at the next step.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from eagle_jax.config import DrafterConfig
from eagle_jax.nn.attention import Attention, LayerCache, Visible
from eagle_jax.nn.layer import SwiGLU
from eagle_jax.nn.linear import Linear
from eagle_jax.nn.norm import RMSNorm
from eagle_jax.nn.rope import rotation


class Eagle3Head(nnx.Module):
    """`fc` over the taps, one layer over [embedding; feature], a final norm, its own LM head or
    none."""

    method = "eagle3"

    def __init__(self, config: DrafterConfig, *, rngs: nnx.Rngs):
        self.config = config
        hidden, eps = config.hidden_size, config.norm_eps
        self.fc = Linear(len(config.taps) * hidden, hidden, bias=config.fc_bias, rngs=rngs)
        self.embed_norm = RMSNorm(hidden, eps)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.attention = Attention(
            hidden,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            inputs=2 * hidden,
            rngs=rngs,
        )
        self.mlp_norm = RMSNorm(hidden, eps)
        self.mlp = SwiGLU(hidden, config.intermediate_size, rngs=rngs)
        self.norm = RMSNorm(hidden, eps)
        rows = jax.random.normal(rngs.params(), (config.draft_vocab_size, hidden)) * hidden**-0.5
        self.lm_head = nnx.Param(rows) if config.own_lm_head else None

    def fuse(self, features: jax.Array) -> jax.Array:
        """u_t `[B, N, hidden]` of taps `[B, N, len(taps) * hidden]`, the lowest layer first."""
        return self.fc(features)

    def readout(self, features: jax.Array) -> jax.Array:
        """The final norm."""
        return self.norm(features)

    def __call__(
        self,
        embeddings: jax.Array,
        features: jax.Array,
        positions: jax.Array,
        visible: Visible,
        cache: LayerCache | None,
        earlier: LayerCache | None = None,
    ) -> tuple[jax.Array, LayerCache]:
        """See `Head`."""
        both = [self.embed_norm(embeddings), self.hidden_norm(features)]
        angles = rotation(positions, self.config.head_dim, self.config.rope_theta)
        attended, fresh = self.attention(
            jnp.concatenate(both, axis=-1), angles, visible, cache, earlier
        )
        x = features + attended
        return x + self.mlp(self.mlp_norm(x)), fresh
