"""Autoregressive drafters over features of the target: what EAGLE-1, 2 and 3 share.

A head reads a feature of the target at position t together with the embedding of the next token
x_{t+1}, and gives the feature of position t + 1, from which tokens are scored and which the next
level of the draft tree starts from. The tree is EAGLE-2's (arXiv 2406.16858); see `eagle_jax.tree`.
"""

from __future__ import annotations

from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx, struct

from eagle_jax.config import DrafterConfig, TreeShape
from eagle_jax.drafters.base import expand
from eagle_jax.nn.attention import LayerCache, Visible, causal
from eagle_jax.nn.cache import commit_rows, empty_layer
from eagle_jax.nn.linear import matmul
from eagle_jax.sampling import Draw
from eagle_jax.tree import DraftTree, Expansion, grow


class Head(Protocol):
    """The trained part of a drafter, an nnx module.

    Attributes:
      method: its name in configurations.
      lm_head: `[draft_vocab, hidden]` its own scoring rows, or None where it uses the target's.
      embed: `[vocab, hidden]` its own embedding, or None where it uses the target's.
    """

    method: str
    config: DrafterConfig
    lm_head: nnx.Param | None
    embed: nnx.Param | None

    def fuse(self, features: jax.Array) -> jax.Array:
        """What the target gives `[B, N, ...]` as a feature of the head `[B, N, hidden]`."""

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
          features: `[B, N, hidden]` of position t, fused or predicted.
          positions: `[B, N]` int32, t: the feature's index, one less than the token's.
          visible, cache, earlier: see `Attention`.

        Returns:
          Features of position t + 1 `[B, N, hidden]`, and the fresh keys and values.
        """

    def readout(self, features: jax.Array) -> jax.Array:
        """The LM head's input `[B, N, hidden]` for predicted features."""


def own_embed(config: DrafterConfig, rngs: nnx.Rngs) -> nnx.Param | None:
    """A head's own embedding `[vocab, hidden]`, where it has one."""
    if not config.own_embed:
        return None
    shape = (config.vocab_size, config.hidden_size)
    return nnx.Param(jax.random.normal(rngs.params(), shape) * 0.02)


@struct.dataclass
class FeatureState:
    """What the drafter keeps between cycles.

    Attributes:
      cache: keys and values of one row a committed token; row t holds (f_t, x_{t+1}).
      feature: `[B, hidden]` the feature predicted after the last row.
      logits: `[B, draft_vocab]` float32 the scores of the root's children, made of that feature.
    """

    cache: LayerCache
    feature: jax.Array
    logits: jax.Array


class FeatureDrafter(nnx.Module):
    """A head bound to its target, whose embedding it shares unless it has its own.

    It scores with the head's own LM head, or with the rows of the target's that belong to the draft
    vocabulary.

    Attributes:
      coupled: the drafter ranks its candidates with the noise that the target will draw with, which
        guesses the draw far more often than ranking by probability alone. What is drawn does not
        depend on it.
    """

    def __init__(
        self,
        head: Head,
        embed: nnx.Param | None,
        head_rows: jax.Array | None,
        draft_ids: jax.Array | None,
    ):
        """Binds a head.

        Args:
          head: the trained part.
          embed: the target's embedding `[vocab, hidden]`, shared, not copied; None where the head
            has its own.
          head_rows: `[draft_vocab, hidden]` rows of the target's LM head; None where the head has
            its own.
          draft_ids: `[draft_vocab]` int32 target id of each row; None for the full vocabulary.
        """
        self.method, self.taps = head.method, head.config.taps
        self.coupled = True
        self.head = head
        self.embed = embed
        self.head_rows = None if head_rows is None else nnx.Param(head_rows)
        self.draft_ids = None if draft_ids is None else nnx.Variable(draft_ids)

    def init(self, batch: int, length: int) -> FeatureState:
        """The state before any token, for a cache of `length` rows."""
        config, dtype = self.head.config, self._table.dtype
        return FeatureState(
            cache=empty_layer(batch, config.num_kv_heads, config.head_dim, length, dtype),
            feature=jnp.zeros((batch, config.hidden_size), dtype),
            logits=jnp.zeros((batch, config.draft_vocab_size), jnp.float32),
        )

    def observe(
        self,
        state: FeatureState,
        tokens: jax.Array,
        features: jax.Array,
        length: jax.Array,
        count: jax.Array,
    ) -> FeatureState:
        """Takes in newly committed tokens with the target's true features.

        Args:
          state: the state for `length` rows.
          tokens: `[B, T]` x_{t+1} of each new row.
          features: `[B, T, ...]` what the target gives for position t of each new row: its
            features `[hidden]`, or the taps that the head asks for.
          length: `[B]` rows so far.
          count: `[B]` new rows, at most T; the rest is padding. 0 leaves the row as it is.
        """
        rows = jnp.arange(tokens.shape[1])
        visible = Visible(length=length, fresh=causal(tokens.shape))
        predicted, fresh = self.head(
            self._table[tokens],
            self.head.fuse(features),
            length[:, None] + rows,
            visible,
            state.cache,
        )
        last = jnp.take_along_axis(predicted, jnp.maximum(count - 1, 0)[:, None, None], axis=1)
        some = count[:, None] > 0
        return FeatureState(
            cache=commit_rows(state.cache, fresh, length),
            feature=jnp.where(some, last[:, 0], state.feature),
            logits=jnp.where(some, self._logits(last)[:, 0], state.logits),
        )

    def promise(self, state: FeatureState, draw: Draw) -> jax.Array:
        """The probability `[B]` of the best of the root's children, noise included."""
        return jnp.exp(self._expand(state.logits[:, None], draw, 0).log_probs.max(axis=(1, 2)))

    def propose(
        self, state: FeatureState, root: jax.Array, length: jax.Array, draw: Draw, shape: TreeShape
    ) -> DraftTree:
        """Grows a draft tree under `root` `[B]`; `length` `[B]` counts the committed tokens."""
        first = self._expand(state.logits[:, None], draw, 0)

        def deepen(level, frontier, earlier):
            features, keys = (state.feature[:, None], None) if earlier is None else earlier
            parents = jnp.take_along_axis(features, frontier.parents[..., None], axis=1)
            positions = jnp.broadcast_to((length + level - 1)[:, None], frontier.tokens.shape)
            predicted, keys = self.head(
                self._table[frontier.tokens],
                parents,
                positions,
                Visible(length=length, fresh=frontier.visible),
                state.cache,
                keys,
            )
            return self._expand(self._logits(predicted), draw, level), (predicted, keys)

        return grow(root, first, deepen, shape)

    @property
    def _table(self) -> jax.Array:
        """The embedding `[vocab, hidden]`."""
        return (self.head.embed if self.embed is None else self.embed)[...]

    def _logits(self, features: jax.Array) -> jax.Array:
        """`[B, N, draft_vocab]` float32 scores of the tokens after features `[B, N, hidden]`.

        A target's cap on logits is left out. It never changes their order, so that a node's
        children rank alike; how paths compare does change, which costs speed at worst: tokens are
        drawn from `Transformer.head`, cap and all.
        """
        rows = self.head.lm_head if self.head_rows is None else self.head_rows
        return matmul(self.head.readout(features), rows[...]).astype(jnp.float32)

    def _expand(self, logits: jax.Array, draw: Draw, depth: int) -> Expansion:
        ids = None if self.draft_ids is None else self.draft_ids[...]
        return expand(logits, draw, depth, ids=ids, coupled=self.coupled)
