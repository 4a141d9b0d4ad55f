"""What a head is worth in the real decode cycle: tau by tree on held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence

from eagle_jax.config import TreeShape
from eagle_jax.decode.generate import generate
from eagle_jax.drafters.load import LoadedDrafter
from eagle_jax.target.load import Target

# Trees that a small machine may profit from; row counts in multiples of 4 are cheapest on CPU.
TREES = (
    TreeShape(4, 3, 1),
    TreeShape(4, 2, 2),
    TreeShape(4, 3, 2),
    TreeShape(8, 4, 2),
    TreeShape(8, 4, 3),
    TreeShape(16, 5, 4),
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

    tau is total tokens over total passes, not a mean of ratios.
    """
    prompts, rows = sorted(prompts, key=len), []
    for tree in trees:
        written = passes = 0
        for at in range(0, len(prompts), batch):
            part = prompts[at : at + batch]
            run = generate(target, drafter, part, max_new_tokens=max_new_tokens, tree=tree)
            written += run.stats.tokens - len(part)
            passes += run.stats.passes
        rows.append(
            {
                "nodes": tree.nodes,
                "depth": tree.depth,
                "top_k": tree.top_k,
                "tau": round(written / max(1, passes), 3),
            }
        )
    return rows
