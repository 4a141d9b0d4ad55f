"""What a drafter is worth in the real decode cycle: tau by tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from eagle_jax.config import Sampling, TreeShape
from eagle_jax.decode.engine import Engine
from eagle_jax.drafters.load import LoadedDrafter
from eagle_jax.target.load import Target

# From a machine where every node costs to one where a wide pass is nearly free. Row counts in
# multiples of 4 are cheapest on CPU.
TREES = (
    TreeShape(2, 1, 1),
    TreeShape(4, 1, 3),
    TreeShape(4, 2, 2),
    TreeShape(4, 3, 1),
    TreeShape(8, 2, 4),
    TreeShape(8, 3, 3),
    TreeShape(8, 4, 2),
    TreeShape(16, 5, 4),
    TreeShape(32, 6, 6),
)
FEW = (TREES[0], TREES[2], TREES[5])  # where a user waits

BINS = 10  # of what a drafter promises, by which gains are told apart

# Questions of several kinds, for heads that nobody has measured.
PROBES = (
    "What causes the seasons of the year?",
    "Write a short story about a lighthouse keeper and a storm.",
    "Write a Python function that reverses a list.",
    "Give me three tips for saving money.",
    "You are a travel guide. Tell me about a day in Rome.",
    "If a train covers 120 miles in two hours, how fast is it?",
)


def tau_by_tree(
    target: Target,
    drafter: LoadedDrafter,
    prompts: Sequence[Sequence[int]],
    trees: Sequence[TreeShape] = TREES,
    max_new_tokens: int = 64,
    batch: int = 8,
) -> list[dict[str, Any]]:
    """Decodes greedily with each tree, and finds what each is worth.

    Near the target's context answers are shorter than `max_new_tokens`.

    Returns:
      A row a tree with `nodes`, `depth`, `top_k`, `tau` (total tokens over total passes, not a mean
      of ratios; prefill's token is not counted), and `by_promise`: `BINS` pairs (share of the
      passes, their tau) by what the drafter promised of its first draft, from 0 to 1.
    """
    prompts, rows = sorted(prompts, key=len), []
    max_new_tokens = min(max_new_tokens, target.config.context - len(prompts[-1]))
    for tree in trees:
        engine = Engine(target.model, drafter.module, tree)
        written, passes = np.zeros(BINS), np.zeros(BINS)
        for at in range(0, len(prompts), batch):
            part = prompts[at : at + batch]
            seeds = [0] * len(part)
            state = engine.start(part, max_new_tokens, Sampling(), seeds, target.eos)
            while not (done := np.asarray(state.done)).all():
                promise, before = np.asarray(engine.promise(state)), np.asarray(state.length)
                before, done = before.copy(), done.copy()
                state = engine.step(state)
                gained = np.asarray(state.length) - before
                bins = np.clip((promise * BINS).astype(int), 0, BINS - 1)
                np.add.at(written, bins[~done], gained[~done])
                np.add.at(passes, bins[~done], 1)
        by_promise = [
            (round(p / max(1, passes.sum()), 4), round(w / max(1, p), 3))
            for p, w in zip(passes.tolist(), written.tolist(), strict=True)
        ]
        tau = round(written.sum() / max(1, passes.sum()), 3)
        row = {"nodes": tree.nodes, "depth": tree.depth, "top_k": tree.top_k, "tau": tau}
        rows.append({**row, "by_promise": by_promise})
    return rows
