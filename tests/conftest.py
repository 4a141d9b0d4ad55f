"""Shared targets and recorded plain runs; compiled engines live with the target."""

from __future__ import annotations

import gc
import pathlib

import jax
import numpy as np
import pytest

from eagle_jax import generate
from eagle_jax.drafters.load import LoadedDrafter
from eagle_jax.drafters.replay import ReplayDrafter
from eagle_jax.tiny import tiny_drafter, tiny_target

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11] * 14]


@pytest.fixture(scope="session")
def target():
    return tiny_target()


@pytest.fixture(scope="session")
def drafter(target):
    return tiny_drafter(target, draft_vocab_size=40)


@pytest.fixture(scope="session")
def plain(target):
    """A plain greedy run of 24 tokens for each of PROMPTS."""
    return generate(target, None, PROMPTS, max_new_tokens=24)


def replay(target, prompts, tokens, offset=0):
    """A drafter that proposes the recorded answers, or with an offset always something else."""
    script = np.zeros((len(prompts), 96), np.int32)
    for row, (prompt, answer) in enumerate(zip(prompts, tokens, strict=True)):
        whole = [*prompt, *answer][:96]
        script[row, : len(whole)] = whole
    return LoadedDrafter("replay", ReplayDrafter(script, target.config.vocab_size, offset))


@pytest.fixture(scope="module", autouse=True)
def _few_memory_maps(target):
    """Forgets compiled programs between files before they use up the memory maps of the process.

    XLA keeps several maps for a program, Linux grants a process 65,530, and beyond them it aborts.
    """
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 15_000:
        target.engines.clear()
        jax.clear_caches()
        gc.collect()


@pytest.fixture(autouse=True)
def _exact_products():
    with jax.default_matmul_precision("highest"):
        yield
