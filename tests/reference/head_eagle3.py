"""The head of EAGLE-3 as released (arXiv 2503.01840), with the switches of its successors."""

from __future__ import annotations

import dataclasses

import numpy as np

from reference.layer import Sizes, attention, linear, rms_norm, swiglu


@dataclasses.dataclass(frozen=True)
class Switches:
    """Departures from the released EAGLE-3 heads.

    Attributes:
      norm_before_residual: the residual stream starts from the normed feature.
      norm_before_fc: all taps side by side are normed as one vector before fc.
      fc_norm: every tap is normed, with a weight of its own, before fc (EAGLE-3.1).
      norm_output: the next step is fed the output after the final norm (EAGLE-3.1).
    """

    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


class Eagle3:
    """One layer whose attention reads [norm(embedding); norm(feature)].

    Args:
      weights: the head's tensors under the published names; without `lm_head.weight` the head
        scores with rows of the target's LM head, without `embed_tokens.weight` it embeds as the
        target does.
      embed, lm_head: the target's, [V, h].
      ids: target id of every draft id, [Vd] ascending.
      taps: how many of the target's layers are fused.
    """

    def __init__(
        self,
        weights: dict,
        sizes: Sizes,
        embed: np.ndarray,
        lm_head: np.ndarray,
        ids: np.ndarray,
        taps: int = 3,
        switches: Switches = Switches(),
    ):
        self.weights, self.sizes, self.ids = weights, sizes, ids
        self.embed = weights.get("embed_tokens.weight", embed)
        self.taps, self.switches = taps, switches
        own = weights.get("lm_head.weight")
        self.lm_head = (lm_head[ids] if own is None else own).astype(np.float64)

    def fuse(self, features: np.ndarray) -> np.ndarray:
        """Taps of the target, side by side from low to high [T, taps * h], as one feature [T, hd].

        The head's own outputs do not come this way.
        """
        eps = self.sizes.norm_eps
        if self.switches.norm_before_fc:
            features = rms_norm(features, self.weights["input_norm.weight"], eps)
        if self.switches.fc_norm:
            parts = np.split(features, self.taps, axis=-1)
            features = np.concatenate(
                [
                    rms_norm(part, self.weights[f"fc_norm.{i}.weight"], eps)
                    for i, part in enumerate(parts)
                ],
                axis=-1,
            )
        return linear(self.weights, "fc", features)

    def forward(self, features: np.ndarray, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Row t holds feature t, fused or the head's own, and the token after it, x_{t+1}.

        Returns:
          The features for the step after [T, hd], and the logits of x_{t+2} [T, Vd].
        """
        w, eps = self.weights, self.sizes.norm_eps
        embedding = self.embed[tokens].astype(np.float64)
        normed = rms_norm(features, w["midlayer.hidden_norm.weight"], eps)
        residual = normed if self.switches.norm_before_residual else features
        both = [rms_norm(embedding, w["midlayer.input_layernorm.weight"], eps), normed]
        x = residual + attention(w, "midlayer.self_attn", np.concatenate(both, axis=-1), self.sizes)
        out = x + swiglu(
            w, "midlayer.mlp", rms_norm(x, w["midlayer.post_attention_layernorm.weight"], eps)
        )
        final = rms_norm(out, w["norm.weight"], eps)
        return (final if self.switches.norm_output else out), final @ self.lm_head.T
