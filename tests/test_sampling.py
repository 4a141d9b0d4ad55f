"""The draw: its distribution, its filters against NumPy, its noise."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from eagle_jax import InputError, Sampling
from eagle_jax.sampling import Sampler, gumbel, keep_top_k, keep_top_p

LOGITS = np.random.default_rng(0).normal(scale=2.0, size=16).astype(np.float32)


def exact(temperature, top_k, top_p):
    """The distribution that transformers' processors define, in float64, by sorting."""
    logits = LOGITS.astype(np.float64) / temperature
    order = np.argsort(-logits)
    if top_k:
        logits[order[top_k:]] = -np.inf
    p = np.exp(logits - logits.max())
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= top_p]] = 0.0
    return p / p.sum()


def sampler(rows, temperature, top_k=0, top_p=1.0):
    return Sampler(
        key=jnp.stack([jax.random.key_data(jax.random.key(seed)) for seed in range(rows)]),
        temperature=jnp.full(rows, temperature),
        top_k=jnp.full(rows, top_k),
        top_p=jnp.full(rows, top_p),
        sampled=temperature > 0,
        filtered=top_k > 0 or top_p < 1,
    )


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.6, 0, 1.0), (1.5, 5, 1.0), (1.0, 0, 0.8), (0.9, 6, 0.7)],
)
def test_draws_follow_the_exact_distribution(temperature, top_k, top_p):
    rows, depths, rounds = 50, 40, 30  # 60,000 draws: 50 seeds, 1,200 positions each
    settings = sampler(rows, temperature, top_k, top_p)
    depth = jnp.broadcast_to(jnp.arange(depths), (rows, depths))
    logits = jnp.broadcast_to(jnp.asarray(LOGITS), (rows, depths, 16))
    draw = jax.jit(lambda start: settings.draw(start, depths, 16).choose(logits, depth))
    counts = np.zeros(16)
    for turn in range(rounds):
        drawn = draw(jnp.full(rows, turn * depths))
        counts += np.bincount(np.asarray(drawn).ravel(), minlength=16)
    p = exact(temperature, top_k, top_p)
    assert counts[p == 0].sum() == 0
    kept = p > 0
    assert stats.chisquare(counts[kept], p[kept] * counts.sum()).pvalue > 1e-3


def test_noise_depends_on_seed_and_position_alone():
    settings = sampler(2, 1.0)
    early, late = settings.draw(jnp.array([3, 7]), 4, 16), settings.draw(jnp.array([5, 7]), 2, 16)
    np.testing.assert_array_equal(early.noise[0, 2:], late.noise[0])
    np.testing.assert_array_equal(early.noise[1, :2], late.noise[1])
    assert not np.array_equal(early.noise[0, 0], early.noise[0, 1])
    assert not np.array_equal(early.noise[0, 0], early.noise[1, 0])


def test_noise_is_gumbel():
    noise = np.concatenate([gumbel(jnp.array([1, 2], jnp.uint32), p, 2001) for p in range(30)])
    assert np.isfinite(noise).all()
    assert stats.kstest(noise, stats.gumbel_r.cdf).pvalue > 1e-3


@pytest.mark.parametrize("seed", range(4))
def test_filters_against_sorting(seed):
    rng = np.random.default_rng(seed)
    logits = rng.normal(scale=3, size=(2, 3, 40)).astype(np.float32)
    for k in (1, 2, 17, 40, 99):
        got = keep_top_k(jnp.asarray(logits), jnp.array([[k], [0]]))
        edge = np.sort(logits[0], axis=-1)[:, ::-1][:, min(k, 40) - 1, None]
        np.testing.assert_array_equal(np.isfinite(got[0]), logits[0] >= edge)
        np.testing.assert_array_equal(got[1], logits[1])
    for p in (0.01, 0.5, 0.9, 0.999):
        got = keep_top_p(jnp.asarray(logits), jnp.array([[p], [1.0]]))
        probs = np.exp(logits[0].astype(np.float64))
        probs /= probs.sum(axis=-1, keepdims=True)
        order = np.argsort(-probs, axis=-1)
        ranked = np.take_along_axis(probs, order, axis=-1)
        keep = np.zeros_like(probs, bool)
        np.put_along_axis(keep, order, np.cumsum(ranked, axis=-1) - ranked < p, axis=-1)
        np.testing.assert_array_equal(np.isfinite(got[0]), keep)
        np.testing.assert_array_equal(got[1], logits[1])


def test_ties_at_the_edge_stay_and_greedy_rows_are_untouched():
    logits = jnp.array([[[1.0, 1.0, 0.0, -2.0]]])
    assert np.isfinite(keep_top_k(logits, jnp.array([[1]])))[0, 0].tolist() == [
        True,
        True,
        False,
        False,
    ]
    mixed = sampler(2, 1.0, top_k=1).replace(temperature=jnp.array([0.0, 1.0]))
    drawn = mixed.draw(jnp.array([0, 0]), 1, 4).perturb(jnp.tile(logits, (2, 1, 1)), 0)
    np.testing.assert_array_equal(drawn[0], logits[0])


@pytest.mark.parametrize(
    "bad", [{"temperature": -0.1}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 0.0}]
)
def test_bad_settings_are_refused(bad):
    with pytest.raises(InputError):
        Sampling(**bad)
