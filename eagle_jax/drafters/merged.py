"""N-gram continuations as extra nodes in another drafter's tree, under the same budget."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, struct

from eagle_jax.config import TreeShape
from eagle_jax.drafters.base import Drafter, begin
from eagle_jax.drafters.ngram import NgramDrafter, NgramState
from eagle_jax.errors import InputError
from eagle_jax.sampling import Draw
from eagle_jax.tree import Candidates, DraftTree, prune

SHORTEST = 3  # tokens of a match that may take a node from the other drafter


@struct.dataclass
class MergedState:
    """The states of both drafters."""

    base: Any
    ngram: NgramState


class MergedDrafter(nnx.Module):
    """The best nodes of two trees by their log-probabilities.

    The n-gram drafter speaks only where its match is long; then what it is sure of takes the place
    of what the other drafter thinks least of. A path that both propose counts once, with the better
    of its two scores.
    """

    def __init__(self, base: Drafter, vocab_size: int):
        """Takes the drafter whose tree is added to, and the target's vocabulary."""
        self.base, self.ngram = base, NgramDrafter(vocab_size, SHORTEST)
        self.method, self.taps = f"{base.method}+{self.ngram.method}", base.taps

    @property
    def coupled(self) -> bool:
        """See `FeatureDrafter`; an n-gram has no probabilities that noise could move."""
        return self.base.coupled

    @coupled.setter
    def coupled(self, coupled: bool) -> None:
        self.base.coupled = coupled

    def init(self, batch: int, length: int) -> MergedState:
        """The state before any token, with room for `length` committed tokens."""
        return MergedState(self.base.init(batch, length), self.ngram.init(batch, length))

    def begin(self, state: MergedState, first: jax.Array, fresh: jax.Array) -> MergedState:
        """Reads the first token `[B]` of the rows that are `fresh` `[B]`."""
        base = begin(self.base, state.base, first, fresh)
        return MergedState(base, self.ngram.begin(state.ngram, first, fresh))

    def observe(
        self,
        state: MergedState,
        tokens: jax.Array,
        features: jax.Array,
        length: jax.Array,
        count: jax.Array,
    ) -> MergedState:
        """Takes in committed tokens; see `FeatureDrafter`."""
        return MergedState(
            self.base.observe(state.base, tokens, features, length, count),
            self.ngram.observe(state.ngram, tokens, features, length, count),
        )

    def promise(self, state: MergedState, draw: Draw) -> jax.Array:
        """The larger of both promises `[B]`."""
        return jnp.maximum(
            self.base.promise(state.base, draw), self.ngram.promise(state.ngram, draw)
        )

    def propose(
        self, state: MergedState, root: jax.Array, length: jax.Array, draw: Draw, shape: TreeShape
    ) -> DraftTree:
        """The best nodes of both trees, each of which keeps to `shape`.

        Raises:
          InputError: the other drafter's tree has no scores.
        """
        tree = self.base.propose(state.base, root, length, draw, shape)
        if tree.scores is None:
            raise InputError(
                f"the drafter {self.base.method!r} does not say how likely its drafts are, so that "
                "n-grams cannot be merged into its tree"
            )
        return merge(tree, self.ngram.candidates(state.ngram, shape.depth, shape.top_k), shape)


def merge(tree: DraftTree, levels: list[Candidates], shape: TreeShape) -> DraftTree:
    """The best nodes of a tree and of further candidates.

    Args:
      tree: N nodes with scores, a child's never above its parent's.
      levels: candidates by level, as `NgramDrafter.candidates` gives them.
      shape: of the result, and no less deep than either.
    """
    scores, parents = tree.scores[:, 1:], tree.parents[:, 1:] - 1
    extra: list[Candidates] = []
    # Numbers in the common pool: of the candidates one level above (the root's is -1), and of the
    # first candidate of the level.
    numbers = jnp.full((len(scores), 1), -1, jnp.int32)
    first = shape.nodes - 1
    for level, (own, tokens, above) in enumerate(levels):
        width = tokens.shape[1]
        within = jnp.maximum(above - max(level - 1, 0) * width, 0)
        parent = jnp.take_along_axis(numbers, within, axis=1)
        twin = parents[:, None, :] == parent[:, :, None]
        twin = twin & (tree.tokens[:, None, 1:] == tokens[:, :, None])
        known = twin.any(axis=2)
        # A path that both propose is the tree's, with the better score.
        lifted = jnp.where(twin, own[:, :, None], -jnp.inf).max(axis=1)
        scores = jnp.maximum(scores, lifted)
        extra.append((jnp.where(known, -jnp.inf, own), tokens, parent))
        fresh = first + jnp.arange(width, dtype=jnp.int32)
        numbers = jnp.where(known, jnp.argmax(twin, axis=2).astype(jnp.int32), fresh)
        first += width
    return prune(tree.tokens[:, 0], [(scores, tree.tokens[:, 1:], parents), *extra], shape)
