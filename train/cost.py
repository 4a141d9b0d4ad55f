"""The arithmetic of a fit: how many operations a step takes, and how many the machine can do."""

from __future__ import annotations

import math
import statistics
import time

import jax
import jax.numpy as jnp

from eagle_jax.drafters.feature import Head
from eagle_jax.nn.modules import parameters
from train.loss import Objective
from train.plan import FitConfig, Plan

EXPECTED = 0.5  # of the matrix throughput that a fit is expected to reach


def step_flops(head: Head, config: FitConfig, goal: Objective, rows: int, length: int) -> float:
    """Floating point operations of the matrix products of one optimiser step.

    A product of a weight with n elements costs 2n operations a position forward, and 4n backward
    (for the weight and for what it reads); 2n backward where the weight is the target's. Every
    unrolled step goes through the layer and the LM head once; `fc` and the teacher's logits are
    computed once. Attention is computed over the whole square. Muon orthogonalises every matrix
    once a step.

    Args:
      goal: the objective, with the unrolled steps that are trained.
      rows: packed rows of a step.
      length: positions of a row.
    """
    shape, positions = head.config, rows * length
    sizes = {name: array.shape for name, array in parameters(head).items() if array.ndim == 2}
    scored = shape.hidden_size * shape.draft_vocab_size
    macs = 0.0  # of a position, forward and backward
    for name, (out, inputs) in sizes.items():
        passes = 1 if name == "fc.weight" else goal.steps
        macs += 3 * passes * out * inputs
    if head.lm_head is None:
        macs += 2 * goal.steps * scored
    macs += scored  # the teacher
    # Scores and weighted sums; step s also sees s rows of its own.
    keys = sum(length * (1 + step) for step in range(goal.steps))
    macs += 3 * 2 * keys * shape.num_heads * shape.head_dim
    muon = 0.0
    for out, inputs in sizes.values():
        small, large = sorted((out, inputs))
        muon += config.newton_schulz * (2 * small * small * large + small**3)
    return 2 * (macs * positions + muon)


def fit_flops(head: Head, config: FitConfig, plan: Plan, first: int = 0, last: int = -1) -> float:
    """Operations of the steps from `first` up to `last` (the fit's end by default) of a fit."""
    last = plan.steps if last < 0 else last
    rows = plan.batch * plan.accumulate
    length = plan.positions // rows
    total = 0.0
    for begin, end, goal in plan.phases():
        steps = max(0, min(last, end) - max(first, begin))
        total += steps * step_flops(head, config, goal, rows, length)
    return total


def matrix_flops(size: int = 1024, repeats: int = 5) -> float:
    """Operations a second of products of square float32 matrices on one device."""
    a = jnp.ones((size, size))
    product = jax.jit(lambda a: a @ a)
    jax.block_until_ready(product(a))
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(product(a))
        times.append(time.perf_counter() - begin)
    return 2 * math.prod((size, size, size)) / statistics.median(times)
