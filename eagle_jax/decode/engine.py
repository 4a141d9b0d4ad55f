"""Compiled programs of one target, one drafter and one tree."""

from __future__ import annotations

import collections
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from eagle_jax.config import Sampling, TreeShape
from eagle_jax.decode.cycle import cycle, prefill
from eagle_jax.decode.state import DecodeState
from eagle_jax.drafters.base import Drafter
from eagle_jax.errors import InputError
from eagle_jax.nn.cache import empty_cache
from eagle_jax.sampling import Sampler
from eagle_jax.target.transformer import Transformer


def largest_chunk() -> int:
    """Prompt tokens that a prefill step takes at most: bounds its memory and its programs.

    A CPU computes 128 as fast as more, and pads less; accelerators want long ones.
    """
    return 128 if jax.default_backend() == "cpu" else 512


def prompt_bucket(length: int) -> int:
    """The power of two that a prompt of `length` tokens is padded to, from 16 to the largest
    chunk."""
    return min(largest_chunk(), max(16, 1 << (length - 1).bit_length()))


def _padded(length: int) -> int:
    chunk = prompt_bucket(length)
    return -(-length // chunk) * chunk


def slot_bucket(length: int) -> int:
    """Cache slots for `length` tokens: the next power of two, or three quarters of it, from 64."""
    size = max(64, 1 << (length - 1).bit_length())
    return size * 3 // 4 if size > 64 and length <= size * 3 // 4 else size


class Engine:
    """Runs decode cycles. Networks are split once; programs take their leaves as arguments.

    Attributes:
      compilations: how often each program (`prefill`, `cycle`, `run`) was traced.
    """

    def __init__(self, model: Transformer, drafter: Drafter, shape: TreeShape):
        self.shape = shape
        self.model, self.drafter = model, drafter
        self.compilations: collections.Counter[str] = collections.Counter()
        graph, state = nnx.split((model, drafter))
        self._weights, structure = jax.tree.flatten(state)

        def program(name, body, donate=1):
            def traced(weights, state, *arguments):
                self.compilations[name] += 1
                networks = nnx.merge(graph, jax.tree.unflatten(structure, weights))
                return body(*networks, state, *arguments)

            return jax.jit(traced, donate_argnums=donate)

        def step(model, drafter, state):
            return cycle(model, drafter, state, shape)

        def run(model, drafter, state, enough):
            body = functools.partial(step, model, drafter)
            return jax.lax.while_loop(lambda state: state.done.sum() < enough, body, state)

        def promise(model, drafter, state):
            draw = state.sampler.draw(state.length + 1, 1, model.config.vocab_size)
            return drafter.promise(state.drafter, draw)

        self._promise = program("promise", promise, donate=())
        self._prefill = program("prefill", prefill)
        self._cycle = program("cycle", step)
        self._run = program("run", run)
        self._insert = jax.jit(_insert, donate_argnums=0)
        self._ready: dict[Any, Any] = {}

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampling: Sampling,
        seeds: Sequence[int],
        stops: Sequence[int],
        slots: int | None = None,
    ) -> DecodeState:
        """Prefills the prompts and draws each row's first token.

        `slots` sets the size of the caches, for rows that are to join a larger batch.

        Raises:
          InputError: an empty prompt, a token id outside the vocabulary, or a prompt and budget
            beyond the target's context or the slots.
        """
        config = self.model.config
        check_prompts(prompts, max_new_tokens, config.vocab_size, config.context)
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        longest = int(lengths.max())
        chunk, padded = prompt_bucket(longest), _padded(longest)
        needed = self.slots(longest, max_new_tokens)
        slots = needed if slots is None else slots
        if slots < needed:
            raise InputError(f"these prompts and budgets need {needed} cache slots, got {slots}")
        tokens = np.zeros((len(prompts), slots), np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
        state = self._empty(tokens, lengths + max_new_tokens, sampling, seeds, stops)
        shifted = np.roll(tokens, -1, axis=1)
        for at in range(0, padded, chunk):
            span = slice(at, at + chunk)
            count = np.clip(lengths - at, 0, chunk).astype(np.int32)
            final = (lengths > at) & (lengths <= at + chunk)
            state = self._prefill(
                self._weights, state, tokens[:, span], shifted[:, span], count, final
            )
        return state

    def slots(self, longest: int, max_new_tokens: int) -> int:
        """Cache slots for prompts of up to `longest` tokens and their answers."""
        return slot_bucket(max(_padded(longest), longest + max_new_tokens + self.shape.depth + 1))

    def step(self, state: DecodeState) -> DecodeState:
        """One cycle; the state given is donated."""
        return self._cycle(self._weights, state)

    def run(self, state: DecodeState, enough: int | None = None) -> DecodeState:
        """Cycles until `enough` rows are done (all of them by default), in one program.

        The state given is donated.
        """
        return self._run(self._weights, state, len(state.done) if enough is None else enough)

    def compile_ahead(self, state: DecodeState, *, steps: bool = False) -> Any:
        """Compiles `run` (or `step`) for a state, so that the first call's time is decoding time.

        Returns the compiled program, at once where states of the same shapes came before.
        """
        name = "cycle" if steps else "run"
        key = (name, state.tokens.shape, state.stops.shape, jax.tree.structure(state.sampler))
        if key not in self._ready:
            program, extra = (self._cycle, ()) if steps else (self._run, (len(state.done),))
            self._ready[key] = program.lower(self._weights, state, *extra).compile()
        return self._ready[key]

    def insert(self, state: DecodeState, rows: Sequence[int], other: DecodeState) -> DecodeState:
        """Puts the rows of `other` in the place of batch rows `rows` of `state`, which is donated.

        Both have the same slots and settings; a row number beyond the batch leaves its row out.
        """
        return self._insert(state, np.asarray(rows, np.int32), other)

    def promise(self, state: DecodeState) -> jax.Array:
        """`[B]` float32: what the drafter promises of its next first draft; see `Drafter`."""
        return self._promise(self._weights, state)

    def _empty(self, tokens, limit, sampling: Sampling, seeds, stops) -> DecodeState:
        batch, slots = tokens.shape
        ends = np.broadcast_to(np.array([*stops, -1], np.int32), (batch, len(stops) + 1))
        keys = [jax.random.key_data(jax.random.key(seed, impl="threefry2x32")) for seed in seeds]
        return DecodeState(
            tokens=jnp.asarray(tokens),
            drafted=jnp.zeros((batch, slots), bool),
            length=jnp.zeros(batch, jnp.int32),
            limit=jnp.asarray(limit, jnp.int32),
            done=jnp.zeros(batch, bool),
            stops=jnp.asarray(ends),
            passes=jnp.zeros(batch, jnp.int32),
            speculated=jnp.zeros(batch, jnp.int32),
            accepted=jnp.zeros((batch, self.shape.depth), jnp.int32),
            sampler=Sampler(
                key=jnp.stack(keys),
                temperature=jnp.full(batch, sampling.temperature, jnp.float32),
                top_k=jnp.full(batch, sampling.top_k, jnp.int32),
                top_p=jnp.full(batch, sampling.top_p, jnp.float32),
                sampled=not sampling.greedy,
                filtered=sampling.filtered,
            ),
            caches=empty_cache(self.model.config, batch, slots, self.model.embed[...].dtype),
            drafter=self.drafter.init(batch, slots),
        )


def _insert(state: DecodeState, rows: jax.Array, other: DecodeState) -> DecodeState:
    return jax.tree.map(lambda into, new: into.at[rows].set(new, mode="drop"), state, other)


def check_prompts(
    prompts: Sequence[Sequence[int]], max_new_tokens: int, vocab_size: int, context: int
) -> None:
    """Refuses what cannot be decoded; see `Engine.start`."""
    if not prompts:
        raise InputError("no prompts were given")
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    for row, prompt in enumerate(prompts):
        if not len(prompt):
            raise InputError(f"prompt {row} is empty; a prompt needs at least one token")
        if not 0 <= min(prompt) <= max(prompt) < vocab_size:
            raise InputError(f"prompt {row}: token ids must lie in [0, {vocab_size})")
        if len(prompt) + max_new_tokens > context:
            raise InputError(
                f"prompt {row} has {len(prompt)} tokens; with max_new_tokens={max_new_tokens} that "
                f"is {len(prompt) + max_new_tokens}, beyond the target's context of {context}. "
                "Shorten the prompt or lower max_new_tokens"
            )
