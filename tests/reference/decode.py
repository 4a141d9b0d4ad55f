"""Plain and speculative decoding as loops that compute everything from the whole prefix."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection

import numpy as np

from reference.tree import Tree, propose

# Tokens [T] to logits [T, V] and features [T, F].
TargetFunction = Callable[[list[int]], tuple[np.ndarray, np.ndarray]]


@dataclasses.dataclass
class Draw:
    """How a token is chosen: greedily, or by the Gumbel-max trick with given noise.

    Attributes:
      noise: [positions, V], or None for greedy.
      temperature, top_k, top_p: the distribution is softmax(logits / temperature), cut to the
        top_k most likely tokens (0: all), then to the fewest whose probability reaches top_p.
      margin: the smallest lead by which any token was chosen so far.
    """

    noise: np.ndarray | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    margin: float = np.inf

    def perturb(
        self, logits: np.ndarray, position: int, ids: np.ndarray | slice = slice(None)
    ) -> np.ndarray:
        """Scores [V] of a position, whose best is the token; `ids` names the logits' tokens."""
        if self.noise is None:
            return logits
        scaled = logits / self.temperature
        order = np.argsort(-scaled, kind="stable")
        if self.top_k:
            order = order[: self.top_k]
        probability = np.exp(scaled[order] - scaled[order[0]])
        reached = np.cumsum(probability / probability.sum()) >= self.top_p
        if self.top_p < 1:
            order = order[: int(np.argmax(reached)) + 1]
        scores = np.full(len(logits), -np.inf)
        scores[order] = (scaled + self.noise[position, ids])[order]
        return scores

    def choose(self, logits: np.ndarray, position: int) -> int:
        scores = self.perturb(logits, position)
        second, first = np.sort(scores)[-2:]
        self.margin = min(self.margin, float(first - second))
        return int(np.argmax(scores))


@dataclasses.dataclass
class Answer:
    """What decoding gave.

    Attributes:
      tokens: the answer, cut after the first end token and at the budget.
      runs: tokens that each checking pass added before any cut, the target's own included.
      kept: the same after the cut.
      trees: the tree of each pass.
    """

    tokens: list[int]
    runs: list[int]
    kept: list[int]
    trees: list[Tree]


def plain(
    target: TargetFunction,
    prompt: list[int],
    new_tokens: int,
    draw: Draw,
    eos: Collection[int] = (),
) -> list[int]:
    """One token per pass: the definition of a right answer."""
    tokens = list(prompt)
    for _ in range(new_tokens):
        tokens.append(draw.choose(target(tokens)[0][-1], len(tokens)))
        if tokens[-1] in eos:
            break
    return tokens[len(prompt) :]


def walk(target: TargetFunction, committed: list[int], tree: Tree, draw: Draw) -> list[int]:
    """The drafts that the target agrees with, and the token that it says after them.

    At every node the target chooses once; a child with that token is descended to, and without
    one the walk ends. Each node's logits come from a plain pass over its own path.
    """
    said: list[int] = []
    node = 0
    while True:
        tokens = [*committed, tree.tokens[0], *tree.paths[node]]
        said.append(draw.choose(target(tokens)[0][-1], len(tokens)))
        below = [
            child
            for child in range(1, len(tree.tokens))
            if tree.parents[child] == node and tree.tokens[child] == said[-1]
        ]
        if not below:
            return said
        (node,) = below


def speculative(
    target: TargetFunction,
    head,
    prompt: list[int],
    shape: tuple[int, int, int],
    new_tokens: int,
    draw: Draw,
    eos: Collection[int] = (),
    coupled: bool = True,
) -> Answer:
    """Propose, verify along the tree, walk, commit (EAGLE-2) until an end token or the budget.

    The first token comes from the prompt's own pass, which is not counted.

    Args:
      head: an `Eagle1` or `Eagle3`.
      shape: nodes (root included), depth below the root, top_k.
      coupled: drafts are ranked with the noise that the target will draw with.
    """
    committed = list(prompt)
    root = draw.choose(target(committed)[0][-1], len(committed))
    answer = Answer([root], [], [], [])
    while len(answer.tokens) < new_tokens and answer.tokens[-1] not in eos:
        _, features = target(committed)
        perturb = draw.perturb if coupled and draw.noise is not None else None
        tree = propose(head, features, [*committed[1:], root], *shape, perturb)
        said = walk(target, committed, tree, draw)
        committed += [root, *said[:-1]]
        root = said[-1]
        kept = said[: new_tokens - len(answer.tokens)]
        ends = [i for i, token in enumerate(kept) if token in eos]
        kept = kept[: ends[0] + 1] if ends else kept
        answer.tokens += kept
        answer.runs.append(len(said))
        answer.kept.append(len(kept))
        answer.trees.append(tree)
    return answer
