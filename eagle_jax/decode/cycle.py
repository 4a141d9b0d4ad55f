"""One prefill step and one decode cycle: propose, verify, choose, walk, commit, observe."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from eagle_jax.config import PLAIN, TreeShape
from eagle_jax.decode.state import DecodeState
from eagle_jax.decode.verify import walk
from eagle_jax.drafters.base import Drafter, begin
from eagle_jax.nn.attention import LayerCache, Visible
from eagle_jax.nn.cache import commit_rows, select_rows
from eagle_jax.target.transformer import Transformer
from eagle_jax.tree import root_only


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
    caches = tuple(
        commit_rows(cache, new, state.length)
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
    drafts = begin(drafter, state.drafter, chunk[:, 0], state.length == 0)
    return state.replace(
        tokens=tokens,
        length=length,
        done=jnp.where(final, stopped, state.done),
        caches=caches,
        drafter=drafter.observe(
            drafts, following, tapped if drafter.taps else features, state.length, count
        ),
    )


def cycle(
    model: Transformer, drafter: Drafter, state: DecodeState, shape: TreeShape
) -> DecodeState:
    """Advances every unfinished row by one target pass: over a draft tree of `shape.nodes` nodes,
    or over the root alone where the drafter promises too little (`shape.gate`)."""
    length, active = state.length, ~state.done
    speculated = active
    if shape.gate > 0 and shape.nodes > 1:
        draw = state.sampler.draw(length + 1, 1, model.config.vocab_size)
        promise = jnp.where(active, drafter.promise(state.drafter, draw), 0.0)
        # A pass is shared by the batch, and so is the choice.
        worthwhile = promise.sum() > shape.gate * active.sum()
        step = jax.lax.cond(
            worthwhile,
            lambda: _advance(model, drafter, state, shape),
            lambda: _widen(_advance(model, drafter, state, PLAIN), shape.depth + 1),
        )
        speculated = active & worthwhile
    else:
        step = _advance(model, drafter, state, shape)
    with jax.named_scope("commit"):
        # Nothing may be written before every layer has read its cache: a write position that hangs
        # on the drawn token says so. Where XLA cannot see it, it copies every cache in every cycle.
        at = length + jnp.minimum(step.drawn[:, 0], 0)
        caches = tuple(
            commit_rows(cache, rows, at)
            for cache, rows in zip(state.caches, step.rows, strict=True)
        )
    level = jnp.arange(shape.depth + 1)
    return state.replace(
        tokens=_write(state.tokens, step.drawn, length + 1),
        drafted=_write(state.drafted, level < step.accepted[:, None], length + 1),
        length=length + step.count,
        done=state.done | step.ended,
        passes=state.passes + active,
        speculated=state.speculated + speculated,
        accepted=state.accepted + (active[:, None] & (level[1:] <= step.accepted[:, None])),
        caches=caches,
        drafter=step.drafter,
    )


@struct.dataclass
class Step:
    """What a target pass brings; L = levels of its tree, the root's included.

    Attributes:
      drawn: `[B, L]` int32 the accepted drafts and the token drawn after them; the rest is not
        defined.
      accepted: `[B]` int32 drafts accepted.
      count: `[B]` int32 tokens of `drawn` that the answer takes.
      ended: `[B]` bool; the answer ends with them.
      rows: keys and values of the accepted path, L rows a layer.
      drafter: the drafter's state with the tokens that count.
    """

    drawn: jax.Array
    accepted: jax.Array
    count: jax.Array
    ended: jax.Array
    rows: tuple[LayerCache, ...]
    drafter: Any


def _advance(model: Transformer, drafter: Drafter, state: DecodeState, shape: TreeShape) -> Step:
    """Proposes, verifies, walks and observes; the target's caches are read only."""
    length, levels = state.length, shape.depth + 1
    root = jnp.take_along_axis(state.tokens, length[:, None], axis=1)[:, 0]
    draw = state.sampler.draw(length + 1, levels, model.config.vocab_size)
    with jax.named_scope("propose"):
        if shape.nodes == 1:
            tree = root_only(root)
        else:
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
    written = jnp.arange(levels) <= walked.accepted[:, None]
    stop = written & (walked.drawn[..., None] == state.stops[:, None]).any(axis=-1)
    to_stop = jnp.where(stop.any(axis=1), jnp.argmax(stop, axis=1) + 1, levels)
    room = state.limit - (length + 1)
    count = jnp.minimum(jnp.minimum(walked.accepted + 1, to_stop), room).astype(jnp.int32)
    count = jnp.where(state.done, 0, count)
    ended = (stop.any(axis=1) & (to_stop <= count)) | (length + 1 + count >= state.limit)

    true_features = tapped if drafter.taps else features
    true_features = jnp.take_along_axis(true_features, walked.path[..., None], axis=1)
    with jax.named_scope("observe"):
        drafts = drafter.observe(state.drafter, walked.drawn, true_features, length, count)
    rows = tuple(select_rows(new, walked.path) for new in fresh)
    return Step(walked.drawn, walked.accepted, count, ended, rows, drafts)


def _widen(step: Step, levels: int) -> Step:
    """A step with room for `levels` levels; what is added is not read."""

    def pad(x: jax.Array, axis: int) -> jax.Array:
        return jnp.pad(x, [(0, levels - n if i == axis else 0) for i, n in enumerate(x.shape)])

    rows = tuple(LayerCache(pad(layer.keys, 3), pad(layer.values, 2)) for layer in step.rows)
    return step.replace(drawn=pad(step.drawn, 1), rows=rows)


def _write(into: jax.Array, rows: jax.Array, at: jax.Array) -> jax.Array:
    """Writes rows `[B, T]` into `[B, W]` at column `at` `[B]` of each row."""
    return jax.vmap(lambda x, r, a: jax.lax.dynamic_update_slice(x, r, (a,)))(into, rows, at)
