"""Scores of drafts against the target's distribution, chunk by chunk over the positions.

The logits of a batch over the draft vocabulary are by far the largest arrays of a training step.
Here no more than a chunk of them exists at a time, and its gradient is taken at once: the backward
pass has nothing to keep and nothing to compute again.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import struct


def chunk_positions() -> int:
    """Positions of a chunk: on CPU few enough for the caches (on 2 cores with 8,192 ids, 256 take
    148 ms for 2,048 positions where all at once take 219), elsewhere enough to fill the device."""
    return 256 if jax.default_backend() == "cpu" else 4096


@struct.dataclass
class Scores:
    """Sums over the rows by unrolled step, each `[steps]` float32.

    Attributes:
      hits: weight of the rows whose best draft is the target's most likely token.
      token_loss: cross-entropy of the draft's distribution under the target's.
      overlap: probability that an independent draft is accepted (Leviathan et al. 2023, section
        3.1): one minus the total variation between both.
    """

    hits: jax.Array
    token_loss: jax.Array
    overlap: jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def score(
    reads: tuple[jax.Array, ...],
    rows: jax.Array,
    features: jax.Array,
    teacher_rows: jax.Array,
    weights: jax.Array,
    factors: jax.Array,
    learnt: bool,
) -> tuple[jax.Array, Scores]:
    """The loss of all unrolled steps over the draft vocabulary, and its parts.

    Differentiable in `reads`, and in `rows` where they are `learnt`.

    Args:
      reads: the LM head's input `[B, T, hidden]` of each of S steps.
      rows: `[draft_vocab, hidden]` the rows that score drafts.
      features: `[B, T, hidden]` the target's; step s of row t is held against row t + 1 + s.
      teacher_rows: `[draft_vocab, hidden]` rows of the target's LM head.
      weights: `[S, B, T]` weight of each row.
      factors: `[S, 2]` float32 what the loss takes of each step's `token_loss`, and of the total
        variation.
      learnt: whether `rows` are trained.
    """
    chunk = functools.partial(_chunk, rows, teacher_rows, factors)
    return _scan(lambda *part: (chunk(*part), ()), reads, features, weights)[0]


def _forward(reads, rows, features, teacher_rows, weights, factors, learnt):
    def loss(reads, rows, *part):
        return _chunk(rows, teacher_rows, factors, reads, *part)

    gradient = jax.value_and_grad(loss, argnums=(0, 1) if learnt else (0,), has_aux=True)

    def one(reads, *part):
        found, (of_reads, *of_rows) = gradient(reads, rows, *part)
        return (found, [g.astype(jnp.float32) for g in of_rows]), of_reads

    (found, of_rows), of_reads = _scan(one, reads, features, weights)
    return found, (of_reads, of_rows[0].astype(rows.dtype) if learnt else None)


def _backward(learnt, kept, cotangents):
    of_reads, of_rows = kept
    scale = cotangents[0]
    of_reads = jax.tree.map(lambda g: (g * scale).astype(g.dtype), of_reads)
    return of_reads, of_rows * scale.astype(of_rows.dtype) if learnt else None, *[None] * 4


score.defvjp(_forward, _backward)


def _chunk(rows, teacher_rows, factors, reads, features, weights) -> tuple[jax.Array, Scores]:
    """The loss and its parts over C positions: reads `[B, C, hidden]`, features
    `[B, C + S, hidden]`, weights `[S, B, C]`."""
    size = reads[0].shape[1]
    teacher = jax.nn.softmax((features[:, 1:] @ teacher_rows.T).astype(jnp.float32))
    found = []
    for step, read in enumerate(reads):
        logits = (read @ rows.T).astype(jnp.float32)
        wanted = teacher[:, step : step + size]
        log_probs = jax.nn.log_softmax(logits)
        # An argmax of XLA's CPU backend takes as long as the product that made the logits.
        best = logits >= logits.max(axis=-1, keepdims=True)
        likely = wanted >= wanted.max(axis=-1, keepdims=True)
        hit = (best & likely).any(axis=-1)
        cross = -(wanted * log_probs).sum(axis=-1)
        overlap = jnp.minimum(jnp.exp(log_probs), wanted).sum(axis=-1)
        found.append([(weights[step] * x).sum() for x in (hit, cross, overlap)])
    scores = Scores(*(jnp.stack(x) for x in zip(*found, strict=True)))
    missed = weights.sum(axis=(1, 2)) - scores.overlap
    return (factors[:, 0] * scores.token_loss + factors[:, 1] * missed).sum(), scores


def _scan(of, reads, features, weights):
    """Sums what `of` gives first over all chunks, and joins what it gives second, `[B, C, ...]`,
    along the positions."""
    batch, length, _ = reads[0].shape
    size = max(1, min(length, chunk_positions() // batch))
    count = -(-length // size)
    more = ((0, 0), (0, count * size - length), (0, 0))
    reads = jax.tree.map(lambda x: jnp.pad(x, more), reads)
    # Step s looks 1 + s rows ahead.
    features = jnp.pad(jnp.pad(features, more), ((0, 0), (0, len(reads)), (0, 0)))
    weights = jnp.pad(weights, (more[2], more[0], more[1]))
    cut = jax.lax.dynamic_slice_in_dim

    def part(number):
        at = number * size
        return of(
            tuple(cut(read, at, size, axis=1) for read in reads),
            cut(features, at, size + len(reads), axis=1),
            cut(weights, at, size, axis=2),
        )

    def body(sums, number):
        summed, kept = part(number)
        return jax.tree.map(jnp.add, sums, summed), kept

    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(part, 0)[0])
    sums, kept = jax.lax.scan(body, zero, jnp.arange(count))
    joined = jax.tree.map(
        lambda x: jnp.moveaxis(x, 0, 1).reshape(batch, count * size, -1)[:, :length], kept
    )
    return sums, joined
