"""The target's own answers, decoded in a batch whose rows are refilled as they finish."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from eagle_jax.config import PLAIN, Sampling
from eagle_jax.decode.engine import Engine
from eagle_jax.drafters.none import NoDrafter
from eagle_jax.target.load import Target
from train.record import Recorder
from train.shelf import Shelf


@dataclasses.dataclass(frozen=True)
class Question:
    """A prompt as token ids, and how it is to be answered."""

    id: str
    prompt: tuple[int, ...]
    temperature: float
    seed: int


@dataclasses.dataclass(frozen=True)
class Answered:
    """An answer.

    Attributes:
      out: `[T]` token ids that the target wrote, the end of sequence included.
      signals: `[prompt + T - 1, width]` float16: features and taps of all tokens but the last,
        which was drawn and never run; a width of 0 where they are not recorded.
    """

    question: Question
    out: list[int]
    signals: np.ndarray


def answer(
    target: Target,
    questions: Sequence[Question],
    taps: Sequence[int] | None,
    max_new_tokens: int,
    rows: int = 64,
    refill: int = 8,
) -> Iterator[Answered]:
    """Answers all questions of one temperature, in no certain order.

    Args:
      taps: layers whose input is recorded beside the features; None records nothing.
      rows: of the batch.
      refill: rows that finish before new ones take their places.
    """
    recorder = NoDrafter() if taps is None else Recorder(target.model, taps)
    engine = Engine(target.model, recorder, PLAIN)
    sampling = Sampling(questions[0].temperature)
    # Neighbours of like length share a prefill; sorted from long to short, so that a lack of memory
    # shows at once.
    waiting = sorted(questions, key=lambda q: len(q.prompt))
    slots = engine.slots(len(waiting[-1].prompt), max_new_tokens)

    def start(part: Sequence[Question], size: int):
        part = [*part, *[part[0]] * (size - len(part))]
        return engine.start(
            [q.prompt for q in part],
            max_new_tokens,
            sampling,
            [q.seed for q in part],
            target.eos,
            slots,
        )

    def take(count: int) -> list[Question]:
        return [waiting.pop() for _ in range(min(count, len(waiting)))]

    rows = max(1, min(rows, len(waiting)))
    refill = min(refill, rows)
    first = take(rows)
    seats: list[Question | None] = [*first, *[None] * (rows - len(first))]
    state = start(first, rows)
    while any(seats):
        idle = sum(seat is None for seat in seats)
        state = engine.run(state, min(rows, idle + (refill if waiting else rows)))
        finished = [r for r in np.flatnonzero(np.asarray(state.done)) if seats[r]]
        tokens, length = np.asarray(state.tokens), np.asarray(state.length)
        for row in finished:
            question = seats[row]
            out = tokens[row, len(question.prompt) : length[row] + 1].tolist()
            signals = np.zeros((length[row], 0), np.float16)
            if taps is not None:
                signals = np.asarray(state.drafter[row, : length[row]])
            yield Answered(question, out, signals)
            seats[row] = None
        while waiting and (free := [r for r, seat in enumerate(seats) if seat is None]):
            new = take(min(refill, len(free)))
            at = free[: len(new)]
            for row, question in zip(at, new, strict=True):
                seats[row] = question
            # Row numbers beyond the batch leave out the copies that fill a prefill up.
            numbers = at + [rows] * (refill - len(at))
            state = engine.insert(state, numbers, start(new, refill))


def _alike(questions: Sequence[Question]) -> list[list[Question]]:
    """Groups of one temperature and like length: a batch has the cache of its longest row."""
    groups = collections.defaultdict(list)
    for question in questions:
        size = max(0, math.ceil(math.log(len(question.prompt) / 96, 4)))
        groups[question.temperature, size].append(question)
    return [groups[name] for name in sorted(groups)]


def write_answers(
    target: Target,
    questions: Sequence[Question],
    folder: Path,
    taps: Sequence[int] | None,
    max_new_tokens: int,
    progress: Callable[[int, int, int], None] = lambda done, of, tokens: None,
    **batch: int,
) -> None:
    """Answers the questions that `folder` does not hold yet; see `Shelf`.

    `progress` is called with (rows done, rows in all, tokens on the shelf); `batch` are the
    options `rows` and `refill` of `answer`.
    """
    width = 0 if taps is None else (1 + len(taps)) * target.config.hidden_size
    shelf = Shelf(folder, width)
    left = [q for q in questions if q.id not in shelf.done]
    for part in _alike(left):
        for answered in answer(target, part, taps, max_new_tokens, **batch):
            question, out, signals = answered.question, answered.out, answered.signals
            if out[-1] in target.eos:
                # No head predicts from it, and it was never run.
                signals = np.pad(signals, ((0, 1), (0, 0)))
            else:
                out = out[:-1]
            row = {"id": question.id, "prompt": list(question.prompt), "out": out}
            shelf.add(row | {"temp": question.temperature}, signals)
            progress(len(shelf.done), len(questions), shelf.tokens)
