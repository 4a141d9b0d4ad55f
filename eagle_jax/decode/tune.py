"""The fastest tree for a machine: measured cost of a cycle against the head's measured tau."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from eagle_jax import hub
from eagle_jax.config import PLAIN, TreeShape
from eagle_jax.decode.acceptance import FEW, PROBES, tau_by_tree
from eagle_jax.decode.engine import Engine
from eagle_jax.decode.measure import cycle_ms, draft_ms, target_pass_ms
from eagle_jax.drafters.load import LoadedDrafter
from eagle_jax.drafters.none import NoDrafter
from eagle_jax.nn.modules import parameters
from eagle_jax.target.load import Target

GAIN = 1.03  # a tree must promise this much over plain decoding to be used
FINALISTS = 3  # trees whose whole cycle is timed
WORTH_TIMING = 0.8  # speedup by parts below which no whole cycle is timed


def best_tree(target: Target, drafter: LoadedDrafter, batch: int = 1) -> TreeShape:
    """The tree that decodes fastest here; `PLAIN` where none beats plain decoding.

    Costs are measured once a machine, backend, target, head and batch size (rounded up to a power
    of two: extra nodes cost more in a batch), and kept in the user cache; so is the tau of a head
    or draft model that carries no table of its own, on a few questions. Where questions cannot tell
    (n-grams), the drafter names its tree.
    """
    if drafter.tree is not None:
        return drafter.tree
    batch = 1 << (batch - 1).bit_length()
    store = hub.cache_root() / "tuning.json"
    known, key = _load(store), _key(target, drafter, batch)
    if key not in known:
        print("measuring the fastest tree for this machine, once ...", file=sys.stderr, flush=True)
        known[key] = predict(target, drafter, batch)
        _save(store, {**_load(store), key: known[key]})
    return fastest(known[key])


def predict(target: Target, drafter: LoadedDrafter, batch: int) -> list[dict[str, Any]]:
    """The most promising trees of the head's table, each with its best gate and its speedup over
    plain decoding.

    Parts of a cycle, timed apart, choose the finalists; whole cycles decide between those.
    """
    table = drafter.tau or tau_by_tree(target, drafter, _probes(target), FEW)
    nodes = sorted({1, *(row["nodes"] for row in table)})
    passes = {count: target_pass_ms(target, count, batch) for count in nodes}
    # What a closed gate costs: the drafter takes in a token and scores its first draft.
    judging = draft_ms(target, drafter, TreeShape(2, 1, 1), batch)
    rows = []
    for row in table:
        shape = _shape(row)
        cost = passes[shape.nodes] + draft_ms(target, drafter, shape, batch)
        rows.append({**row, **best_gate(row, batch, passes[1], cost, passes[1] + judging)})
    rows.sort(key=lambda row: -row["speedup"])
    finalists = [row for row in rows[:FINALISTS] if row["speedup"] > WORTH_TIMING]
    if not finalists:
        return rows[:1]
    engines = [Engine(target.model, NoDrafter(), PLAIN)]
    engines += [Engine(target.model, drafter.module, _shape(row)) for row in finalists]
    plain, *cycles = cycle_ms(engines, [[1] * 64] * batch)
    found = []
    for row, cycle in zip(finalists, cycles, strict=True):
        costs = {"plain_ms": plain, "cycle_ms": cycle, "judging_ms": judging}
        found.append({**row, **costs, **best_gate(row, batch, plain, cycle, plain + judging)})
    return found


def best_gate(
    row: Mapping[str, Any], batch: int, plain: float, cycle: float, closed: float
) -> dict[str, float]:
    """The `gate` of a tree that makes decoding fastest, and its `speedup` over plain decoding.

    Args:
      row: of the head's table. Without `by_promise` there is no gate; nor is there one in a batch,
        where rows that promise much and little share a pass.
      plain: ms of a cycle of plain decoding.
      cycle: ms of a cycle over the tree.
      closed: ms of a cycle in which the gate stays closed.
    """
    best = {"gate": 0.0, "speedup": row["tau"] * plain / cycle}
    bins = row.get("by_promise", ()) if batch == 1 else ()
    for first in range(1, len(bins)):
        drafted = sum(share for share, _ in bins[first:])
        tokens = (1 - drafted) + sum(share * tau for share, tau in bins[first:])
        cost = (1 - drafted) * closed + drafted * cycle
        if (speedup := tokens * plain / cost) > best["speedup"]:
            best = {"gate": round(first / len(bins), 3), "speedup": speedup}
    return best


def _probes(target: Target) -> list[list[int]]:
    tokenizer = target.tokenizer
    if tokenizer is None:  # nothing to ask in words: the head shows on what the target writes
        return [[token] for token in range(1, min(9, target.config.vocab_size))]
    encode = tokenizer.encode_chat if tokenizer.has_chat_template else tokenizer.encode
    return [encode(text) for text in PROBES]


def fastest(rows: Sequence[Mapping[str, Any]]) -> TreeShape:
    """The tree with the highest predicted speedup, or `PLAIN` where it is not worth it."""
    best = max(rows, key=lambda row: row["speedup"])
    if best["speedup"] < GAIN:
        return PLAIN
    return _shape(best, best["gate"])


def _shape(row: Mapping[str, Any], gate: float = 0.0) -> TreeShape:
    return TreeShape(row["nodes"], row["depth"], row["top_k"], gate)


def _key(target: Target, drafter: LoadedDrafter, batch: int) -> str:
    facts = [
        platform.node(),
        platform.machine(),
        os.cpu_count(),
        jax.__version__,
        jax.devices()[0].device_kind,
        str(target.dtype),
        target.config,
        drafter.method,
        batch,
        [sorted(row.items()) for row in drafter.tau] or _digest(drafter),
    ]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:24]


def _digest(drafter: LoadedDrafter) -> str:
    """Of a head's weights; a whole model, which may be large, is known by its name."""
    module = getattr(drafter.module, "base", drafter.module)
    if not hasattr(module, "head"):
        return drafter.name
    found = hashlib.sha256()
    for name, array in sorted(parameters(module.head).items()):
        found.update(name.encode())
        found.update(np.asarray(array, np.float32).tobytes())
    return found.hexdigest()


def _load(path: Path) -> dict[str, Any]:
    """The stored measurements; an unreadable file counts as none, since it can be made again."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _save(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.part")
    temporary.write_text(json.dumps(content), encoding="utf-8")
    temporary.replace(path)
