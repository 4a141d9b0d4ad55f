"""Prompt files of the benchmark: one JSON object a line, with `turns` a list of texts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from eagle_jax.errors import FormatError, InputError


@dataclasses.dataclass(frozen=True)
class BenchPrompt:
    """The user's turns of a conversation."""

    id: str
    category: str
    turns: tuple[str, ...]

    @property
    def text(self) -> str:
        """The first turn."""
        return self.turns[0]


def read_prompts(path: Path) -> list[BenchPrompt]:
    """Reads a prompt file; `id` and `category` are optional.

    Raises:
      InputError: the file is missing or empty.
      FormatError: a line is not such an object.
    """
    if not path.is_file():
        raise InputError(f"no such prompt file: {path}")
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            turns = tuple(row["turns"])
            if not turns or not all(isinstance(text, str) and text.strip() for text in turns):
                raise TypeError("a turn is not a text")
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise FormatError(
                f"{path}, line {number}: expected an object with `turns`, a list of texts ({error})"
            ) from error
        prompts.append(BenchPrompt(str(row.get("id", number)), row.get("category", "all"), turns))
    if not prompts:
        raise InputError(f"{path} holds no prompts")
    return prompts
