"""Margins of the draw: how near two tokens were to trading places."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from eagle_jax.config import Sampling
from eagle_jax.nn.attention import Visible
from eagle_jax.sampling import Sampler
from eagle_jax.target.load import Target


def margins(target: Target, ids: Sequence[int], sampling: Sampling, seed: int) -> np.ndarray:
    """How far the best perturbed logit lies above the second best after each of the ids.

    A teacher-forced pass over the whole text; two programs whose products round differently can
    only part where this is small.

    Returns:
      `[len(ids)]` float32.
    """
    graph, state = nnx.split(target.model)
    width = 1 << (len(ids) - 1).bit_length()
    tokens = np.zeros((1, width), np.int32)
    tokens[0, : len(ids)] = ids
    sampler = Sampler(
        key=jax.random.key_data(jax.random.key(seed, impl="threefry2x32"))[None],
        temperature=jnp.full(1, sampling.temperature),
        top_k=jnp.full(1, sampling.top_k),
        top_p=jnp.full(1, sampling.top_p),
        sampled=not sampling.greedy,
        filtered=sampling.filtered,
    )

    @jax.jit
    def run(state, tokens):
        model = nnx.merge(graph, state)
        at = jnp.arange(width)
        visible = Visible(jnp.zeros(1, jnp.int32), (at[:, None] >= at)[None])
        features, _, _ = model(tokens, at[None], visible, None)

        def margin(position):
            draw = sampler.draw(position[None] + 1, 1, target.config.vocab_size)
            scores = draw.perturb(model.head(features[:, position][:, None]), 0)
            best = jax.lax.top_k(scores[0, 0], 2)[0]
            return best[0] - best[1]

        return jax.lax.map(margin, at)

    return np.asarray(run(state, tokens))[: len(ids)]
