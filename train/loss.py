"""The objective of EAGLE heads, with unrolled steps.

Feature regression (SmoothL1) and soft cross-entropy of the tokens that follow, weighted: EAGLE-1
takes 1 and 0.1 (arXiv 2401.15077, section 3.2), EAGLE-3 the cross-entropy alone; a share of the
regression keeps a head from learning few answers by heart.

With more than one step the head is also trained on its own outputs, as it runs when it drafts
(training-time test, arXiv 2503.01840, section 3): step s of row t reads the token t + 1 + s and its
own prediction of step s - 1, attends to the true rows up to t and to its own rows of the steps
1..s, and predicts feature t + 1 + s.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import struct

from eagle_jax.drafters.feature import Head
from eagle_jax.nn.attention import Visible
from train.score import score


@dataclasses.dataclass(frozen=True)
class Objective:
    """Weights of the loss.

    Attributes:
      steps: unrolled steps, 1 is EAGLE-1.
      step_decay: weight of step s is step_decay ** s.
      feature_weight: of the SmoothL1 regression.
      token_weight: of the soft cross-entropy.
      variation_weight: of the total variation between the draft's distribution and the target's,
        whose complement is the chance that an independent draft is accepted.
      noise: what the head reads is disturbed by a uniform draw from [-noise, noise] times the root
        mean square of its row.
      remat: compute each unrolled step of the head again in the backward pass instead of keeping
        what it computed: less memory, slower steps.
    """

    steps: int = 2
    step_decay: float = 0.8
    feature_weight: float = 0.3
    token_weight: float = 1.0
    variation_weight: float = 0.0
    noise: float = 0.1
    remat: bool = False


@struct.dataclass
class Batch:
    """Packed rows.

    Attributes:
      tokens: `[B, T]` int32.
      features: `[B, T, hidden]` float32.
      taps: `[B, T, len(taps) * hidden]` float32 what an EAGLE-3 head reads.
      document: `[B, T]` int32, -1 is padding.
      position: `[B, T]` int32.
      weight: `[B, T]` float32 weight of each row's first prediction.
    """

    tokens: jax.Array
    features: jax.Array
    taps: jax.Array
    document: jax.Array
    position: jax.Array
    weight: jax.Array


@struct.dataclass
class Frozen:
    """What the target lends.

    Attributes:
      embed: `[V, hidden]` its embedding.
      head_rows: `[draft_vocab, hidden]` its LM head's rows of the draft vocabulary.
      tap_scale: `[len(taps) * hidden]` factors of the taps. Residual streams grow with depth, by
        ten times and more: unless the low ones are scaled up, a rate that suits the weights of the
        high tap leaves theirs where they began. `fit` folds the factors into `fc` afterwards.
    """

    embed: jax.Array
    head_rows: jax.Array
    tap_scale: jax.Array


def unroll(
    head: Head,
    frozen: Frozen,
    batch: Batch,
    steps: int,
    noise: jax.Array | None = None,
    remat: bool = False,
) -> Iterator[tuple[jax.Array, jax.Array]]:
    """Runs the head as it drafts, from every row at once.

    Args:
      noise: of the shape of what the head reads; that is disturbed by noise times the root mean
        square of each row. None leaves it undisturbed.
      remat: see `Objective`.

    Yields:
      For each step s: the LM head's input `[B, T, hidden]`, from which row t drafts token
      t + 2 + s, and the weight `[B, T]` of that prediction.
    """
    inputs = batch.taps * frozen.tap_scale if head.config.taps else batch.features
    if noise is not None:
        inputs += noise * jnp.sqrt((inputs**2).mean(axis=-1, keepdims=True))
    inputs = head.fuse(inputs)
    rows = jnp.arange(batch.tokens.shape[1])
    same = batch.document[:, :, None] == batch.document[:, None, :]
    visible = same & (rows[:, None] >= rows)
    diagonal = jnp.broadcast_to(rows[:, None] == rows, visible.shape)
    length = jnp.zeros(len(batch.tokens), jnp.int32)
    earlier = None
    run = jax.checkpoint(head.__call__) if remat else head
    for step in range(steps):
        inputs, earlier = run(
            frozen.embed[ahead(batch.tokens, step + 1)],
            inputs,
            batch.position + step,
            Visible(length=length, fresh=visible),
            None,
            earlier,
        )
        yield head.readout(inputs), step_weight(batch, step)
        visible = jnp.concatenate([visible, diagonal], axis=2)


def step_weight(batch: Batch, step: int) -> jax.Array:
    """`[B, T]` weight of what each row predicts in an unrolled step."""
    same = ahead(batch.document, step, -1) == batch.document
    return jnp.where(same, ahead(batch.weight, step), 0.0)


def supervised(batch: Batch, steps: int) -> jax.Array:
    """`[steps]` weight of all rows, by unrolled step."""
    return jnp.stack([step_weight(batch, step).sum() for step in range(steps)])


def scoring_rows(head: Head, frozen: Frozen) -> jax.Array:
    """`[draft_vocab, hidden]`: the head's own LM head, or the target's rows."""
    return frozen.head_rows if head.lm_head is None else head.lm_head[...]


def objective(
    head: Head,
    frozen: Frozen,
    batch: Batch,
    key: jax.Array | None,
    weights: Objective,
    whole: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss and its parts.

    Args:
      key: PRNG key of the feature noise; None leaves the features undisturbed.
      whole: `[steps]` weight that the sums of each step are divided by, where the batch is a part
        of a larger one; its own by default.

    Returns:
      The scalar loss, and sums by step in float32: `supervised` (weight of the rows),
      `feature_loss`, and those of `Scores`; each `[steps]`.
    """
    noise = None
    if key is not None:
        like = batch.taps if head.config.taps else batch.features
        noise = jax.random.uniform(
            key, like.shape, like.dtype, minval=-weights.noise, maxval=weights.noise
        )
    if whole is None:
        whole = supervised(batch, weights.steps)
    reads, held, regression = [], [], []
    for step, (read, weight) in enumerate(
        unroll(head, frozen, batch, weights.steps, noise, weights.remat)
    ):
        reads.append(read)
        held.append(weight)
        regression.append((weight * _smooth(read, ahead(batch.features, step + 1))).sum())
    decay = weights.step_decay ** jnp.arange(weights.steps) / jnp.maximum(whole, 1.0)
    factors = jnp.stack([weights.token_weight * decay, weights.variation_weight * decay], axis=1)
    loss, scores = score(
        tuple(reads),
        scoring_rows(head, frozen),
        batch.features,
        frozen.head_rows,
        jnp.stack(held),
        factors,
        head.lm_head is not None,
    )
    feature_loss = jnp.stack(regression)
    parts = {
        "supervised": supervised(batch, weights.steps),
        "feature_loss": feature_loss,
        "hits": scores.hits,
        "token_loss": scores.token_loss,
        "overlap": scores.overlap,
    }
    return loss + weights.feature_weight * (decay * feature_loss).sum(), parts


def _smooth(predicted: jax.Array, wanted: jax.Array) -> jax.Array:
    """SmoothL1 of features `[B, T, hidden]`, averaged over them: `[B, T]` float32."""
    difference = jnp.abs(predicted - wanted).astype(jnp.float32)
    return jnp.where(difference < 1, 0.5 * difference**2, difference - 0.5).mean(axis=-1)


def ahead(x: jax.Array, by: int, fill: int = 0) -> jax.Array:
    """x moved `by` places towards the start of axis 1, filled at the end."""
    if by == 0:
        return x
    pad = [(0, 0), (0, by)] + [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x, pad, constant_values=fill)[:, by:]
