"""What a drafter is worth in the real decode cycle: tau by tree."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eagle_jax.config import Sampling, TreeShape
from eagle_jax.decode.engine import Engine
from eagle_jax.drafters.load import LoadedDrafter
from eagle_jax.target.load import Target

# From a machine where every node costs to one where a wide pass is nearly free. Row counts in
# multiples of 4 are cheapest on CPU.
TREES = (
    TreeShape(2, 1, 1),
    TreeShape(4, 3, 1),
    TreeShape(4, 2, 2),
    TreeShape(4, 3, 2),
    TreeShape(8, 4, 2),
    TreeShape(8, 4, 3),
    TreeShape(16, 5, 4),
    TreeShape(32, 6, 6),
)
FEW = (TREES[0], TREES[2], TREES[5])  # where a user waits

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
) -> list[dict[str, float]]:
    """Decodes greedily with each tree; returns rows with `nodes`, `depth`, `top_k` and `tau`.

    tau is total tokens over total passes, not a mean of ratios; prefill's token is not counted.
    Near the target's context answers are shorter than `max_new_tokens`.
    """
    prompts, rows = sorted(prompts, key=len), []
    max_new_tokens = min(max_new_tokens, target.config.context - len(prompts[-1]))
    for tree in trees:
        engine = Engine(target.model, drafter.module, tree)
        written = passes = 0
        for at in range(0, len(prompts), batch):
            part = prompts[at : at + batch]
            seeds = [0] * len(part)
            state = engine.start(part, max_new_tokens, Sampling(), seeds, target.eos)
            state = engine.run(state)
            written += int(np.sum(state.length)) - sum(map(len, part))
            passes += int(np.sum(state.passes))
        tau = round(written / max(1, passes), 3)
        rows.append({"nodes": tree.nodes, "depth": tree.depth, "top_k": tree.top_k, "tau": tau})
    return rows
