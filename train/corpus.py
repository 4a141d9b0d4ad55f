"""Packed rows with what the target computed over them, batch by batch."""

from __future__ import annotations

import jax
import numpy as np

from train.data import Packed
from train.loss import Batch
from train.store import Store


class Corpus:
    """Packed rows with their tokens and the target's features and taps; gives batches."""

    def __init__(self, packed: Packed, store: Store, hidden: int):
        """Takes samples of a store, packed, for a target of `hidden` size."""
        self.packed, self.hidden = packed, hidden
        self.tokens, self.features = store.tokens, store.features

    def __len__(self) -> int:
        return len(self.packed)

    def tap_scale(self, positions: int = 4096) -> np.ndarray:
        """`[len(taps) * hidden]` factors that bring every tap to the size of the last one.

        Sizes are medians over positions, since attention sinks are a hundred times larger.
        """
        rows = np.arange(min(len(self), -(-positions // self.packed.source.shape[1])))
        real = self.packed.source[rows] >= 0
        taps = np.asarray(self.signals(rows))[real][:, self.hidden :]
        count = taps.shape[1] // self.hidden
        taps = taps.astype(np.float32).reshape(len(taps), count, self.hidden)
        size = np.median(np.sqrt((taps**2).mean(axis=2)), axis=0)
        return np.repeat(size[-1:] / np.maximum(size, 1e-6), self.hidden).astype(np.float32)

    def signals(self, rows: np.ndarray) -> np.ndarray | jax.Array:
        """`[B, T, (1 + len(taps)) * hidden]` float32: features and taps of packed rows `[B]`, 0
        where they are padding."""
        source = self.packed.source[rows]
        values = self.features[np.maximum(source, 0)].astype(np.float32)
        values[source < 0] = 0
        return values

    def batch(self, rows: np.ndarray) -> Batch:
        source, signals = self.packed.source[rows], self.signals(rows)
        tokens = np.where(source >= 0, self.tokens[np.maximum(source, 0)], 0)
        return Batch(
            tokens=tokens.astype(np.int32),
            features=signals[..., : self.hidden],
            taps=signals[..., self.hidden :],
            document=self.packed.document[rows],
            position=self.packed.position[rows],
            weight=self.packed.weight[rows],
        )
