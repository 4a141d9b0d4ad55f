"""The chunked loss over the draft vocabulary against its definition, written out at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train import score as module
from train.score import score

STEPS, BATCH, LENGTH, HIDDEN, VOCAB = 3, 2, 23, 8, 11


@pytest.fixture(scope="module")
def case():
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    weights = np.abs(rng.standard_normal((STEPS, BATCH, LENGTH))).astype(np.float32)
    for step in range(STEPS):
        weights[step, :, LENGTH - 1 - step :] = 0  # nothing to be held against
    return (
        tuple(normal(BATCH, LENGTH, HIDDEN) for _ in range(STEPS)),
        normal(VOCAB, HIDDEN),
        normal(BATCH, LENGTH, HIDDEN),
        normal(VOCAB, HIDDEN),
        jnp.asarray(weights),
        jnp.abs(normal(STEPS, 2)),
    )


def at_once(reads, rows, features, teacher_rows, weights, factors):
    """Loss, and sums of hits, cross-entropy and overlap by step."""
    teacher = jax.nn.softmax(jnp.pad(features, ((0, 0), (0, STEPS), (0, 0))) @ teacher_rows.T)
    loss, sums = 0.0, []
    for step, read in enumerate(reads):
        wanted = teacher[:, 1 + step :][:, :LENGTH]
        draft = jax.nn.softmax(read @ rows.T)
        cross = -(wanted * jnp.log(draft)).sum(axis=-1)
        variation = 0.5 * jnp.abs(wanted - draft).sum(axis=-1)
        hit = jnp.argmax(wanted, axis=-1) == jnp.argmax(draft, axis=-1)
        loss += (weights[step] * (factors[step, 0] * cross + factors[step, 1] * variation)).sum()
        sums.append([(weights[step] * x).sum() for x in (hit, cross, 1 - variation)])
    return loss, jnp.array(sums).T


@pytest.mark.parametrize("positions", [2, 6, 10, 46, 1000])
@pytest.mark.parametrize("learnt", [True, False])
def test_chunks_give_what_the_whole_gives(case, positions, learnt, monkeypatch):
    monkeypatch.setattr(module, "chunk_positions", lambda: positions)
    reads, rows, *rest = case
    of = (0, 1) if learnt else 0
    expected = jax.value_and_grad(lambda *x: at_once(*x, *rest)[0], of)(reads, rows)
    found = jax.value_and_grad(lambda *x: score(*x, *rest, learnt)[0], of)(reads, rows)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), found, expected)
    loss, parts = score(reads, rows, *rest, learnt)  # without a gradient
    np.testing.assert_allclose(loss, expected[0], rtol=1e-5)
    sums = at_once(*case)[1]
    for name, wanted in zip(("hits", "token_loss", "overlap"), sums, strict=True):
        np.testing.assert_allclose(getattr(parts, name), wanted, rtol=1e-4)


def test_no_array_holds_all_logits():
    """The largest array of a step is a chunk's, whatever the length."""
    length, vocab = 4096, 2000
    reads = (jnp.zeros((1, length, HIDDEN)),)
    rows, features = jnp.zeros((vocab, HIDDEN)), jnp.zeros((1, length, HIDDEN))
    weights, factors = jnp.ones((1, 1, length)), jnp.ones((1, 2))

    def loss(reads):
        return score(reads, rows, features, rows, weights, factors, False)[0]

    memory = jax.jit(jax.grad(loss)).lower(reads).compile().memory_analysis()
    assert memory.temp_size_in_bytes < length * vocab * 4 / 2
