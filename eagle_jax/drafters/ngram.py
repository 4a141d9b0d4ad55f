"""Prompt lookup: drafts are what followed earlier places that read like the end of the text.

No weights are needed. As in Saxena 2023 (prompt-lookup-decoding, github.com/apoorvumang) the
longest match counts most and the latest among equals, but several places speak at once: what they
agree on forms a tree, as in SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx, struct

from eagle_jax.config import TreeShape
from eagle_jax.errors import InputError
from eagle_jax.sampling import Draw
from eagle_jax.tree import Candidates, DraftTree, prune

# Probability that the token after the latest of the longest matches comes next, by the match's
# length: 700 greedy answers of SmolLM2-135M-Instruct, 72,000 places. What follows a guess is as
# probable as if the match had been longer by the guess: two tokens after a match of 2 were right in
# 32 % of the cases, and 0.52 * 0.62 = 0.32.
CONFIDENCE = (0.0, 0.21, 0.52, 0.62, 0.71, 0.74, 0.80, 0.81, 0.94)
LONGEST = len(CONFIDENCE) - 1  # longer matches count as this
PLACES = 8  # the best matches, which the tree is made of
SHARE = 4.0  # a match weighs so many times what one shorter by a token weighs

_FILLER = -1e30  # score of a node that guesses nothing; above that of a node that may not be there


@struct.dataclass
class NgramState:
    """The text so far.

    Attributes:
      tokens: `[B, W]` int32; the first `known` are the committed tokens and the pending root.
      known: `[B]` int32.
    """

    tokens: jax.Array
    known: jax.Array


class NgramDrafter(nnx.Module):
    """Drafts what followed the longest matches of the text's last tokens in the text itself."""

    method, taps = "ngram", ()

    def __init__(self, vocab_size: int, shortest: int = 1):
        """Takes the target's vocabulary, and the tokens that a match must have at least."""
        self.vocab_size, self.shortest = vocab_size, shortest

    def init(self, batch: int, length: int) -> NgramState:
        """The state before any token, for `length` committed tokens and the root."""
        tokens = jnp.zeros((batch, length + 1), jnp.int32)
        return NgramState(tokens, jnp.zeros(batch, jnp.int32))

    def begin(self, state: NgramState, first: jax.Array, fresh: jax.Array) -> NgramState:
        """Reads the first token `[B]` of the rows that are `fresh` `[B]`."""
        first = jnp.where(fresh, first, state.tokens[:, 0])
        tokens = state.tokens.at[:, 0].set(first)
        return NgramState(tokens, jnp.where(fresh, 1, state.known))

    def observe(
        self,
        state: NgramState,
        tokens: jax.Array,
        features: jax.Array,
        length: jax.Array,
        count: jax.Array,
    ) -> NgramState:
        """Reads new tokens; see `FeatureDrafter`. The target's features are not used."""
        write = jax.vmap(lambda into, new, at: jax.lax.dynamic_update_slice(into, new, (at,)))
        return NgramState(write(state.tokens, tokens, length + 1), length + 1 + count)

    def promise(self, state: NgramState, draw: Draw) -> jax.Array:
        """The probability `[B]` of the best first draft, by `CONFIDENCE`."""
        [(scores, _, _), *_] = self.candidates(state, 1, 1)
        return jnp.exp(scores.max(axis=1))

    def propose(
        self, state: NgramState, root: jax.Array, length: jax.Array, draw: Draw, shape: TreeShape
    ) -> DraftTree:
        """A tree of the best continuations.

        Nodes that no match has a guess for hang on the root with tokens of no meaning, whatever
        `top_k` is.

        Raises:
          InputError: the vocabulary is too small to fill the tree.
        """
        pool = self.candidates(state, shape.depth, shape.top_k)
        spare = shape.nodes - 1
        choice = PLACES + spare  # one of these ids for each spare node is not among the guesses
        if choice > self.vocab_size:
            raise InputError(
                f"a tree of {shape.nodes} nodes is too large for the n-gram drafter on a "
                f"vocabulary of {self.vocab_size}; use {self.vocab_size - PLACES + 1} at most"
            )
        scores, guesses, _ = pool[0]
        guesses = jnp.where(scores == -jnp.inf, -1, guesses)
        taken = (guesses[:, :, None] == jnp.arange(choice)).any(axis=1)
        fillers = jnp.argsort(taken, axis=1, stable=True)[:, :spare].astype(jnp.int32)
        pool.append((jnp.full(fillers.shape, _FILLER), fillers, jnp.full_like(fillers, -1)))
        return prune(root, pool, shape)

    def candidates(self, state: NgramState, depth: int, top_k: int) -> list[Candidates]:
        """What the best matches go on with, level by level, merged where they agree.

        A match that ends near the end of the text goes on as if the text repeated itself.

        Returns:
          `PLACES` candidates a level, as `prune` takes them. A candidate that is another's double,
          follows no match, or ranks below the `top_k` best of its siblings has the score -inf.
        """
        lengths, at = self._matches(state)
        end = state.known[:, None] - 1
        found = lengths >= self.shortest
        ahead = jnp.arange(depth)
        period = jnp.maximum(end - at, 1)
        index = at[..., None] + 1 + ahead % period[..., None]
        tokens = jnp.take_along_axis(state.tokens, index.reshape(len(index), -1), axis=1)
        tokens = tokens.reshape(index.shape)  # [B, PLACES, depth]
        weights = jnp.where(found, SHARE ** lengths.astype(jnp.float32), 0.0)
        weights = weights / jnp.maximum(weights.sum(axis=1, keepdims=True), 1e-30)
        table = jnp.asarray(CONFIDENCE)
        confidence = table[jnp.minimum(lengths[..., None] + ahead, LONGEST)].cumprod(axis=-1)

        rows = jnp.arange(PLACES)
        before = rows < rows[:, None]
        # Which places have gone on alike so far; the first of them stands for all.
        alike = found[:, :, None] & found[:, None, :]
        alive, first = found, jnp.zeros_like(lengths)
        pool = []
        for level in range(depth):
            parents = first + (level - 1) * PLACES if level else jnp.full_like(lengths, -1)
            alive = jnp.take_along_axis(alive, first, axis=1) if level else alive
            siblings, here = alike, tokens[:, :, level]
            alike = siblings & (here[:, :, None] == here[:, None, :])
            first = jnp.argmax(alike, axis=2).astype(jnp.int32)
            single = found & (first == rows)
            scores = (alike * (weights * confidence[:, :, level])[:, None, :]).sum(axis=2)
            better = (scores[:, None, :] > scores[:, :, None]) | (
                (scores[:, None, :] == scores[:, :, None]) & before
            )
            rank = (siblings & single[:, None, :] & better).sum(axis=2)
            alive = alive & single & (rank < top_k)
            pool.append((jnp.where(alive, jnp.log(scores), -jnp.inf), here, parents))
        return pool

    def _matches(self, state: NgramState) -> tuple[jax.Array, jax.Array]:
        """The best places: their match's length and last token's index, both `[B, PLACES]` int32,
        the longest first and the latest among equals; length 0 is no match."""
        tokens, end = state.tokens, state.known[:, None] - 1
        columns = jnp.arange(tokens.shape[1])
        going = columns < end
        lengths = jnp.zeros(tokens.shape, jnp.int32)
        for back in range(LONGEST):
            last = jnp.take_along_axis(tokens, jnp.maximum(end - back, 0), axis=1)
            going = going & (jnp.roll(tokens, back, axis=1) == last) & (columns >= back)
            lengths = lengths + going
        # In float32, which top_k is fast on, and exact: the numbers stay below 2 ** 24.
        order = (lengths * tokens.shape[1] + columns).astype(jnp.float32)
        _, at = jax.lax.top_k(order, PLACES)
        return jnp.take_along_axis(lengths, at, axis=1), at.astype(jnp.int32)
