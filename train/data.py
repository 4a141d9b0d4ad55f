"""Training text: conversations as token ids, with the span that the target wrote."""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from eagle_jax.errors import FormatError, InputError


@dataclasses.dataclass(frozen=True)
class Sample:
    """One conversation.

    Attributes:
      tokens: `[T]` int32, prompt and answer.
      answer_start: index of the answer's first token.
      greedy: the target wrote the answer at temperature 0.
      start: where its tokens and features lie in their store.
      cut: tokens of the conversation that were left out at its end.
    """

    tokens: np.ndarray
    answer_start: int
    greedy: bool = False
    start: int = 0
    cut: int = 0


def read_answers(
    paths: Sequence[Path], vocab_size: int, max_length: int, all: bool = False
) -> list[Sample]:
    """Reads JSON lines with the fields `prompt` and `out` (token ids); `.gz` is unpacked.

    Conversations longer than max_length are cut; those too short to learn from, or whose prompt
    alone fills it, are left out, unless `all` are asked for.

    Raises:
      InputError: a file is missing or holds no usable row.
      FormatError: a line is not such an object, or a token id is outside the vocabulary.
    """
    samples = []
    for path in paths:
        if not path.is_file():
            raise InputError(f"no such file of answers: {path}")
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    row = json.loads(line)
                    prompt, out = list(row["prompt"]), list(row["out"])
                    tokens = np.asarray((prompt + out)[:max_length], np.int32)
                except (ValueError, KeyError, TypeError) as error:
                    raise FormatError(
                        f"{path}, line {number}: expected an object with `prompt` and `out` "
                        f"as lists of token ids ({type(error).__name__}: {error})"
                    ) from error
                if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocab_size:
                    raise FormatError(
                        f"{path}, line {number}: token ids must lie in [0, {vocab_size})"
                    )
                if all or (len(tokens) >= len(prompt) + 2 and prompt):
                    cut = len(prompt) + len(out) - len(tokens)
                    greedy = row.get("temp") == 0
                    samples.append(Sample(tokens, len(prompt), greedy, cut=cut))
    if not samples:
        raise InputError(f"no usable answers in {[str(p) for p in paths]}")
    return samples


def draft_vocabulary(samples: Sequence[Sample], vocab_size: int, size: int) -> np.ndarray:
    """The `size` ids that answers use most, ascending; ties and unused ids go by id.

    Returns:
      `[size]` int32.
    """
    if not 1 <= size <= vocab_size:
        raise InputError(f"the draft vocabulary must hold 1 to {vocab_size} ids, got {size}")
    counts = np.zeros(vocab_size, np.int64)
    for sample in samples:
        np.add.at(counts, sample.tokens[sample.answer_start :], 1)
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Packed:
    """Documents packed into rows of one length, which attend only within themselves.

    Attributes:
      source: `[R, T]` index of each slot's token in the samples' store; -1 is padding.
      document: `[R, T]` number of the document within its row; -1 is padding.
      position: `[R, T]` position within the document.
      weight: `[R, T]` weight of the prediction made at the slot.
    """

    source: np.ndarray
    document: np.ndarray
    position: np.ndarray
    weight: np.ndarray

    def __len__(self) -> int:
        return len(self.source)


def pack(
    samples: Sequence[Sample],
    length: int,
    prompt_weight: float,
    eos: Sequence[int],
    chosen: Sequence[int] | None = None,
) -> Packed:
    """Packs samples (those of the indices `chosen`, or all) into rows of `length`.

    Each goes into the fullest row that still holds it.

    Row t of a document holds (feature t, token t + 1) and predicts feature t + 1, from which token
    t + 2 is drawn. It weighs 1 where token t + 1 belongs to the answer (the drafter's first use is
    the row that holds the answer's first token), prompt_weight before, and 0 where nothing can be
    predicted: at the last two positions, and after the end of sequence.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    chosen = range(len(samples)) if chosen is None else chosen
    for index in sorted(chosen, key=lambda i: -len(samples[i].tokens)):
        need = len(samples[index].tokens)
        if need > length:
            raise InputError(f"a sample of {need} tokens does not fit rows of {length}")
        fitting = [r for r in range(max(0, len(rows) - 200), len(rows)) if room[r] >= need]
        if fitting:
            row = min(fitting, key=lambda r: room[r])
        else:
            row = len(rows)
            rows.append([])
            room.append(length)
        rows[row].append(index)
        room[row] -= need
    shape = (len(rows), length)
    source, document = np.full(shape, -1, np.int64), np.full(shape, -1, np.int32)
    position, weight = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    for row, members in enumerate(rows):
        at = 0
        for number, index in enumerate(members):
            tokens, start = samples[index].tokens, samples[index].answer_start
            size = len(tokens)
            span = slice(at, at + size)
            source[row, span] = samples[index].start + np.arange(size)
            document[row, span] = number
            position[row, span] = np.arange(size)
            w = np.where(np.arange(size) + 1 >= start, 1.0, prompt_weight)
            ended = np.isin(tokens[1:], eos) & (np.arange(1, size) >= start)
            w[:-1][ended] = 0.0
            w[-1] = 0.0
            weight[row, span] = w
            at += size
    return Packed(source, document, position, weight)
