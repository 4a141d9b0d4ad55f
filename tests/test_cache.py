"""Committing rows: against NumPy, and against a fresh prefill of the committed tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.nn.attention import LayerCache, Visible
from eagle_jax.nn.cache import commit_rows, empty_cache, select_rows


@pytest.mark.parametrize("batch", [1, 3])
def test_commit_against_numpy(batch):
    rng = np.random.default_rng(batch)
    kv, size, slots, fresh_rows, count = 2, 4, 20, 6, 3
    keys = rng.normal(size=(batch, kv, size, slots)).astype(np.float32)
    values = rng.normal(size=(batch, kv, slots, size)).astype(np.float32)
    new_keys = rng.normal(size=(batch, kv, size, fresh_rows)).astype(np.float32)
    new_values = rng.normal(size=(batch, kv, fresh_rows, size)).astype(np.float32)
    path = rng.integers(0, fresh_rows, (batch, count))
    length = rng.integers(0, slots - count, batch)

    def commit(cache, fresh, path, length):
        return commit_rows(cache, select_rows(fresh, path), length)

    out = jax.jit(commit, donate_argnums=0)(
        LayerCache(jnp.asarray(keys), jnp.asarray(values)),
        LayerCache(jnp.asarray(new_keys), jnp.asarray(new_values)),
        jnp.asarray(path),
        jnp.asarray(length),
    )
    for row in range(batch):
        for step in range(count):
            keys[row, :, :, length[row] + step] = new_keys[row, :, :, path[row, step]]
            values[row, :, length[row] + step] = new_values[row, :, path[row, step]]
    np.testing.assert_array_equal(out.keys, keys)
    np.testing.assert_array_equal(out.values, values)


def test_a_committed_path_equals_a_fresh_prefill(target):
    """Prefill, verify a tree, commit one path: the cache is that of the committed text."""
    model, rng = target.model, np.random.default_rng(0)
    prompt = rng.integers(0, 61, (2, 5))
    tree = rng.integers(0, 61, (2, 6))
    parents = [0, 0, 0, 1, 1, 4]
    depth = np.array([0, 1, 1, 2, 2, 3])
    ancestors = np.eye(6, dtype=bool)
    for node in range(1, 6):
        ancestors[node] |= ancestors[parents[node]]
    path = [0, 1, 4, 5]

    def causal(rows):
        return jnp.broadcast_to(jnp.tri(rows, dtype=bool), (2, rows, rows))

    def prefill(tokens):
        rows = tokens.shape[1]
        at = jnp.broadcast_to(jnp.arange(rows), tokens.shape)
        start = empty_cache(target.config, 2, 16, jnp.float32)
        zero = jnp.zeros(2, jnp.int32)
        features, _, fresh = model(jnp.asarray(tokens), at, Visible(zero, causal(rows)), start)
        caches = [commit_rows(c, f, zero) for c, f in zip(start, fresh, strict=True)]
        return features, caches

    _, caches = prefill(prompt)
    length = jnp.full(2, 5)
    features, _, fresh = model(
        jnp.asarray(tree),
        5 + jnp.broadcast_to(jnp.asarray(depth), tree.shape),
        Visible(length, jnp.broadcast_to(jnp.asarray(ancestors), (2, 6, 6))),
        caches,
    )
    where = jnp.broadcast_to(jnp.asarray(path), (2, 4))
    taken = [select_rows(layer, where) for layer in fresh]
    caches = [commit_rows(c, rows, length) for c, rows in zip(caches, taken, strict=True)]
    expected, whole = prefill(np.concatenate([prompt, tree[:, path]], axis=1))
    np.testing.assert_allclose(features[:, np.array(path)], expected[:, 5:], atol=2e-5)
    for got, want in zip(caches, whole, strict=True):
        np.testing.assert_allclose(got.keys[..., :9], want.keys[..., :9], atol=2e-5)
        np.testing.assert_allclose(got.values[:, :, :9], want.values[:, :, :9], atol=2e-5)
