"""Features that the target computes while the head is fitted, kept for later epochs or not."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from eagle_jax.errors import InputError
from eagle_jax.nn.attention import Visible
from eagle_jax.target.transformer import Transformer
from train.corpus import Corpus
from train.data import Packed
from train.store import Store


class LiveCorpus(Corpus):
    """Runs packed rows through the target whenever they are asked for; nothing goes to disk."""

    def __init__(self, packed: Packed, store: Store, model: Transformer, taps: Sequence[int]):
        """Takes samples of a store, packed; the store's features are not read."""
        super().__init__(packed, store, model.config.hidden_size)
        graph, self._state = nnx.split(model)
        self._run = jax.jit(lambda *args: _signals(graph, tuple(taps), *args))

    def signals(self, rows: np.ndarray) -> jax.Array:
        packed = self.packed
        tokens = np.where(packed.source[rows] >= 0, self.tokens[packed.source[rows]], 0)
        return self._run(
            self._state, tokens.astype(np.int32), packed.position[rows], packed.document[rows]
        )


class FirstEpochCorpus(LiveCorpus):
    """Keeps the features of every packed row that was asked for, so that each is computed once.

    A row counts once its mark is written, which is after its values; a killed run goes on from the
    rows that are there.
    """

    def __init__(
        self,
        packed: Packed,
        store: Store,
        model: Transformer,
        taps: Sequence[int],
        folder: Path,
    ):
        """Opens or makes `rows.f16`, `rows.done` and `rows.json` in a folder.

        Raises:
          InputError: the folder holds rows of other text or taps.
        """
        super().__init__(packed, store, model, taps)
        folder.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256(np.ascontiguousarray(packed.source).tobytes())
        digest.update(store.tokens.tobytes() + repr(tuple(taps)).encode())
        note, name = folder / "rows.json", digest.hexdigest()
        known = note.is_file()
        if known and json.loads(note.read_text())["rows"] != name:
            raise InputError(f"{folder} holds features of other rows or taps; empty it first")
        width = (1 + len(taps)) * self.hidden
        mode = "r+" if known else "w+"
        self._values = np.memmap(
            folder / "rows.f16", np.float16, mode, shape=(*packed.source.shape, width)
        )
        self._done = np.memmap(folder / "rows.done", np.uint8, mode, shape=len(packed))
        note.write_text(json.dumps({"rows": name}))

    def signals(self, rows: np.ndarray) -> np.ndarray:
        new = rows[self._done[rows] == 0]
        if len(new):
            self._values[new] = np.asarray(super().signals(new), np.float16)
            self._values.flush()
            self._done[new] = 1
            self._done.flush()
        return self._values[rows].astype(np.float32)


def _signals(graph, taps, state, tokens, position, document) -> jax.Array:
    """`[B, T, (1 + len(taps)) * hidden]` float32: features, then taps; 0 in padding."""
    model = nnx.merge(graph, state)
    at = jnp.arange(tokens.shape[1])
    real = document >= 0
    own = (document[:, :, None] == document[:, None, :]) & (at[:, None] >= at)
    visible = Visible(length=jnp.zeros(len(tokens), jnp.int32), fresh=own)
    features, tapped, _ = model(tokens, position, visible, None, taps)
    signals = jnp.concatenate([features, tapped], axis=-1).astype(jnp.float32)
    return jnp.where(real[..., None], signals, 0.0)
