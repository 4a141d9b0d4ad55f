"""`eagle-jax bench`: plain and speculative decoding in one run, alternating, on one machine."""

from __future__ import annotations

import dataclasses
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from eagle_jax.bench.margins import margins
from eagle_jax.bench.prompts import BenchPrompt
from eagle_jax.bench.report import summarise
from eagle_jax.config import PLAIN, Sampling, TreeShape
from eagle_jax.decode.generate import NO_DRAFTER, Generation, encode, engine, generate
from eagle_jax.decode.measure import cost_curve_ms, cycle_ms, draft_ms
from eagle_jax.decode.tune import best_tree
from eagle_jax.drafters.load import LoadedDrafter
from eagle_jax.drafters.replay import ReplayDrafter
from eagle_jax.target.load import Target

CURVE = (1, 2, 4, 8, 16, 32, 64)


def bench(
    target: Target,
    drafter: LoadedDrafter | None,
    prompts: Sequence[BenchPrompt],
    *,
    tree: TreeShape | None,
    replay: bool,
    max_new_tokens: int,
    runs: int,
    sampling: Sampling,
    seed: int,
    transformers: bool = False,
) -> dict[str, Any]:
    """Measures; returns the report, whose fields the README explains.

    Compilation happens in a first, untimed run of each kind a prompt. Times are of the cycles,
    prefill excluded, for both kinds. `replay` drafts what the plain run wrote.
    """
    if replay:
        tree = tree or TreeShape(4, 3, 1)
    elif drafter is None:
        tree = PLAIN
    else:
        tree = tree or best_tree(target, drafter)
    options = {"max_new_tokens": max_new_tokens, "sampling": sampling, "seed": seed}
    rows, compile_s = [], 0.0
    for number, prompt in enumerate(prompts):
        ids = encode(target, prompt.text, chat=True)
        began = time.perf_counter()
        plain = generate(target, None, ids, **options)
        used = _replay(target, ids, plain) if replay else drafter
        spec = generate(target, used, ids, tree=tree, **options)
        first = time.perf_counter() - began
        times: dict[str, list[float]] = {"plain": [], "speculative": []}
        steady: list[float] = []
        for _ in range(runs):
            for kind, with_drafter in (("plain", None), ("speculative", used)):
                result = generate(target, with_drafter, ids, tree=tree, **options)
                times[kind].append(result.stats.seconds)
                steady.append(result.stats.seconds + result.stats.prefill_seconds)
        compile_s += max(0.0, first - sum(steady) / runs)
        rows.append(_row(target, prompt, ids, plain, spec, times, sampling, seed))
        if number == 0:
            parts = _parts(target, used, tree, ids)
        if replay:
            target.engines.pop((used, tree), None)
        print(f"{number + 1}/{len(prompts)} {_line(rows[-1])}", file=sys.stderr, flush=True)
    report = summarise(rows)
    report["tree"] = dataclasses.asdict(tree)
    report["drafter"] = "replay" if replay else (drafter.name if drafter else "none")
    report["target"] = target.name
    report["settings"] = {"max_new_tokens": max_new_tokens, "runs": runs, "seed": seed}
    report["settings"]["temperature"] = sampling.temperature
    report["settings"]["coupled"] = getattr(drafter and drafter.module, "coupled", True)
    report["compile_s"] = compile_s
    report |= parts
    report |= _where()
    if transformers:
        from eagle_jax.bench.peer import transformers_tokens_per_s

        found = transformers_tokens_per_s(target, [p.text for p in prompts], max_new_tokens)
        report["transformers_tokens_per_s"] = found
        report["plain_over_transformers"] = report["plain_tokens_per_s"] / found
    report["prompts"] = rows
    return report


def _replay(target: Target, ids: list[int], plain: Generation) -> LoadedDrafter:
    script = np.zeros((1, target.config.context), np.int32)
    whole = ids + plain.tokens[0]
    script[0, : len(whole)] = whole
    return LoadedDrafter("replay", ReplayDrafter(script, target.config.vocab_size))


def _row(target, prompt, ids, plain: Generation, spec: Generation, times, sampling, seed) -> dict:
    divergence = None
    if plain.tokens != spec.tokens:
        a, b = plain.tokens[0], spec.tokens[0]
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        at = min(len(a), len(b)) if at is None else at
        margin = margins(target, ids + a, sampling, seed)[len(ids) + at - 1]
        divergence = {"prompt": prompt.id, "position": at, "margin": float(margin)}
    ratios = [p / s for p, s in zip(times["plain"], times["speculative"], strict=True)]
    seconds = {kind: statistics.median(of) for kind, of in times.items()}
    return {
        "id": prompt.id,
        "category": prompt.category,
        "tokens": len(spec.tokens[0]),
        "passes": spec.stats.passes,
        "tau": spec.stats.tau,
        "speculated": spec.stats.speculated,
        "accepted": [round(a * spec.stats.speculated) for a in spec.stats.acceptance_by_depth],
        "seconds": seconds,
        "plain_tokens_per_s": (len(plain.tokens[0]) - 1) / seconds["plain"],
        "speculative_tokens_per_s": (len(spec.tokens[0]) - 1) / seconds["speculative"],
        "ratios": ratios,
        "speedup": statistics.median(ratios),
        "divergence": divergence,
    }


def _parts(target: Target, drafter: LoadedDrafter | None, tree: TreeShape, ids) -> dict[str, Any]:
    curve = cost_curve_ms(target, sorted({*CURVE, tree.nodes}))
    report: dict[str, Any] = {"cost_curve_ms": {str(n): curve[n] for n in CURVE}}
    drafts = drafter is not None and tree.nodes > 1
    report["draft_ms"] = draft_ms(target, drafter, tree) if drafts else 0.0
    # Of cycles that draft: closed ones are another matter.
    tree = dataclasses.replace(tree, gate=0.0)
    always = engine(target, drafter if drafts else NO_DRAFTER, tree)
    [report["cycle_ms"]] = cycle_ms([always], [ids])
    report["overhead_ms"] = report["cycle_ms"] - curve[tree.nodes] - report["draft_ms"]
    return report


def _where() -> dict[str, Any]:
    import flax
    import jaxlib

    from eagle_jax import __version__

    versions = {"eagle_jax": __version__, "jax": jax.__version__, "jaxlib": jaxlib.__version__}
    versions |= {"flax": flax.__version__, "python": platform.python_version()}
    device = jax.devices()[0]
    machine = {"backend": device.platform, "device": device.device_kind}
    machine |= {"cores": os.cpu_count(), "processor": platform.machine()}
    return {"versions": versions, "machine": machine}


def _line(row: dict) -> str:
    same = "identical" if row["divergence"] is None else f"diverges {row['divergence']}"
    return f"{row['id']} ({row['category']}): tau {row['tau']:.2f} {row['speedup']:.2f}x {same}"
