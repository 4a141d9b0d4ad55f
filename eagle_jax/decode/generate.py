"""`generate` and `stream`: text in, text out."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from eagle_jax.config import PLAIN, Sampling, TreeShape
from eagle_jax.decode.engine import Engine, check_prompts
from eagle_jax.decode.state import DecodeState
from eagle_jax.decode.tune import best_tree
from eagle_jax.drafters.load import LoadedDrafter
from eagle_jax.drafters.none import NoDrafter
from eagle_jax.errors import InputError
from eagle_jax.target.load import Target

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]

NO_DRAFTER = LoadedDrafter("none", NoDrafter())


@dataclasses.dataclass(frozen=True)
class Stats:
    """Figures of a run; prefill and compilation are excluded where not named.

    Attributes:
      tokens: tokens written, the first one (drawn by prefill) included.
      passes: target passes over a draft tree, summed over rows.
      tau: tokens committed per target pass, the bonus token included, prefill's excluded.
      speculated: those of them that verified drafts.
      acceptance_by_depth: share of these that accepted more than d drafts, d = 0, 1, ...
      prefill_seconds: wall time of prefill, with its compilation when there was one.
      seconds: wall time of the cycles, without their compilation.
      tokens_per_s: (tokens - rows) / seconds.
      shape: the tree.
      row_tokens, row_passes: the same by row.
      drafted: for each row, whether each written token was an accepted draft.
    """

    tokens: int
    passes: int
    speculated: int
    tau: float
    acceptance_by_depth: tuple[float, ...]
    prefill_seconds: float
    seconds: float
    tokens_per_s: float
    shape: TreeShape
    row_tokens: tuple[int, ...]
    row_passes: tuple[int, ...]
    drafted: tuple[tuple[bool, ...], ...]


class Generation(NamedTuple):
    """What `generate` returns: `texts` and `tokens` hold one answer a prompt."""

    texts: list[str]
    tokens: list[list[int]]
    stats: Stats


class Piece(NamedTuple):
    """One streamed token. `text` is empty while a character is incomplete."""

    row: int
    token: int
    text: str
    drafted: bool


def generate(
    target: Target,
    drafter: LoadedDrafter | None,
    prompts: Prompt | Sequence[Prompt],
    *,
    max_new_tokens: int = 128,
    sampling: Sampling | None = None,
    seed: int | Sequence[int] = 0,
    tree: TreeShape | None = None,
    stop_tokens: Sequence[int] = (),
    ignore_eos: bool = False,
    chat: bool = True,
) -> Generation:
    """Writes an answer to each prompt. The drafter never changes the answer, only the speed.

    Args:
      target: from `load_target`.
      drafter: from `load_drafter`, or None to decode plainly.
      prompts: one prompt or a list. A prompt is a text, a list of token ids, or a list of messages
        (`{"role": ..., "content": ...}`).
      max_new_tokens: budget of each row.
      sampling: None is greedy.
      seed: one for all rows, or one a row. Rows of one seed share their noise, so that a row's
        answer does not depend on its place in the batch.
      tree: None takes the tree that is fastest on this machine, see `best_tree`.
      stop_tokens: ids that end an answer besides the target's own end of sequence.
      ignore_eos: go on to the budget.
      chat: whether a text goes through the target's chat template, where it has one.

    Raises:
      InputError: see `Engine.start`; also a text without a tokenizer.
    """
    run = _Run(
        target,
        drafter,
        prompts,
        max_new_tokens,
        sampling,
        seed,
        tree,
        stop_tokens,
        ignore_eos,
        chat,
    )
    begin = time.perf_counter()
    state = run.start()
    jax.block_until_ready(state.length)
    prefill_seconds = time.perf_counter() - begin
    run.engine.compile_ahead(state)
    begin = time.perf_counter()
    state = run.engine.run(state)
    tokens = run.written(state)
    stats = run.stats(state, tokens, prefill_seconds, time.perf_counter() - begin)
    decode = target.tokenizer.decode if target.tokenizer else lambda ids: ""
    return Generation([decode(row) for row in tokens], tokens, stats)


def stream(
    target: Target, drafter: LoadedDrafter | None, prompts: Prompt | Sequence[Prompt], **options
) -> Iterator[Piece]:
    """Like `generate`, and takes the same options, but yields tokens as they are committed.

    Returns (as the generator's value) the run's `Stats`.
    """
    run = _Run(target, drafter, prompts, **options)

    def pieces():
        begin = time.perf_counter()
        state = run.start()
        jax.block_until_ready(state.length)
        prefill_seconds = time.perf_counter() - begin
        decoders = (
            [target.tokenizer.stream_decoder() for _ in run.ids] if target.tokenizer else None
        )
        sent, ready = [0] * len(run.ids), None
        while True:
            done = bool(state.done.all())
            written, drafted = run.written(state), np.asarray(state.drafted)
            finished = np.asarray(state.done)
            for row, tokens in enumerate(written):
                for index in range(sent[row], len(tokens)):
                    text = decoders[row].push(tokens[index]) if decoders else ""
                    if decoders and finished[row] and index == len(tokens) - 1:
                        text += decoders[row].flush()
                    flag = bool(drafted[row, len(run.ids[row]) + index])
                    yield Piece(row, tokens[index], text, flag)
                sent[row] = len(tokens)
            if done:
                now = time.perf_counter()
                return run.stats(state, written, prefill_seconds, now - (ready or now))
            if ready is None:  # the first token is out
                run.engine.compile_ahead(state, steps=True)
                ready = time.perf_counter()
            state = run.engine.step(state)

    return pieces()


class _Run:
    """The checked arguments of one call."""

    def __init__(
        self,
        target: Target,
        drafter: LoadedDrafter | None,
        prompts: Prompt | Sequence[Prompt],
        max_new_tokens: int = 128,
        sampling: Sampling | None = None,
        seed: int | Sequence[int] = 0,
        tree: TreeShape | None = None,
        stop_tokens: Sequence[int] = (),
        ignore_eos: bool = False,
        chat: bool = True,
    ):
        self.ids = [encode(target, prompt, chat) for prompt in as_list(prompts)]
        self.max_new_tokens = max_new_tokens
        self.sampling = sampling or Sampling()
        self.seeds = [seed] * len(self.ids) if isinstance(seed, int) else list(seed)
        if len(self.seeds) != len(self.ids):
            raise InputError(f"{len(self.ids)} prompts need as many seeds, got {len(self.seeds)}")
        self.stops = tuple(stop_tokens) + (() if ignore_eos else target.eos)
        check_prompts(self.ids, max_new_tokens, target.config.vocab_size, target.config.context)
        drafter = drafter or NO_DRAFTER
        if drafter.method == "none":
            tree = PLAIN
        elif tree is None:
            tree = best_tree(target, drafter, len(self.ids))
        if tree.nodes == 1:
            drafter = NO_DRAFTER
        self.engine = engine(target, drafter, tree)

    def start(self) -> DecodeState:
        return self.engine.start(
            self.ids, self.max_new_tokens, self.sampling, self.seeds, self.stops
        )

    def written(self, state: DecodeState) -> list[list[int]]:
        """The answer of each row so far, the pending root included."""
        tokens, length = np.asarray(state.tokens), np.asarray(state.length)
        return [
            tokens[row, len(ids) : length[row] + 1].tolist() for row, ids in enumerate(self.ids)
        ]

    def stats(self, state: DecodeState, tokens, prefill_seconds: float, seconds: float) -> Stats:
        passes, speculated = np.asarray(state.passes), int(np.asarray(state.speculated).sum())
        total, rows = sum(map(len, tokens)), len(tokens)
        drafted = np.asarray(state.drafted)
        return Stats(
            tokens=total,
            passes=int(passes.sum()),
            speculated=speculated,
            tau=(total - rows) / max(1, int(passes.sum())),
            acceptance_by_depth=tuple(
                (np.asarray(state.accepted).sum(axis=0) / max(1, speculated)).tolist()
            ),
            prefill_seconds=prefill_seconds,
            seconds=seconds,
            tokens_per_s=(total - rows) / seconds if seconds > 0 else 0.0,
            shape=self.engine.shape,
            row_tokens=tuple(map(len, tokens)),
            row_passes=tuple(passes.tolist()),
            drafted=tuple(
                tuple(drafted[row, len(ids) : len(ids) + len(tokens[row])].tolist())
                for row, ids in enumerate(self.ids)
            ),
        )


def engine(target: Target, drafter: LoadedDrafter, shape: TreeShape) -> Engine:
    """The engine of a target, a drafter and a tree; made once and kept with the target."""
    key = (drafter, shape)
    if key not in target.engines:
        target.engines[key] = Engine(target.model, drafter.module, shape)
    return target.engines[key]


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt becomes a list of one."""
    if isinstance(prompts, str):
        return [prompts]
    prompts = list(prompts)
    single = bool(prompts) and isinstance(prompts[0], (int, np.integer, Mapping))
    return [prompts] if single else prompts


def encode(target: Target, prompt: Prompt, chat: bool) -> list[int]:
    """Token ids of a prompt; see `generate`."""
    is_text = isinstance(prompt, str)
    is_chat = not is_text and len(prompt) > 0 and isinstance(prompt[0], Mapping)
    if not is_text and not is_chat:
        return [int(token) for token in prompt]
    if target.tokenizer is None:
        raise InputError("this target has no tokenizer; pass token ids instead of text")
    if is_chat or (chat and target.tokenizer.has_chat_template):
        return target.tokenizer.encode_chat(prompt)
    return target.tokenizer.encode(prompt)
