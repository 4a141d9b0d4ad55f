"""User turns from Hugging Face data sets, whatever their columns are called."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from eagle_jax.errors import InputError

_CONVERSATIONS = ("messages", "conversations", "conversation")
_PROMPTS = ("prompt", "instruction", "question", "query", "input")
_USERS = ("user", "human", "prompter")


def turns_of(row: Mapping[str, Any]) -> list[str]:
    """The user's turns in a row of a data set; none where no known column holds any.

    Known are `turns`; conversations as lists of `{"role", "content"}` or `{"from", "value"}`;
    `prompt`, `instruction` (with `input`), `question`, `query`.
    """
    found: list[str] = []
    if isinstance(row.get("turns"), (list, tuple)):
        found = list(row["turns"])
    elif name := next((n for n in _CONVERSATIONS if isinstance(row.get(n), (list, tuple))), None):
        for message in row[name]:
            said = message if isinstance(message, Mapping) else {}
            if said.get("role", said.get("from")) in _USERS:
                found.append(said.get("content", said.get("value")))
    elif name := next((n for n in _PROMPTS if isinstance(row.get(n), str)), None):
        found = [row[name]]
        if name == "instruction" and isinstance(row.get("input"), str) and row["input"].strip():
            found = [f"{row['instruction']}\n\n{row['input']}"]
    turns = [text.strip() for text in found if isinstance(text, str)]
    return turns if len(turns) == len(found) and all(turns) else []


def open_dataset(name: str) -> Iterator[Mapping[str, Any]]:
    """Rows of the data set `owner/name` or `owner/name:split`, as they come over the network.

    Raises:
      InputError: `datasets` is not installed, or the data set cannot be opened.
    """
    try:
        import datasets
    except ImportError as error:
        raise InputError(
            "--dataset needs the package `datasets`: pip install datasets, or give prompts as a "
            "file with --prompts"
        ) from error
    path, _, split = name.partition(":")
    try:
        yield from datasets.load_dataset(path, split=split or "train", streaming=True)
    except Exception as error:  # the library raises many kinds: network, name, split, licence
        raise InputError(f"cannot read the data set {name!r}: {error}") from error


def write_dataset_prompts(
    rows: Iterable[Mapping[str, Any]],
    path: Path,
    count: int,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> int:
    """Writes the user's turns of the first `count` different rows to a JSON lines file.

    The file appears when it is whole.

    Returns:
      How many rows had no user turn in a known column.

    Raises:
      InputError: no row had any.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    seen: set[tuple[str, ...]] = set()
    skipped = 0
    with part.open("w", encoding="utf-8") as out:
        for number, row in enumerate(rows):
            turns = tuple(turns_of(row))
            if not turns:
                skipped += 1
            elif turns not in seen:
                seen.add(turns)
                out.write(json.dumps({"id": f"d{number}", "turns": turns}) + "\n")
                progress(len(seen), count)
                if len(seen) == count:
                    break
    if not seen:
        part.unlink()
        raise InputError(
            f"none of the {skipped} rows holds user turns in a column that is known "
            f"({', '.join(('turns', *_CONVERSATIONS, *_PROMPTS))}); turn it into a prompt file"
        )
    part.replace(path)
    return skipped
