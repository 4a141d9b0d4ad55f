"""The protocol that every drafter follows, and what several of them share.

A drafter is an nnx module. Its state is a pytree whose leaves have the batch as first axis. A draft
can only cost speed: the target draws every token itself, whatever is proposed.
"""

from __future__ import annotations

from typing import Any, Protocol

import jax

from eagle_jax.config import TreeShape
from eagle_jax.sampling import Draw
from eagle_jax.tree import DraftTree, Expansion


class Drafter(Protocol):
    """See `FeatureDrafter` for the arguments' shapes.

    A drafter that reads the text from its first token on also has a method `begin`, see there.

    Attributes:
      method: its name.
      taps: layers of the target whose input it reads; where it names none, `observe` gets the
        target's features.
    """

    method: str
    taps: tuple[int, ...]

    def init(self, batch: int, length: int) -> Any:
        """The state before any token, with room for `length` committed tokens."""

    def observe(
        self,
        state: Any,
        tokens: jax.Array,
        features: jax.Array,
        length: jax.Array,
        count: jax.Array,
    ) -> Any:
        """Takes in committed tokens with the target's true features or taps.

        The tokens are those after each new row: the last one is the pending root.
        """

    def propose(
        self, state: Any, root: jax.Array, length: jax.Array, draw: Draw, shape: TreeShape
    ) -> DraftTree:
        """Proposes a tree of `shape.nodes` nodes with `root` as node 0."""

    def promise(self, state: Any, draw: Draw) -> jax.Array:
        """The probability `[B]` float32 that the drafter gives its best first draft: what it would
        promise to gain, before any work of proposing is done."""


def begin(drafter: Drafter, state: Any, first: jax.Array, fresh: jax.Array) -> Any:
    """Shows a drafter the first token of rows, which no call of `observe` brings.

    Args:
      first: `[B]` int32.
      fresh: `[B]` bool; the row begins now, other rows stay as they are.
    """
    own = getattr(drafter, "begin", None)
    return state if own is None else own(state, first, fresh)


def expand(
    logits: jax.Array,
    draw: Draw,
    depth: int,
    *,
    ids: jax.Array | None = None,
    coupled: bool = True,
) -> Expansion:
    """Scores of children from a drafter's own logits.

    Args:
      logits: `[B, N, V]` float32.
      depth: how far below the root's children they are.
      ids: `[V]` int32 token of each column, None for all tokens in order.
      coupled: the noise that the target draws with takes part.
    """
    scores = draw.perturb(logits, depth, ids) if coupled else draw.process(logits)
    return Expansion(jax.nn.log_softmax(scores), ids)
