"""Training text with the target's features of it: from shelves of answers, or computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from eagle_jax.errors import FormatError
from train.data import Sample, read_answers
from train.shelf import shards


class Rows(Protocol):
    """`[N, width]` float16, read by integer arrays."""

    shape: tuple[int, int]

    def __len__(self) -> int: ...

    def __getitem__(self, rows: np.ndarray) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class Store:
    """Samples and what the target computed over them.

    Attributes:
      samples: each with its `start` in the arrays.
      tokens: `[N]` int32 of all conversations, one after the other.
      features: `[N, (1 + len(taps)) * hidden]` float16 of all tokens.
    """

    samples: list[Sample]
    tokens: np.ndarray
    features: Rows


class Joined:
    """Arrays of rows, on disk or not, that are read as one."""

    def __init__(self, parts: Sequence[Rows]):
        self.parts = list(parts)
        self.starts = np.cumsum([0] + [len(part) for part in self.parts])
        self.shape = (int(self.starts[-1]), self.parts[0].shape[1])

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        rows = np.asarray(rows)
        out = np.empty((*rows.shape, self.shape[1]), np.float16)
        owner = np.searchsorted(self.starts, rows, side="right") - 1
        for number, part in enumerate(self.parts):
            mine = owner == number
            out[mine] = part[rows[mine] - self.starts[number]]
        return out


def lay_out(samples: Sequence[Sample], features: np.ndarray) -> Store:
    """A store of samples whose features follow one another without gaps, as `extract` writes."""
    starts = np.cumsum([0] + [len(sample.tokens) for sample in samples])
    placed = [
        dataclasses.replace(sample, start=int(start))
        for sample, start in zip(samples, starts[:-1], strict=True)
    ]
    tokens = np.concatenate([sample.tokens for sample in samples])
    return Store(placed, tokens, features)


def open_shelf(folder: Path, vocab_size: int, max_length: int, width: int) -> Store:
    """The answers and features that `write_answers` left in a folder.

    Raises:
      FormatError: two files do not belong together.
    """
    return join([_open_shard(*of, vocab_size, max_length, width) for of in shards(folder)])


def _open_shard(lines: Path, data: Path, vocab_size: int, max_length: int, width: int) -> Store:
    whole = read_answers([lines], vocab_size, np.iinfo(np.int32).max, all=True)
    count = sum(len(sample.tokens) for sample in whole)
    found = data.stat().st_size if data.is_file() else 0
    if found != count * width * 2:
        raise FormatError(
            f"{data}: expected {count} tokens of {width} values ({count * width * 2} bytes), found "
            f"{found} bytes; were the answers written with other --taps?"
        )
    values = np.zeros((count, 0), np.float16)  # an empty file cannot be mapped
    if found:
        values = np.memmap(data, np.float16, "r", shape=(count, width))
    store = lay_out(whole, values)
    cut = [
        dataclasses.replace(
            sample,
            tokens=sample.tokens[:max_length],
            cut=max(0, len(sample.tokens) - max_length),
        )
        for sample in store.samples
        if len(sample.tokens[:max_length]) >= sample.answer_start + 2
    ]
    return Store(cut, store.tokens, store.features)


def join(stores: Sequence[Store]) -> Store:
    """Several stores as one."""
    if len(stores) == 1:
        return stores[0]
    features = Joined([store.features for store in stores])
    samples = [
        dataclasses.replace(sample, start=sample.start + int(start))
        for store, start in zip(stores, features.starts[:-1], strict=True)
        for sample in store.samples
    ]
    return Store(samples, np.concatenate([store.tokens for store in stores]), features)
