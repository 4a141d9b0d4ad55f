"""The protocol that every drafter follows.

A drafter is an nnx module. Its state is a pytree whose leaves have the batch as first axis. A draft
can only cost speed: the target draws every token itself, whatever is proposed.
"""

from __future__ import annotations

from typing import Any, Protocol

import jax

from eagle_jax.config import TreeShape
from eagle_jax.sampling import Draw
from eagle_jax.tree import DraftTree


class Drafter(Protocol):
    """See `FeatureDrafter` for the arguments' shapes.

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
        """Takes in committed tokens with the target's true features or taps."""

    def propose(
        self, state: Any, root: jax.Array, length: jax.Array, draw: Draw, shape: TreeShape
    ) -> DraftTree:
        """Proposes a tree of `shape.nodes` nodes with `root` as node 0."""

    def promise(self, state: Any, draw: Draw) -> jax.Array:
        """The probability `[B]` float32 that the drafter gives its best first draft: what it would
        promise to gain, before any work of proposing is done."""
