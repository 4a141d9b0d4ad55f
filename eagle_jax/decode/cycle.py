"""One prefill step and one decode cycle: propose, verify, choose, walk, commit, observe."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from eagle_jax.config import TreeShape
from eagle_jax.decode.state import DecodeState
from eagle_jax.decode.verify import walk
from eagle_jax.drafters.base import Drafter
from eagle_jax.nn.attention import Visible
from eagle_jax.nn.cache import commit_rows
from eagle_jax.target.transformer import Transformer


def prefill(
    model: Transformer,
    drafter: Drafter,
    state: DecodeState,
    chunk: jax.Array,
    following: jax.Array,
    count: jax.Array,
    final: jax.Array,
) -> DecodeState:
    """Commits a chunk of every row's prompt; where it is a row's last, draws the first token.

    Args:
      chunk: `[B, C]` int32 the next prompt tokens.
      following: `[B, C]` int32 the prompt token after each of them; undefined after the last.
      count: `[B]` int32 tokens of the chunk that are real.
      final: `[B]` bool; the row's prompt ends with this chunk.
    """
    rows = jnp.arange(chunk.shape[1], dtype=jnp.int32)
    causal = jnp.broadcast_to(rows[:, None] >= rows, (len(chunk), len(rows), len(rows)))
    features, tapped, fresh = model(
        chunk,
        state.length[:, None] + rows,
        Visible(state.length, causal),
        state.caches,
        drafter.taps,
    )
    path = jnp.broadcast_to(rows, chunk.shape)
    caches = tuple(
        commit_rows(cache, new, path, state.length)
        for cache, new in zip(state.caches, fresh, strict=True)
    )
    length = state.length + count
    last = jnp.take_along_axis(features, jnp.maximum(count - 1, 0)[:, None, None], axis=1)
    draw = state.sampler.draw(length, 1, model.config.vocab_size)
    root = draw.choose(model.head(last), 0)
    at_end = final[:, None] & (rows == count[:, None] - 1)
    following = jnp.where(at_end, root, following)
    slots = jnp.arange(state.tokens.shape[1])
    tokens = jnp.where(final[:, None] & (slots == length[:, None]), root, state.tokens)
    stopped = (root == state.stops).any(axis=1) | (length + 1 >= state.limit)
    return state.replace(
        tokens=tokens,
        length=length,
        done=jnp.where(final, stopped, state.done),
        caches=caches,
        drafter=drafter.observe(
            state.drafter, following, tapped if drafter.taps else features, state.length, count
        ),
    )


def cycle(
    model: Transformer, drafter: Drafter, state: DecodeState, shape: TreeShape
) -> DecodeState:
    """Advances every unfinished row by one target pass over a draft tree of `shape.nodes` nodes."""
    length, levels = state.length, shape.depth + 1
    root = jnp.take_along_axis(state.tokens, length[:, None], axis=1)[:, 0]
    draw = state.sampler.draw(length + 1, levels, model.config.vocab_size)
    with jax.named_scope("propose"):
        tree = drafter.propose(state.drafter, root, length, draw, shape)
    with jax.named_scope("verify"):
        features, tapped, fresh = model(
            tree.tokens,
            length[:, None] + tree.depth,
            Visible(length, tree.ancestors),
            state.caches,
            drafter.taps,
        )
        drawn = draw.choose(model.head(features), tree.depth)
    walked = walk(tree, drawn, shape.depth)

    # Exact truncation: the first stop token, the budget, or the end of the accepted run.
    step = jnp.arange(levels)
    written = step <= walked.accepted[:, None]
    stop = written & (walked.drawn[..., None] == state.stops[:, None]).any(axis=-1)
    to_stop = jnp.where(stop.any(axis=1), jnp.argmax(stop, axis=1) + 1, levels)
    room = state.limit - (length + 1)
    count = jnp.minimum(jnp.minimum(walked.accepted + 1, to_stop), room).astype(jnp.int32)
    count = jnp.where(state.done, 0, count)
    ended = (stop.any(axis=1) & (to_stop <= count)) | (length + 1 + count >= state.limit)

    with jax.named_scope("commit"):
        # Nothing may be written before every layer has read its cache: a write position that hangs
        # on the drawn token says so. Where XLA cannot see it, it copies every cache in every cycle.
        at = length + jnp.minimum(walked.drawn[:, 0], 0)
        caches = tuple(
            commit_rows(cache, new, walked.path, at)
            for cache, new in zip(state.caches, fresh, strict=True)
        )
        true_features = tapped if drafter.taps else features
        true_features = jnp.take_along_axis(true_features, walked.path[..., None], axis=1)
    with jax.named_scope("observe"):
        drafts = drafter.observe(state.drafter, walked.drawn, true_features, length, count)
    active = ~state.done
    return state.replace(
        tokens=_write(state.tokens, walked.drawn, length + 1),
        drafted=_write(state.drafted, step < walked.accepted[:, None], length + 1),
        length=length + count,
        done=state.done | ended,
        passes=state.passes + active,
        accepted=state.accepted + (active[:, None] & (step[1:] <= walked.accepted[:, None])),
        caches=caches,
        drafter=drafts,
    )


def _write(into: jax.Array, rows: jax.Array, at: jax.Array) -> jax.Array:
    """Writes rows `[B, T]` into `[B, W]` at column `at` `[B]` of each row."""
    return jax.vmap(lambda x, r, a: jax.lax.dynamic_update_slice(x, r, (a,)))(into, rows, at)
