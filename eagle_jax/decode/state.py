"""The state of a batch between two decode cycles."""

from __future__ import annotations

from typing import Any

import jax
from flax import struct

from eagle_jax.nn.attention import LayerCache
from eagle_jax.sampling import Sampler


@struct.dataclass
class DecodeState:
    """All rows of a batch are independent. W slots, D levels below a tree's root.

    Attributes:
      tokens: `[B, W]` int32; 0..length-1 are committed, entry `length` is the pending root (drawn,
        part of the answer, not yet in the caches); the rest is undefined.
      drafted: `[B, W]` bool; the token was an accepted draft.
      length: `[B]` int32 committed tokens: rows in the target's and the drafter's cache.
      limit: `[B]` int32 prompt length plus budget; no token is written at or past it.
      done: `[B]` bool.
      stops: `[B, M]` int32 token ids that end a row's answer, padded with -1.
      passes: `[B]` int32 target passes that the row took part in, prefill excluded.
      speculated: `[B]` int32 those of them that verified drafts.
      accepted: `[B, D]` int32; entry d counts passes that accepted more than d drafts.
      sampler: the rows' sampling settings.
      caches: one a layer of the target, W slots each.
      drafter: the drafter's own state.
    """

    tokens: jax.Array
    drafted: jax.Array
    length: jax.Array
    limit: jax.Array
    done: jax.Array
    stops: jax.Array
    passes: jax.Array
    speculated: jax.Array
    accepted: jax.Array
    sampler: Sampler
    caches: tuple[LayerCache, ...]
    drafter: Any
