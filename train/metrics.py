"""What a fit reports: a CSV, TensorBoard events, and a plot at the end."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path


class Metrics:
    """Rows of figures by step, in `metrics.csv` and as TensorBoard events in `events/`.

    A resumed fit reports its steps again from the newest checkpoint on; rows after it are dropped
    from the CSV, so that no step stands there twice.
    """

    def __init__(self, folder: Path, first: int):
        """Opens the files of a fit that goes on after step `first`."""
        from tensorboardX import SummaryWriter

        self.path = folder / "metrics.csv"
        kept = [row for row in read_metrics(self.path) if row["step"] <= first]
        self.path.unlink(missing_ok=True)
        for row in kept:
            self._append(row)
        purge = first + 1 if first else None
        self.events = SummaryWriter(str(folder / "events"), purge_step=purge)

    def add(self, row: dict[str, float]) -> None:
        self._append(row)
        for name, value in row.items():
            if name != "step" and not math.isnan(value):
                self.events.add_scalar(name, value, row["step"])
        self.events.flush()

    def close(self) -> None:
        self.events.close()

    def _append(self, row: dict[str, float]) -> None:
        new = not self.path.is_file()
        with self.path.open("a", newline="", encoding="utf-8") as out:
            writer = csv.DictWriter(out, row.keys())
            if new:
                writer.writeheader()
            writer.writerow(row)


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The rows of a `metrics.csv`; none where there is no such file."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as lines:
        return [{n: float(v) for n, v in row.items()} for row in csv.DictReader(lines)]


def plot(rows: Sequence[dict[str, float]], path: Path) -> None:
    """Draws the token loss and the acceptance of every unrolled step against the step."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    at = [row["step"] for row in rows]
    for axis, kind in zip(axes, ("token_loss", "acceptance"), strict=True):
        for name in rows[0] if rows else ():
            part, _, rest = name.partition("_")
            if not rest.startswith(kind):
                continue
            step = int(rest.rpartition("_")[2])
            axis.plot(
                at,
                [row[name] for row in rows],
                color=f"C{step - 1}",
                linestyle="-" if part == "valid" else ":",
                marker="." if part == "valid" else None,
                label=f"{'held out' if part == 'valid' else 'training rows'}, draft {step}",
            )
        axis.set_xlabel("optimiser steps")
        axis.set_ylabel(kind.replace("_", " "))
        axis.grid(alpha=0.3)
    axes[1].set_ylim(0, 1)
    axes[0].legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
