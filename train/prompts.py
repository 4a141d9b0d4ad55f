"""Where training prompts come from: a file, or the target itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from eagle_jax.errors import InputError
from eagle_jax.target.load import Target
from train.answers import Question, answer
from train.check import around_user
from train.lines import resume

MAX_TOKENS = 96  # of a prompt that the target writes
LEAST_WORDS = 3
KEPT = 0.7  # share of attempts that end in time and are new, about; for estimates


def user_header(target: Target) -> list[int]:
    """Token ids of a conversation up to where the user's words begin.

    Raises:
      InputError: the target has no chat template, or one that does not keep the user's words whole.
    """
    if target.tokenizer is None or not target.tokenizer.has_chat_template:
        raise InputError(
            "this target has no chat template, so it cannot write prompts for itself; give it some "
            "with --prompts"
        )
    return around_user(target.tokenizer)[0]


def own_prompts(target: Target, count: int, first_seed: int = 0) -> Iterator[tuple[int, str]]:
    """User turns that the target writes by itself after its template's user header, at temperature
    1: pairs of a seed and a text; those that are cut off or too short are left out."""
    header = tuple(user_header(target))
    questions = [Question(f"{s}", header, 1.0, s) for s in range(first_seed, first_seed + count)]
    budget = min(MAX_TOKENS, target.config.context - len(header))
    for written in answer(target, questions, (), budget):
        text = target.tokenizer.decode(written.out).strip()
        if written.out[-1] in target.eos and len(text.split()) >= LEAST_WORDS:
            yield written.question.seed, text


def write_own_prompts(
    target: Target,
    path: Path,
    count: int,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> None:
    """Appends prompts to a JSON lines file until it holds `count` different ones.

    A killed run goes on where it stopped: seeds that are in the file are not tried again.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = resume(path)
    seen = {row["turns"][0] for row in rows}
    seed = max((int(row["id"][1:]) + 1 for row in rows), default=0)
    with path.open("a", encoding="utf-8") as file:
        while len(seen) < count:
            tried, before = max(8, count - len(seen)), len(seen)
            for own, text in own_prompts(target, tried, seed):
                if text not in seen and len(seen) < count:
                    seen.add(text)
                    file.write(json.dumps({"id": f"m{own}", "turns": [text]}) + "\n")
                    file.flush()
                    progress(len(seen), count)
            seed += tried
            if len(seen) == before:
                raise InputError(
                    f"the target wrote no new prompt in {tried} attempts; give it some with "
                    "--prompts"
                )
