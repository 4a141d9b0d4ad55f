"""A training run: its folder, its target, and what there is to train on."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from eagle_jax.config import default_taps
from eagle_jax.errors import InputError
from eagle_jax.target.load import Target, load_target
from train.corpus import Corpus
from train.data import Sample, pack, read_answers
from train.features import extract
from train.live import FirstEpochCorpus, LiveCorpus
from train.shelf import shards
from train.store import Store, join, lay_out, open_shelf


@dataclasses.dataclass
class Run:
    """A training folder and how it was asked for; the folder holds `prompts.jsonl`, `answers/`,
    `features/`, `fit/`, `head/`, `evaluation.json` and `export/`."""

    options: argparse.Namespace
    console: Console = dataclasses.field(default_factory=lambda: Console(highlight=False))

    @functools.cached_property
    def target(self) -> Target:
        return load_target(self.options.target)

    @property
    def taps(self) -> tuple[int, ...]:
        """What is recorded: taps for either kind of head."""
        return default_taps(self.target.config.num_layers)

    @property
    def cached(self) -> bool:
        """Whether features are computed before the fit, and lie on disk token by token."""
        return self.options.features == "cached"

    @property
    def width(self) -> int:
        """Values of a token that are recorded with its answer."""
        return 0 if not self.cached else (1 + len(self.taps)) * self.target.config.hidden_size

    def path(self, name: str) -> Path:
        return self.options.out / name

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    @contextmanager
    def bar(self, title: str) -> Iterator[Callable[[int, int], None]]:
        """A progress bar; the function that it gives takes (done, in all)."""
        columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self.console) as progress:
            task = progress.add_task(title, total=None)
            yield lambda done, of: progress.update(task, completed=done, total=of)


def given(run: Run) -> list[Sample]:
    options = run.options
    return read_answers(options.answers, run.target.config.vocab_size, options.max_length)


def open_store(run: Run) -> Store:
    """Everything there is to train on: given answers, and those that the target wrote here."""
    stores, options = [], run.options
    if options.answers:
        samples = given(run)
        if run.cached:
            found = extract(run.target.model, samples, run.path("features"), run.taps)
        else:
            found = np.zeros((sum(len(sample.tokens) for sample in samples), 0), np.float16)
        stores.append(lay_out(samples, found))
    if shards(run.path("answers")):
        vocab = run.target.config.vocab_size
        stores.append(open_shelf(run.path("answers"), vocab, options.max_length, run.width))
    if not stores:
        raise InputError(
            f"no answers in {run.path('answers')}; run the stage `answers` first, or give some "
            "with --answers"
        )
    store = join(stores)
    if len(store.samples) < 2:
        raise InputError("training needs at least two conversations")
    return store


def split(samples: list[Sample], seed: int, share: float = 0.03) -> tuple[np.ndarray, np.ndarray]:
    """Splits at random: indices to train on, and a share of indices held out, at least one."""
    order = np.random.default_rng(seed).permutation(len(samples))
    count = max(1, int(share * len(samples)))
    return np.sort(order[count:]), np.sort(order[:count])


def corpus_of(run: Run, store: Store, chosen, prompt_weight: float) -> Corpus:
    """Packed rows of the chosen samples, and their features by way of `--features`."""
    options, model = run.options, run.target.model
    packed = pack(store.samples, options.max_length, prompt_weight, run.target.eos, chosen)
    if run.cached:
        return Corpus(packed, store, model.config.hidden_size)
    if options.features == "live":
        return LiveCorpus(packed, store, model, run.taps)
    kept = (
        run.path("features")
        / f"rows-{hashlib.sha256(np.asarray(chosen).tobytes()).hexdigest()[:8]}"
    )
    return FirstEpochCorpus(packed, store, model, run.taps, kept)
