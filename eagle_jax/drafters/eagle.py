"""EAGLE-1/2 head: regression of the target's second-to-top-layer features.

Li et al. 2024, EAGLE (arXiv 2401.15077), section 3.1: the head reads the target's feature f_t (the
LM head's input) together with the embedding of the next token x_{t+1}, predicts the next feature
f_{t+1}, and scores tokens with the target's own LM head.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from eagle_jax.config import DrafterConfig
from eagle_jax.drafters.feature import own_embed
from eagle_jax.nn.attention import LayerCache, Visible
from eagle_jax.nn.layer import DecoderLayer
from eagle_jax.nn.linear import Linear
from eagle_jax.nn.rope import rotation


class EagleHead(nnx.Module):
    """`fc` over [embedding; feature], then one decoder layer without input norm."""

    method = "eagle"

    def __init__(self, config: DrafterConfig, *, rngs: nnx.Rngs):
        self.config = config
        hidden = config.hidden_size
        self.lm_head = None
        self.fc = Linear(2 * hidden, hidden, bias=config.fc_bias, rngs=rngs)
        self.layer = DecoderLayer(
            hidden,
            config.intermediate_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.norm_eps,
            input_norm=False,
            rngs=rngs,
        )
        if config.qkv_bias:
            rows = self.layer.attention.qkv.weight.shape[0]
            self.layer.attention.qkv = Linear(hidden, rows, bias=True, rngs=rngs)
        self.embed = own_embed(config, rngs)

    def fuse(self, features: jax.Array) -> jax.Array:
        """The head reads the target's features as they are."""
        return features

    def readout(self, features: jax.Array) -> jax.Array:
        """Predicted features are the LM head's input."""
        return features

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
        x = self.fc(jnp.concatenate([embeddings, features], axis=-1))
        angles = rotation(positions, self.config.head_dim, self.config.rope_theta)
        return self.layer(x, angles, visible, cache, earlier)
