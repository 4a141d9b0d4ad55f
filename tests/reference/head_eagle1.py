"""The head of EAGLE-1 and EAGLE-2 (arXiv 2401.15077, section 4.1)."""

from __future__ import annotations

import numpy as np

from reference.layer import Sizes, attention, linear, rms_norm, swiglu


class Eagle1:
    """One Llama layer without input norm on fc([embedding; feature]), and the target's LM head.

    The feature is the target's hidden state after its final norm.

    Args:
      weights: the head's tensors under the published names; without `embed_tokens.weight` it
        embeds as the target does.
      embed, lm_head: the target's, [V, h].
      ids: target id of every draft id, [Vd] ascending.
    """

    def __init__(
        self, weights: dict, sizes: Sizes, embed: np.ndarray, lm_head: np.ndarray, ids: np.ndarray
    ):
        self.weights, self.sizes, self.ids = weights, sizes, ids
        self.embed = weights.get("embed_tokens.weight", embed)
        self.lm_head = lm_head[ids].astype(np.float64)

    def fuse(self, features: np.ndarray) -> np.ndarray:
        """Features of the target [T, h] as the layer takes them: unchanged."""
        return features

    def forward(self, features: np.ndarray, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Row t holds feature f_t and the token after it, x_{t+1}.

        Returns:
          The predicted features of t + 1 [T, h], and the logits of x_{t+2} [T, Vd].
        """
        w = self.weights
        embedding = self.embed[tokens].astype(np.float64)
        x = linear(w, "fc", np.concatenate([embedding, features], axis=-1))
        x = x + attention(w, "layers.0.self_attn", x, self.sizes)
        normed = rms_norm(x, w["layers.0.post_attention_layernorm.weight"], self.sizes.norm_eps)
        out = x + swiglu(w, "layers.0.mlp", normed)
        return out, out @ self.lm_head.T
