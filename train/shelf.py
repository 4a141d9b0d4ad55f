"""Answers on disk with the target's features of them, in shards, appended row by row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from eagle_jax.errors import InputError
from train.lines import resume

SHARD = 1 << 18  # tokens, about; a file of features stays near a gigabyte


def shards(folder: Path) -> list[tuple[Path, Path]]:
    """The files of a shelf in the order of writing: (lines, features) of each shard."""
    return [(lines, _features(lines)) for lines in sorted(folder.glob("answers-*.jsonl"))]


def _features(lines: Path) -> Path:
    return lines.with_name(lines.name.replace("answers", "features")).with_suffix(".f16")


def read_lines(folder: Path) -> list[dict[str, Any]]:
    """All rows of a shelf."""
    return [
        json.loads(line)
        for lines, _ in shards(folder)
        for line in lines.read_text(encoding="utf-8").splitlines()
    ]


class Shelf:
    """`answers-00000.jsonl` and `features-00000.f16`, and so on.

    Each line holds `id`, `prompt`, `out` (the supervised span) and `temp`; the features and taps of
    all its tokens lie in the other file in the same order. A row counts once its line is whole, so
    a killed run loses at most the row it was at.

    Attributes:
      done: ids of the rows held.
      tokens: how many they have.
    """

    def __init__(self, folder: Path, width: int, shard: int = SHARD):
        """Opens or makes the folder.

        Args:
          width: values of a token's features and taps.
          shard: tokens after which a new shard begins.

        Raises:
          InputError: the folder holds rows with another width.
        """
        folder.mkdir(parents=True, exist_ok=True)
        note = folder / "shelf.json"
        if not note.is_file():
            note.write_text(json.dumps({"width": width}) + "\n", encoding="utf-8")
        held = json.loads(note.read_text(encoding="utf-8"))["width"]
        if held != width:
            # Files are cut to whole rows when they are opened: of another width, that would ruin
            # them.
            raise InputError(
                f"{folder} holds answers with {held} values a token, expected {width}; go on with "
                "the --features and the target it was begun with, or choose another folder"
            )
        self.folder, self.width, self.shard = folder, width, shard
        self.done: set[str] = set()
        self.tokens = self._here = 0
        for files in shards(folder) or [self._files(0)]:
            self._open(*files)

    def _files(self, number: int) -> tuple[Path, Path]:
        lines = self.folder / f"answers-{number:05}.jsonl"
        return lines, _features(lines)

    def _open(self, lines: Path, data: Path) -> None:
        """Counts the whole rows of a shard and cuts off what follows them; rows go there next."""
        self._lines, self._data = lines, data
        lines.touch()
        rows = resume(lines)
        self.done |= {row["id"] for row in rows}
        self._here = sum(len(row["prompt"]) + len(row["out"]) for row in rows)
        self.tokens += self._here
        with data.open("ab") as out:
            out.truncate(self._here * 2 * self.width)

    def add(self, row: dict[str, Any], signals: np.ndarray) -> None:
        """Appends a row and its features and taps `[tokens, width]`."""
        if self._here >= self.shard:
            self._lines, self._data = self._files(len(shards(self.folder)))
            self._here = 0
        with self._data.open("ab") as data:
            data.write(signals.astype(np.float16).tobytes())
        with self._lines.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(row) + "\n")
        self.done.add(row["id"])
        self.tokens += len(signals)
        self._here += len(signals)
