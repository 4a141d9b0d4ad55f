"""Attention of fresh rows over a cache and over one another.

A forward pass never writes the cache. It returns the keys and values of its own ("fresh") rows,
and whoever called it decides which of them are committed. Rejected drafts therefore leave no
trace, and no write can fall outside the cache.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx, struct

from eagle_jax.nn.linear import Linear
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
      length: `[B]` committed rows of the cache; every fresh row sees exactly those.
      fresh: `[B, N, M]` bool; fresh row n sees fresh row m.
    """

    length: jax.Array
    fresh: jax.Array


def attend(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    cache: LayerCache | None,
    visible: Visible,
) -> jax.Array:
    """Softmax attention in float32 over the cache's committed rows and the fresh rows.

    Args:
      queries: `[B, N, Q, H]`, Q a multiple of K.
      keys: `[B, K, H, M]` fresh keys.
      values: `[B, K, M, H]` fresh values.
      cache: committed rows, or None when there are none.
      visible: see `Visible`.

    Returns:
      `[B, N, Q * H]`.
    """
    batch, rows, heads, size = queries.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    # [B, K, N * G, H]: the queries that share a key/value head become rows of one product.
    q = queries.reshape(batch, rows, kv_heads, group, size).transpose(0, 2, 1, 3, 4)
    q = q.reshape(batch, kv_heads, rows * group, size) * size**-0.5
    hidden = jnp.finfo(jnp.float32).min

    mask = jnp.repeat(visible.fresh, group, axis=1)[:, None]
    scores = jnp.einsum("bkqh,bkhm->bkqm", q, keys).astype(jnp.float32)
    scores = jnp.where(mask, scores, hidden)
    if cache is None:
        weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
        out = jnp.einsum("bkqm,bkmh->bkqh", weights, values)
    else:
        slots = cache.keys.shape[-1]
        committed = jnp.arange(slots) < visible.length[:, None]
        past = jnp.einsum("bkqh,bkhs->bkqs", q, cache.keys).astype(jnp.float32)
        past = jnp.where(committed[:, None, None, :], past, hidden)
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
        rngs: nnx.Rngs,
    ):
        """`inputs` is the width of what it reads, where that is not `hidden_size`."""
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.qkv = Linear(
            inputs or hidden_size, (num_heads + 2 * num_kv_heads) * head_dim, rngs=rngs
        )
        self.out = Linear(num_heads * head_dim, hidden_size, rngs=rngs)

    def __call__(
        self,
        x: jax.Array,
        angles: tuple[jax.Array, jax.Array],
        visible: Visible,
        cache: LayerCache | None,
        earlier: LayerCache | None = None,
    ) -> tuple[jax.Array, LayerCache]:
        """Attends for rows x `[B, N, inputs]`.

        Args:
          angles: rotary cosines and sines, each `[B, N, head_dim / 2]`.
          visible: what each row sees; its fresh columns are `earlier`'s rows, then x's.
          cache: committed rows, or None.
          earlier: uncommitted keys and values of rows that came before x in the same tree.

        Returns:
          The output `[B, N, hidden]`, and the fresh keys and values, `earlier` included.
        """
        qkv = self.qkv(x).reshape(*x.shape[:2], -1, self.head_dim)
        split = (self.num_heads, self.num_heads + self.num_kv_heads)
        q, k, v = jnp.split(qkv, split, axis=2)
        keys = rotate(k, *angles).transpose(0, 2, 3, 1)
        values = v.transpose(0, 2, 1, 3)
        if earlier is not None:
            keys = jnp.concatenate([earlier.keys, keys], axis=3)
            values = jnp.concatenate([earlier.values, values], axis=2)
        out = attend(rotate(q, *angles), keys, values, cache, visible)
        return self.out(out), LayerCache(keys=keys, values=values)
