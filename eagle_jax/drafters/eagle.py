"""EAGLE-1/2 head: an autoregressive drafter over the target's second-to-top-layer features.

Li et al. 2024, EAGLE (arXiv 2401.15077), section 3.1: the head reads the target's feature f_t (the
LM head's input) together with the embedding of the next token x_{t+1}, predicts the next feature
f_{t+1}, and scores tokens with the target's own LM head. The tree that it grows is EAGLE-2's (arXiv
2406.16858); see `eagle_jax.tree`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx, struct

from eagle_jax.config import DrafterConfig, TreeShape
from eagle_jax.nn.attention import LayerCache, Visible
from eagle_jax.nn.cache import commit_rows, empty_layer
from eagle_jax.nn.layer import DecoderLayer
from eagle_jax.nn.linear import Linear, matmul
from eagle_jax.nn.rope import rotation
from eagle_jax.sampling import Draw
from eagle_jax.tree import DraftTree, Expansion, grow


class EagleHead(nnx.Module):
    """The trainable part: `fc` over [embedding; feature], then one layer without input norm."""

    def __init__(self, config: DrafterConfig, *, rngs: nnx.Rngs):
        self.config = config
        hidden = config.hidden_size
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

    def __call__(
        self,
        embeddings: jax.Array,
        features: jax.Array,
        positions: jax.Array,
        visible: Visible,
        cache: LayerCache | None,
        earlier: LayerCache | None = None,
    ) -> tuple[jax.Array, LayerCache]:
        """Predicts the next features.

        Args:
          embeddings: `[B, N, hidden]` of the tokens x_{t+1}.
          features: `[B, N, hidden]` f_t, true or predicted.
          positions: `[B, N]` int32, t: the feature's index, one less than the token's.
          visible, cache, earlier: see `Attention`.

        Returns:
          Predicted features f_{t+1} `[B, N, hidden]`, and the fresh keys and values.
        """
        x = self.fc(jnp.concatenate([embeddings, features], axis=-1))
        angles = rotation(positions, self.config.head_dim, self.config.rope_theta)
        return self.layer(x, angles, visible, cache, earlier)


@struct.dataclass
class EagleState:
    """What the drafter keeps between cycles.

    Attributes:
      cache: keys and values of one row a committed token; row t holds (f_t, x_{t+1}).
      feature: `[B, hidden]` the feature predicted after the last row; it drafts the root's
        children.
    """

    cache: LayerCache
    feature: jax.Array


class EagleDrafter(nnx.Module):
    """An EAGLE-1/2 head bound to its target.

    It shares the target's embedding, and scores with the rows of the target's LM head that belong
    to the draft vocabulary.
    """

    method = "eagle"

    def __init__(
        self, head: EagleHead, embed: nnx.Param, head_rows: jax.Array, draft_ids: jax.Array | None
    ):
        """Binds a head.

        Args:
          head: the trained part.
          embed: the target's embedding `[vocab, hidden]`, shared, not copied.
          head_rows: `[draft_vocab, hidden]` rows of the target's LM head.
          draft_ids: `[draft_vocab]` int32 target id of each row; None for the full vocabulary.
        """
        self.head = head
        self.embed = embed
        self.head_rows = nnx.Param(head_rows)
        self.draft_ids = None if draft_ids is None else nnx.Variable(draft_ids)

    def init(self, batch: int, length: int) -> EagleState:
        """The state before any token, for a cache of `length` rows."""
        config, dtype = self.head.config, self.embed[...].dtype
        return EagleState(
            cache=empty_layer(batch, config.num_kv_heads, config.head_dim, length, dtype),
            feature=jnp.zeros((batch, config.hidden_size), dtype),
        )

    def observe(
        self,
        state: EagleState,
        tokens: jax.Array,
        features: jax.Array,
        length: jax.Array,
        count: jax.Array,
    ) -> EagleState:
        """Takes in newly committed tokens with the target's true features.

        Args:
          state: the state for `length` rows.
          tokens: `[B, T]` x_{t+1} of each new row.
          features: `[B, T, hidden]` f_t of each new row.
          length: `[B]` rows so far.
          count: `[B]` new rows, at most T; the rest is padding. 0 leaves the row as it is.
        """
        rows = jnp.arange(tokens.shape[1])
        visible = Visible(length=length, fresh=_causal(tokens.shape))
        predicted, fresh = self.head(
            self.embed[...][tokens], features, length[:, None] + rows, visible, state.cache
        )
        last = jnp.take_along_axis(predicted, jnp.maximum(count - 1, 0)[:, None, None], axis=1)
        return EagleState(
            cache=commit_rows(state.cache, fresh, jnp.broadcast_to(rows, tokens.shape), length),
            feature=jnp.where(count[:, None] > 0, last[:, 0], state.feature),
        )

    def propose(
        self, state: EagleState, root: jax.Array, length: jax.Array, draw: Draw, shape: TreeShape
    ) -> DraftTree:
        """Grows a draft tree under `root` `[B]`; `length` `[B]` counts the committed tokens."""
        first = self._scores(state.feature[:, None], draw, 0)

        def deepen(level, frontier, earlier):
            features, keys = (state.feature[:, None], None) if earlier is None else earlier
            parents = jnp.take_along_axis(features, frontier.parents[..., None], axis=1)
            positions = jnp.broadcast_to((length + level - 1)[:, None], frontier.tokens.shape)
            predicted, keys = self.head(
                self.embed[...][frontier.tokens],
                parents,
                positions,
                Visible(length=length, fresh=frontier.visible),
                state.cache,
                keys,
            )
            return self._scores(predicted, draw, level), (predicted, keys)

        return grow(root, first, deepen, shape)

    def _scores(self, features: jax.Array, draw: Draw, depth: int) -> Expansion:
        logits = matmul(features, self.head_rows[...]).astype(jnp.float32)
        ids = None if self.draft_ids is None else self.draft_ids[...]
        return Expansion(jax.nn.log_softmax(draw.perturb(logits, depth, ids)), ids)


def _causal(shape: tuple[int, int]) -> jax.Array:
    rows = jnp.arange(shape[1])
    return jnp.broadcast_to(rows[:, None] >= rows, (shape[0], shape[1], shape[1]))
