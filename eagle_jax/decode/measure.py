"""Times the parts of a decode cycle on the machine at hand."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from eagle_jax.config import TreeShape
from eagle_jax.decode.engine import Engine
from eagle_jax.drafters.load import LoadedDrafter
from eagle_jax.nn.attention import Visible
from eagle_jax.nn.cache import empty_cache
from eagle_jax.sampling import Sampler
from eagle_jax.target.load import Target

SLOTS = 384  # cache slots, and
FILLED = 192  # committed tokens, that a pass is timed with


def median_ms(call: Callable[[], Any], repeats: int = 9) -> float:
    """Median wall time of a call in milliseconds, after two calls that warm it up."""
    for _ in range(2):
        jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times)


def target_pass_ms(target: Target, nodes: int, batch: int = 1, repeats: int = 9) -> float:
    """A target pass over a chain of `nodes` nodes a row, with LM head and greedy draw."""
    graph, state = nnx.split(target.model)
    leaves, structure = jax.tree.flatten(state)
    caches = empty_cache(target.config, batch, SLOTS, target.dtype)

    @jax.jit
    def run(leaves, caches, tokens):
        model = nnx.merge(graph, jax.tree.unflatten(structure, leaves))
        at = jnp.arange(nodes)
        causal = jnp.broadcast_to(at[:, None] >= at, (batch, nodes, nodes))
        visible = Visible(jnp.full(batch, FILLED), causal)
        positions = jnp.broadcast_to(FILLED + at, (batch, nodes))
        features, _, fresh = model(tokens, positions, visible, caches)
        return jnp.argmax(model.head(features), axis=-1), fresh

    tokens = jnp.zeros((batch, nodes), jnp.int32)
    return median_ms(lambda: run(leaves, caches, tokens), repeats)


def draft_ms(
    target: Target, drafter: LoadedDrafter, shape: TreeShape, batch: int = 1, repeats: int = 9
) -> float:
    """Proposing a tree and observing a full run of accepted drafts, greedy."""
    graph, state = nnx.split(drafter.module)
    leaves, structure = jax.tree.flatten(state)
    levels = shape.depth + 1
    sampler = Sampler(
        key=jnp.zeros((batch, 2), jnp.uint32),
        temperature=jnp.zeros(batch),
        top_k=jnp.zeros(batch, jnp.int32),
        top_p=jnp.ones(batch),
        sampled=False,
        filtered=False,
    )

    @jax.jit
    def run(leaves, state, root, features):
        module = nnx.merge(graph, jax.tree.unflatten(structure, leaves))
        length = jnp.full(batch, FILLED)
        draw = sampler.draw(length + 1, levels, target.config.vocab_size)
        tree = module.propose(state, root, length, draw, shape)
        tokens = tree.tokens[:, :levels]
        return module.observe(state, tokens, features, length, jnp.full(batch, levels)), tree

    features = jnp.zeros((batch, levels, target.config.hidden_size), target.dtype)
    begin, root = drafter.module.init(batch, SLOTS), jnp.zeros(batch, jnp.int32)
    return median_ms(lambda: run(leaves, begin, root, features), repeats)


def cycle_ms(engine: Engine, start: Callable[[], Any], repeats: int = 15) -> float:
    """One whole cycle, greedy: the median over the cycles that follow `start()`."""
    state = engine.step(engine.step(start()))
    times = []
    for _ in range(repeats):
        jax.block_until_ready(state)
        begin = time.perf_counter()
        state = engine.step(state)
        jax.block_until_ready(state)
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times)


def cost_curve_ms(target: Target, nodes: Sequence[int]) -> dict[int, float]:
    """`target_pass_ms` by number of nodes."""
    return {count: target_pass_ms(target, count) for count in nodes}
