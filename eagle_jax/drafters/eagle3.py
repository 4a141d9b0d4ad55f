"""EAGLE-3 head: direct token prediction from fused low, middle and high layers of the target.

Li et al. 2025, EAGLE-3 (arXiv 2503.01840), section 3: `fc` fuses three residual streams into u_t;
one layer attends with queries, keys and values of [norm(embedding of x_{t+1}); norm(u_t)] over the
un-normed residual u_t; its output g_t takes the place of u at the next step.

Heads of other trainers differ in switches: the residual may be norm(u_t) (`norm_before_residual`),
and EAGLE-3.1 norms the taps before `fc` and passes norm(g_t) on (`fc_norm`, `norm_output`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from eagle_jax.config import DrafterConfig
from eagle_jax.drafters.feature import own_embed
from eagle_jax.nn.attention import Attention, LayerCache, Visible
from eagle_jax.nn.layer import SwiGLU
from eagle_jax.nn.linear import Linear
from eagle_jax.nn.modules import module_list
from eagle_jax.nn.norm import RMSNorm
from eagle_jax.nn.rope import rotation


class Eagle3Head(nnx.Module):
    """`fc` over the taps, one layer over [embedding; feature], a final norm; its own LM head and
    embedding, or the target's."""

    method = "eagle3"

    def __init__(self, config: DrafterConfig, *, rngs: nnx.Rngs):
        self.config = config
        hidden, eps, feature = config.hidden_size, config.norm_eps, config.feature_size
        taps = len(config.taps)
        self.taps_norm = RMSNorm(taps * feature, eps) if config.norm_before_fc else None
        norms = [RMSNorm(feature, eps) for _ in range(taps)] if config.fc_norm else []
        self.tap_norms = module_list(norms)
        self.fc = Linear(taps * feature, hidden, bias=config.fc_bias, rngs=rngs)
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
        if config.qkv_bias:
            rows = self.attention.qkv.weight.shape[0]
            self.attention.qkv = Linear(2 * hidden, rows, bias=True, rngs=rngs)
        self.mlp_norm = RMSNorm(hidden, eps)
        self.mlp = SwiGLU(hidden, config.intermediate_size, rngs=rngs)
        self.norm = RMSNorm(hidden, eps)
        rows = jax.random.normal(rngs.params(), (config.draft_vocab_size, hidden)) * hidden**-0.5
        self.lm_head = nnx.Param(rows) if config.own_lm_head else None
        self.embed = own_embed(config, rngs)

    def fuse(self, features: jax.Array) -> jax.Array:
        """u_t `[B, N, hidden]` of taps `[B, N, len(taps) * feature_size]`, the lowest layer
        first."""
        if self.taps_norm is not None:
            features = self.taps_norm(features)
        if self.config.fc_norm:
            parts = jnp.split(features, len(self.config.taps), axis=-1)
            parts = [norm(part) for norm, part in zip(self.tap_norms, parts, strict=True)]
            features = jnp.concatenate(parts, axis=-1)
        return self.fc(features)

    def readout(self, features: jax.Array) -> jax.Array:
        """The final norm, unless the features have passed it."""
        return features if self.config.norm_output else self.norm(features)

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
        normed = self.hidden_norm(features)
        both = [self.embed_norm(embeddings), normed]
        angles = rotation(positions, self.config.head_dim, self.config.rope_theta)
        attended, fresh = self.attention(
            jnp.concatenate(both, axis=-1), angles, visible, cache, earlier
        )
        x = (normed if self.config.norm_before_residual else features) + attended
        x = x + self.mlp(self.mlp_norm(x))
        return (self.norm(x) if self.config.norm_output else x), fresh
