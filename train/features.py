"""The target's features of the training text, computed once and kept on disk."""

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
from train.data import Sample

ROWS_PER_BATCH = 4096


def extract(
    model: Transformer,
    samples: Sequence[Sample],
    folder: Path,
    taps: Sequence[int] = (),
    progress=None,
) -> np.memmap:
    """Writes the features and taps of every token of every sample, in the samples' order.

    A killed run goes on where it stopped. Padding goes to multiples of 32 tokens.

    Args:
      model: the target.
      samples: what to run through it.
      folder: receives `features.f16` and `progress.json`.
      taps: layers whose input is kept beside the features; see `Transformer`.
      progress: called with (positions done, positions in all).

    Returns:
      `[sum of lengths, (1 + len(taps)) * hidden]` float16, read-only: features, then taps.

    Raises:
      InputError: the folder holds features of other samples or taps.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lengths = np.array([len(s.tokens) for s in samples])
    starts = np.concatenate([[0], np.cumsum(lengths)])
    shape = (int(starts[-1]), (1 + len(taps)) * model.config.hidden_size)
    digest = hashlib.sha256(b"".join(s.tokens.tobytes() for s in samples))
    digest = digest.hexdigest() + "".join(f"-{tap}" for tap in taps)
    data, marker = folder / "features.f16", folder / "progress.json"
    done = 0
    if marker.is_file():
        state = json.loads(marker.read_text())
        if state["samples"] != digest:
            raise InputError(
                f"{folder} holds features of other samples or taps; choose an empty folder"
            )
        done = state["batches"]
    out = np.memmap(data, np.float16, "r+" if done else "w+", shape=shape)

    graph, state = nnx.split(model)
    forward = jax.jit(lambda state, *of: _features(graph, state, taps, *of))
    finished = 0
    for number, (width, members) in enumerate(_batches(lengths)):
        finished += int(lengths[members].sum())
        if number < done:
            continue
        tokens = np.zeros((max(1, ROWS_PER_BATCH // width), width), np.int32)
        for row, index in enumerate(members):
            tokens[row, : lengths[index]] = samples[index].tokens
        size = np.zeros(len(tokens), np.int32)
        size[: len(members)] = lengths[members]
        features = np.asarray(forward(state, tokens, size).astype(jnp.float16))
        for row, index in enumerate(members):
            out[starts[index] : starts[index + 1]] = features[row, : lengths[index]]
        out.flush()
        marker.write_text(json.dumps({"samples": digest, "batches": number + 1}))
        if progress:
            progress(finished, shape[0])
    return np.memmap(data, np.float16, "r", shape=shape)


def _batches(lengths: np.ndarray):
    """Yields (padded length, sample indices): samples of like length together."""
    widths = -(-lengths // 32) * 32
    for width in np.unique(widths):
        members, size = np.flatnonzero(widths == width), max(1, ROWS_PER_BATCH // int(width))
        for at in range(0, len(members), size):
            yield int(width), members[at : at + size]


def _features(graph, state, taps, tokens: jax.Array, length: jax.Array) -> jax.Array:
    model = nnx.merge(graph, state)
    at = jnp.arange(tokens.shape[1])
    fresh = (at[:, None] >= at) & (at < length[:, None, None])
    visible = Visible(length=jnp.zeros_like(length), fresh=fresh)
    positions = jnp.broadcast_to(at, tokens.shape)
    features, streams, _ = model(tokens, positions, visible, None, taps)
    return jnp.concatenate([features, streams], axis=-1)
