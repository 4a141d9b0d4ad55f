"""A decoder of the Llama architecture, and the two kinds of features that heads read of it."""

from __future__ import annotations

import numpy as np

from reference.layer import Sizes, attention, rms_norm, swiglu


class Target:
    """Tokens in, logits and features out, all from the whole sequence.

    Args:
      weights: tensors under the published names; `lm_head.weight` may be absent (tied).
      taps: layers whose input is a feature (EAGLE-3); none for the state after the final norm,
        which the LM head reads (EAGLE-1).
    """

    def __init__(self, weights: dict, sizes: Sizes, num_layers: int, taps: tuple[int, ...] = ()):
        self.weights, self.sizes, self.num_layers, self.taps = weights, sizes, num_layers, taps
        self.embed = weights["model.embed_tokens.weight"]
        self.lm_head = weights.get("lm_head.weight", self.embed)

    def __call__(self, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [T] to logits [T, V] and features [T, h or taps * h]."""
        w, eps = self.weights, self.sizes.norm_eps
        x = self.embed[tokens].astype(np.float64)
        inputs = []
        for i in range(self.num_layers):
            inputs.append(x)
            layer = f"model.layers.{i}"
            normed = rms_norm(x, w[f"{layer}.input_layernorm.weight"], eps)
            x = x + attention(w, f"{layer}.self_attn", normed, self.sizes)
            normed = rms_norm(x, w[f"{layer}.post_attention_layernorm.weight"], eps)
            x = x + swiglu(w, f"{layer}.mlp", normed)
        final = rms_norm(x, w["model.norm.weight"], eps)
        taps = [inputs[tap] for tap in self.taps]
        features = np.concatenate(taps, axis=-1) if taps else final
        return final @ self.lm_head.astype(np.float64).T, features
