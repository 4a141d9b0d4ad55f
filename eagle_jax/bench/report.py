"""Totals of a benchmark, and their table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np


def summarise(rows: Sequence[dict]) -> dict[str, Any]:
    """Totals over prompts, and the same by category."""
    report = _total(rows)
    divergences = [row["divergence"] for row in rows if row["divergence"]]
    report["identical"] = not divergences
    report["divergences"] = divergences
    categories = sorted({row["category"] for row in rows})
    report["categories"] = {
        name: _total([row for row in rows if row["category"] == name]) for name in categories
    }
    return report


def _total(rows: Sequence[dict]) -> dict[str, Any]:
    passes = sum(row["passes"] for row in rows)
    speculated = sum(row["speculated"] for row in rows)
    ratios = [ratio for row in rows for ratio in row["ratios"]]
    plain = sum(row["seconds"]["plain"] for row in rows)
    spec = sum(row["seconds"]["speculative"] for row in rows)
    written = sum(row["tokens"] - 1 for row in rows)
    accepted = np.sum([row["accepted"] for row in rows], axis=0)
    return {
        "tau": written / max(1, passes),
        "speculated": speculated / max(1, passes),
        "acceptance_by_depth": (accepted / max(1, speculated)).tolist(),
        "plain_tokens_per_s": written / plain if plain else 0.0,
        "speculative_tokens_per_s": written / spec if spec else 0.0,
        "speedup": statistics.median(ratios),
        "speedup_interval": _interval(ratios),
        "tokens": written,
    }


def _interval(ratios: Sequence[float], draws: int = 2000) -> list[float]:
    """A 95 % bootstrap interval of the median, from fixed draws."""
    chosen = np.random.default_rng(0).choice(np.asarray(ratios), (draws, len(ratios)))
    return [float(x) for x in np.percentile(np.median(chosen, axis=1), [2.5, 97.5])]


def show(report: dict[str, Any]) -> None:
    """Prints the report as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{report['target']}, drafter {report['drafter']}, tree {report['tree']}")
    for column in (
        "category",
        "tau",
        "drafted",
        "plain tokens/s",
        "speculative tokens/s",
        "speedup",
    ):
        table.add_column(column, justify="left" if column == "category" else "right")
    for name, part in [*report["categories"].items(), ("all", report)]:
        figures = ("tau", "speculated", "plain_tokens_per_s", "speculative_tokens_per_s", "speedup")
        table.add_row(name, *(f"{part[figure]:.2f}" for figure in figures))
    console = Console()
    console.print(table)
    curve = ", ".join(f"{n}: {ms:.1f}" for n, ms in report["cost_curve_ms"].items())
    low, high = report["speedup_interval"]
    console.print(f"speedup interval (95 %): {low:.2f} to {high:.2f}", highlight=False)
    console.print(f"target pass in ms by nodes: {curve}", highlight=False)
    console.print(
        f"cycle {report['cycle_ms']:.1f} ms, draft {report['draft_ms']:.1f} ms, overhead "
        f"{report['overhead_ms']:.1f} ms; compile {report['compile_s']:.0f} s",
        highlight=False,
    )
    same = "yes" if report["identical"] else f"no: {report['divergences']}"
    console.print(f"identical to plain decoding: {same}", highlight=False)
    if "transformers_tokens_per_s" in report:
        console.print(
            f"transformers: {report['transformers_tokens_per_s']:.1f} tokens/s; plain decoding is "
            f"{report['plain_over_transformers']:.2f}x that",
            highlight=False,
        )
