"""What a fitted head is worth: acceptance on held-out answers, and in the real decode cycle.

Good figures in training and poor ones in use are the field's most reported trap; so the decode
cycle is simulated on the target's own greedy answers, and the real one must agree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.config import TreeShape
from eagle_jax.decode.generate import generate
from eagle_jax.drafters.feature import Head
from eagle_jax.drafters.load import LoadedDrafter
from eagle_jax.target.load import Target
from train.corpus import Corpus
from train.data import Sample
from train.loss import Frozen, scoring_rows, unroll

TOLERANCE = 0.03  # between the simulated and the real tau
BINS = 10


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """Figures over held-out answers, each a list by depth.

    Attributes:
      conditional: share of drafts that are right, given that those above them were.
      cumulative: share of rows whose drafts are right down to this depth.
      calibration_error: expected calibration error of the first draft's probability, in [0, 1]
        (Guo et al. 2017, ten equal bins).
    """

    conditional: list[float]
    cumulative: list[float]
    calibration_error: float


def drafts(
    head: Head, frozen: Frozen, draft_ids: np.ndarray, data: Corpus, depth: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Chains of `depth` drafts from every row of a corpus, the true tokens fed in.

    Returns:
      hits `[R, T, depth]` bool (the draft is the token that the target wrote), weights of the same
      shape (0 where it wrote none), and the probability `[R, T]` that the head gave its first
      draft.
    """

    @jax.jit
    def run(frozen, batch):
        best, weights, confidence = [], [], None
        for read, weight in unroll(head, frozen, batch, depth):
            log_probs = jax.nn.log_softmax(read @ scoring_rows(head, frozen).T)
            confidence = jnp.exp(log_probs.max(axis=-1)) if confidence is None else confidence
            best.append(jnp.argmax(log_probs, axis=-1))
            weights.append(weight)
        return jnp.stack(best, axis=-1), jnp.stack(weights, axis=-1), confidence

    hits, weights, confidence = [], [], []
    for row in range(len(data)):
        batch = data.batch(np.array([row]))
        best, weight, sure = map(np.asarray, run(frozen, batch))
        tokens = np.pad(batch.tokens, ((0, 0), (0, depth + 1)))
        ahead = np.stack([tokens[:, 2 + d : 2 + d + best.shape[1]] for d in range(depth)], axis=-1)
        document = np.pad(batch.document, ((0, 0), (0, depth + 1)), constant_values=-1)
        within = [
            document[:, 2 + d : 2 + d + best.shape[1]] == batch.document for d in range(depth)
        ]
        hits.append(draft_ids[best] == ahead)
        weights.append(weight * np.stack(within, axis=-1))
        confidence.append(sure)
    return np.concatenate(hits), np.concatenate(weights), np.concatenate(confidence)


def acceptance(hits: np.ndarray, weights: np.ndarray, confidence: np.ndarray) -> Acceptance:
    """Sums up what `drafts` found; rows of weight 0 (prompts, paddings) do not count."""
    chain = np.cumprod(hits, axis=-1).astype(bool)
    whole = np.cumprod(weights > 0, axis=-1).astype(bool)
    above = np.concatenate([np.ones_like(chain[..., :1]), chain[..., :-1]], axis=-1)
    right, tried = (chain & whole).sum(axis=(0, 1)), (above & whole).sum(axis=(0, 1))
    first = whole[..., 0]
    sure, correct = confidence[first], hits[..., 0][first]
    bins = np.minimum((sure * BINS).astype(int), BINS - 1)
    gaps = [
        abs(sure[bins == b].sum() - correct[bins == b].sum())
        for b in range(BINS)
        if (bins == b).any()
    ]
    return Acceptance(
        conditional=(right / np.maximum(tried, 1)).tolist(),
        cumulative=(right / np.maximum(whole.sum(axis=(0, 1)), 1)).tolist(),
        calibration_error=float(sum(gaps) / max(1, len(sure))),
    )


def simulated_tau(hits: np.ndarray, weights: np.ndarray, data: Corpus) -> float:
    """tau of a chain, found by walking through the answers as the decode cycle would.

    A pass whose root is the answer's token t commits its right drafts and one token more.
    """
    written = passes = 0
    for row in range(len(data)):
        document = data.packed.document[row]
        for number in range(document.max() + 1):
            at = np.flatnonzero((document == number) & (weights[row, :, 0] > 0))
            if not len(at):
                continue
            t, end = at[0], at[-1]
            while t <= end:
                run = int(np.cumprod(hits[row, t]).sum())
                count = min(run + 1, end + 1 - t)
                written, passes, t = written + count, passes + 1, t + count
    return written / max(1, passes)


def real_tau(
    target: Target, drafter: LoadedDrafter, samples: Sequence[Sample], depth: int, batch: int = 8
) -> float:
    """tau of the decode cycle with a chain of `depth` drafts, on the samples' own prompts."""
    written = passes = 0
    ordered = sorted(samples, key=lambda sample: len(sample.tokens))
    for at in range(0, len(ordered), batch):
        part = ordered[at : at + batch]
        run = generate(
            target,
            drafter,
            [sample.tokens[: sample.answer_start].tolist() for sample in part],
            max_new_tokens=max(len(sample.tokens) - sample.answer_start for sample in part),
            tree=TreeShape(depth + 1, depth, 1),
        )
        written += run.stats.tokens - len(part)
        passes += run.stats.passes
    return written / max(1, passes)
