"""Times the parts of a decode cycle on the machine at hand."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from eagle_jax.config import Sampling, TreeShape
from eagle_jax.decode.engine import Engine
from eagle_jax.drafters.load import LoadedDrafter
from eagle_jax.nn.attention import Visible
from eagle_jax.nn.cache import empty_cache
from eagle_jax.sampling import Sampler
from eagle_jax.target.load import Target

SLOTS = 384  # cache slots, and
FILLED = 192  # committed tokens, that a pass is timed with
LOOP = 4  # passes of one timed call, so that a pass costs what it costs within `generate`'s loop


def fastest_ms(call: Callable[[], Any], repeats: int = 7) -> float:
    """Shortest wall time of a call in milliseconds, after one call that warms it up.

    Whatever else the machine does can only add to it.
    """
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - begin)
    return 1e3 * min(times)


def target_pass_ms(target: Target, nodes: int, batch: int = 1) -> float:
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

        def once(_, tokens):
            features, _, _ = model(tokens, positions, visible, caches)
            return jnp.argmax(model.head(features), axis=-1).astype(jnp.int32)

        return jax.lax.fori_loop(0, LOOP, once, tokens)

    tokens = jnp.zeros((batch, nodes), jnp.int32)
    return fastest_ms(lambda: run(leaves, caches, tokens)) / LOOP


def draft_ms(target: Target, drafter: LoadedDrafter, shape: TreeShape, batch: int = 1) -> float:
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

        def once(_, carry):
            state, root = carry
            tree = module.propose(state, root, length, draw, shape)
            tokens = tree.tokens[:, :levels]
            state = module.observe(state, tokens, features, length, jnp.full(batch, levels))
            return state, tree.tokens[:, -1]

        return jax.lax.fori_loop(0, LOOP, once, (state, root))

    width = max(1, len(drafter.module.taps)) * target.config.hidden_size
    features = jnp.zeros((batch, levels, width), target.dtype)
    begin, root = drafter.module.init(batch, SLOTS), jnp.zeros(batch, jnp.int32)
    return fastest_ms(lambda: run(leaves, begin, root, features)) / LOOP


def cycle_ms(
    engines: Sequence[Engine], prompts: Sequence[Sequence[int]], repeats: int = 5
) -> list[float]:
    """One whole cycle of each engine within a greedy `generate` of 20 cycles and more, end of
    sequence ignored.

    The engines take turns and the fastest of `repeats` runs counts, so that a noisy moment does
    not decide between them; prefill is not timed.
    """
    room = engines[0].model.config.context - max(map(len, prompts))
    times: list[list[float]] = [[] for _ in engines]
    for _ in range(repeats + 1):
        for engine, found in zip(engines, times, strict=True):
            budget = min(20 * (engine.shape.depth + 1) + 1, room)
            state = engine.start(prompts, budget, Sampling(), [0] * len(prompts), ())
            jax.block_until_ready(state)
            begin = time.perf_counter()
            state = engine.run(state)
            cycles = int(state.passes.max())
            found.append((time.perf_counter() - begin) / cycles)
    return [1e3 * min(found[1:]) for found in times]


def cost_curve_ms(target: Target, nodes: Sequence[int]) -> dict[int, float]:
    """`target_pass_ms` by number of nodes."""
    return {count: target_pass_ms(target, count) for count in nodes}
