"""Attention of fresh rows over a cache and over one another.

A forward pass never writes the cache. It returns the keys and values of its own ("fresh") rows,
and whoever called it decides which of them are committed. Rejected drafts therefore leave no
trace, and no write can fall outside the cache.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx, struct

from eagle_jax.config import LLAMA, LayerSwitches
from eagle_jax.nn.linear import Linear
from eagle_jax.nn.norm import RMSNorm
from eagle_jax.nn.rope import rotate


@struct.dataclass
class LayerCache:
    """Committed keys and values of one layer.

    Keys lie with the length last: the product with a query then reads them in order, which is 1.6
    times faster on CPU.

    Attributes:
      keys: `[B, K, H, S]`, K key/value heads of size H, S slots.
      values: `[B, K, S, H]`.
    """

    keys: jax.Array
    values: jax.Array


@struct.dataclass
class Visible:
    """What each fresh row sees.

    Attributes:
      length: `[B]` committed rows of the cache; every fresh row sees those, from `first` on.
      fresh: `[B, N, M]` bool; fresh row n sees fresh row m.
      first: `[B, N]` int32 the first committed row that each fresh row sees; None is row 0.
    """

    length: jax.Array
    fresh: jax.Array
    first: jax.Array | None = None

    def within(
        self, window: int, positions: jax.Array, columns: jax.Array | None = None
    ) -> Visible:
        """What is left of it under a sliding window.

        A row sees the `window` positions up to its own. A node of a tree is as far from its
        ancestors as their positions say, so its window counts along its own path.

        Args:
          positions: `[B, N]` int32 of the fresh rows.
          columns: `[B, M]` int32 of the columns of `fresh`; None where these are the same rows.
        """
        columns = positions if columns is None else columns
        near = positions[:, :, None] - columns[:, None, :] < window
        return Visible(self.length, self.fresh & near, positions - (window - 1))


def causal(shape: tuple[int, int]) -> jax.Array:
    """`Visible.fresh` `[B, N, N]` of N rows that see themselves and the rows before them."""
    rows = jnp.arange(shape[1])
    return jnp.broadcast_to(rows[:, None] >= rows, (shape[0], shape[1], shape[1]))


def attend(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    cache: LayerCache | None,
    visible: Visible,
    scale: float | None = None,
    cap: float | None = None,
) -> jax.Array:
    """Softmax attention in float32 over the cache's committed rows and the fresh rows.

    Args:
      queries: `[B, N, Q, H]`, Q a multiple of K.
      keys: `[B, K, H, M]` fresh keys.
      values: `[B, K, M, H]` fresh values.
      cache: committed rows, or None when there are none.
      visible: see `Visible`.
      scale: factor of the scores; None is H ** -0.5.
      cap: scores x become cap * tanh(x / cap).

    Returns:
      `[B, N, Q * H]`.
    """

    def scored(product: jax.Array) -> jax.Array:
        wide = product.astype(jnp.float32)
        return wide if cap is None else cap * jnp.tanh(wide / cap)

    batch, rows, heads, size = queries.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    # [B, K, N * G, H]: the queries that share a key/value head become rows of one product.
    q = queries.reshape(batch, rows, kv_heads, group, size).transpose(0, 2, 1, 3, 4)
    q = q.reshape(batch, kv_heads, rows * group, size) * (size**-0.5 if scale is None else scale)
    hidden = jnp.finfo(jnp.float32).min

    mask = jnp.repeat(visible.fresh, group, axis=1)[:, None]
    scores = scored(jnp.einsum("bkqh,bkhm->bkqm", q, keys))
    scores = jnp.where(mask, scores, hidden)
    if cache is None:
        weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
        out = jnp.einsum("bkqm,bkmh->bkqh", weights, values)
    else:
        slots = cache.keys.shape[-1]
        committed = (jnp.arange(slots) < visible.length[:, None])[:, None, None, :]
        if visible.first is not None:
            first = jnp.repeat(visible.first, group, axis=1)[:, None, :, None]
            committed = committed & (jnp.arange(slots) >= first)
        past = scored(jnp.einsum("bkqh,bkhs->bkqs", q, cache.keys))
        past = jnp.where(committed, past, hidden)
        # One softmax over both parts, without gluing the large one to the small one.
        top = jnp.maximum(past.max(axis=-1, keepdims=True), scores.max(axis=-1, keepdims=True))
        past, scores = jnp.exp(past - top), jnp.exp(scores - top)
        total = past.sum(axis=-1, keepdims=True) + scores.sum(axis=-1, keepdims=True)
        out = jnp.einsum("bkqs,bksh->bkqh", past.astype(values.dtype), cache.values)
        out += jnp.einsum("bkqm,bkmh->bkqh", scores.astype(values.dtype), values)
        out = (out.astype(jnp.float32) / total).astype(values.dtype)
    out = out.reshape(batch, kv_heads, rows, group, size).transpose(0, 2, 1, 3, 4)
    return out.reshape(batch, rows, heads * size)


class Attention(nnx.Module):
    """Grouped-query attention with one fused projection `[q; k; v]`."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        inputs: int | None = None,
        switches: LayerSwitches = LLAMA,
        norm_eps: float = 1e-5,
        rngs: nnx.Rngs,
    ):
        """Makes the projections.

        Args:
          inputs: the width of what it reads, where that is not `hidden_size`.
          norm_eps: of the norms of queries and keys, where `switches` ask for them.
        """
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.scale, self.cap = switches.score_scale, switches.score_cap
        self.qkv = Linear(
            inputs or hidden_size,
            (num_heads + 2 * num_kv_heads) * head_dim,
            bias=switches.qkv_bias,
            rngs=rngs,
        )
        self.out = Linear(num_heads * head_dim, hidden_size, bias=switches.out_bias, rngs=rngs)

        def norm(heads: int) -> RMSNorm | None:
            if switches.qk_norm is None:
                return None
            size = head_dim * (heads if switches.qk_norm == "whole" else 1)
            return RMSNorm(size, norm_eps, shifted=switches.shifted_norms)

        self.q_norm, self.k_norm = norm(num_heads), norm(num_kv_heads)

    def __call__(
        self,
        x: jax.Array,
        angles: tuple[jax.Array, jax.Array] | None,
        visible: Visible,
        cache: LayerCache | None,
        earlier: LayerCache | None = None,
    ) -> tuple[jax.Array, LayerCache]:
        """Attends for rows x `[B, N, inputs]`.

        Args:
          angles: rotary cosines and sines, each `[B, N, head_dim / 2]`; None does not rotate.
          visible: what each row sees; its fresh columns are `earlier`'s rows, then x's.
          cache: committed rows, or None.
          earlier: uncommitted keys and values of rows that came before x in the same tree.

        Returns:
          The output `[B, N, hidden]`, and the fresh keys and values, `earlier` included.
        """
        qkv = self.qkv(x).reshape(*x.shape[:2], -1, self.head_dim)
        split = (self.num_heads, self.num_heads + self.num_kv_heads)
        q, k, v = jnp.split(qkv, split, axis=2)
        if self.q_norm is not None:
            q, k = _normed(self.q_norm, q), _normed(self.k_norm, k)
        if angles is not None:
            q, k = rotate(q, *angles), rotate(k, *angles)
        keys = k.transpose(0, 2, 3, 1)
        values = v.transpose(0, 2, 1, 3)
        if earlier is not None:
            keys = jnp.concatenate([earlier.keys, keys], axis=3)
            values = jnp.concatenate([earlier.values, values], axis=2)
        out = attend(q, keys, values, cache, visible, self.scale, self.cap)
        return self.out(out), LayerCache(keys=keys, values=values)


def _normed(norm: RMSNorm, x: jax.Array) -> jax.Array:
    """Heads x `[B, N, heads, H]` normed one by one or together, as the norm's size says."""
    return norm(x.reshape(*x.shape[:2], -1, norm.weight.shape[0])).reshape(x.shape)
