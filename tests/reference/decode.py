"""Plain and speculative decoding as loops that compute everything from the whole prefix."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection

import numpy as np

from reference.tree import Tree, propose

# Tokens [T] to logits [T, V] and features [T, F].
TargetFunction = Callable[[list[int]], tuple[np.ndarray, np.ndarray]]
# The logits [V] of a position, and that position, to its token.
Choice = Callable[[np.ndarray, int], int]


def greedy(logits: np.ndarray, position: int) -> int:
    return int(np.argmax(logits))


def gumbel(noise: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Choice:
    """Draws by the Gumbel-max trick with given noise [positions, V]: softmax(logits / T) cut to
    the top_k most likely tokens, then to the fewest whose probability reaches top_p."""

    def choose(logits: np.ndarray, position: int) -> int:
        scaled = logits / temperature
        order = np.argsort(-scaled, kind="stable")
        if top_k:
            order = order[:top_k]
        probability = np.exp(scaled[order] - scaled[order[0]])
        probability /= probability.sum()
        reached = np.cumsum(probability) >= top_p
        kept = order[: int(np.argmax(reached)) + 1] if reached.any() else order
        return int(kept[np.argmax(scaled[kept] + noise[position, kept])])

    return choose


@dataclasses.dataclass
class Answer:
    """What decoding gave.

    Attributes:
      tokens: the answer, cut after the first end token and at the budget.
      runs: tokens that each checking pass added before any cut, the target's own included.
      kept: the same after the cut.
      trees: the tree of each pass.
      margin: the smallest lead by which a tree's choice was made.
    """

    tokens: list[int]
    runs: list[int]
    kept: list[int]
    trees: list[Tree]

    @property
    def passes(self) -> int:
        return len(self.runs)

    @property
    def margin(self) -> float:
        return min((tree.margin for tree in self.trees), default=np.inf)


def plain(
    target: TargetFunction,
    prompt: list[int],
    new_tokens: int,
    choose: Choice = greedy,
    eos: Collection[int] = (),
) -> list[int]:
    """One token per pass: the definition of a right answer."""
    tokens = list(prompt)
    for _ in range(new_tokens):
        tokens.append(choose(target(tokens)[0][-1], len(tokens)))
        if tokens[-1] in eos:
            break
    return tokens[len(prompt) :]


def walk(target: TargetFunction, committed: list[int], tree: Tree, choose: Choice) -> list[int]:
    """The drafts that the target agrees with, and the token that it says after them.

    At every node the target chooses once; a child with that token is descended to, and without
    one the walk ends. Each node's logits come from a plain pass over its own path.
    """
    said: list[int] = []
    node = 0
    while True:
        tokens = [*committed, tree.tokens[0], *tree.paths[node]]
        said.append(choose(target(tokens)[0][-1], len(tokens)))
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
    choose: Choice = greedy,
    eos: Collection[int] = (),
) -> Answer:
    """Propose, verify along the tree, walk, commit (EAGLE-2) until an end token or the budget.

    The first token comes from the prompt's own pass, which is not counted.

    Args:
      head: an `Eagle1` or `Eagle3`.
      shape: nodes (root included), depth below the root, top_k.
    """
    committed = list(prompt)
    root = choose(target(committed)[0][-1], len(committed))
    answer = Answer([root], [], [], [])
    while len(answer.tokens) < new_tokens and answer.tokens[-1] not in eos:
        _, features = target(committed)
        tree = propose(head, features, [*committed[1:], root], *shape)
        said = walk(target, committed, tree, choose)
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
