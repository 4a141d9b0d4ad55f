"""The stages that make a head of the text: fit, evaluation and export."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path

import numpy as np

from eagle_jax.config import DrafterConfig
from eagle_jax.decode.acceptance import tau_by_tree
from eagle_jax.drafters.feature import FeatureDrafter
from eagle_jax.drafters.formats.write import export_head
from eagle_jax.drafters.load import LoadedDrafter, load_drafter, save_head
from eagle_jax.errors import InputError
from train.corpus import Corpus
from train.cost import EXPECTED, fit_flops, matrix_flops
from train.data import draft_vocabulary
from train.evaluate import TOLERANCE, acceptance, drafts, real_tau, simulated_tau
from train.fit import fit, lend
from train.loss import Objective
from train.plan import FitConfig, Plan
from train.run import Run, corpus_of, open_store, split
from train.start import continued_head, initial_head
from train.store import Store

DEPTH = 4  # of the chains that are evaluated


def fit_head(run: Run) -> None:
    """Fits a head and writes it to `head/`."""
    options, target, store = run.options, run.target, open_store(run)
    cut = [sample.cut for sample in store.samples if sample.cut]
    if cut:
        run.say(
            f"{len(cut)} of {len(store.samples)} conversations are longer than --max-length "
            f"{options.max_length} and were cut, {sum(cut)} tokens in all"
        )
    chosen, held = split(store.samples, options.seed, options.held_out)
    train = corpus_of(run, store, chosen, options.prompt_weight)
    valid = corpus_of(run, store, held, 0.0)
    head, vocab = _beginning(run, store, chosen, train)
    settings = FitConfig(
        **_fields(FitConfig, options), objective=Objective(**_fields(Objective, options))
    )
    plan, rate = Plan(settings, *train.packed.source.shape), matrix_flops()
    flops = fit_flops(head, settings, plan)
    run.say(
        f"fitting on {len(train)} rows of {options.max_length} tokens, {len(valid)} held out: "
        f"{plan.steps} steps, {flops / 1e12:.2f} TFLOP, about "
        f"{flops / (EXPECTED * rate) / 60:.0f} minutes at {EXPECTED:.0%} of the machine's "
        f"{rate / 1e9:.0f} GFLOP/s"
    )
    lent = lend(target.model, vocab, train)
    with run.bar("fit") as bar:
        head = fit(
            head,
            lent,
            train,
            valid,
            settings,
            run.path("fit"),
            lambda row: _show(run, row),
            lambda done: bar(done, plan.steps),
        )
    facts = {"target": target.name, "training": _recipe(options, store)}
    save_head(run.path("head"), head, vocab, facts)
    run.say(f"head written to {run.path('head')}")


def _beginning(run: Run, store: Store, chosen: np.ndarray, train: Corpus):
    """The head that the fit starts from, and its draft vocabulary `[draft_vocab]`."""
    options, target = run.options, run.target
    counted = draft_vocabulary(
        [store.samples[i] for i in chosen], target.config.vocab_size, options.draft_vocab
    )
    taps = run.taps if options.method == "eagle3" else ()
    if not options.start:
        config = DrafterConfig.like(target.config, options.draft_vocab, taps)
        config = dataclasses.replace(config, own_lm_head=options.own_lm_head)
        return initial_head(target.model, config, options.seed, counted), counted
    module = load_drafter(options.start, target).module
    head, config = module.head, module.head.config
    if config.taps != taps:
        raise InputError(
            f"--start {options.start}: expected a head that reads the layers {taps} (--method "
            f"{options.method}), found one that reads {config.taps}"
        )
    if config.own_embed or config.fc_norm or config.norm_before_fc:
        raise InputError(
            f"--start {options.start}: heads with their own embedding or norms before `fc` can be "
            "run here, but not trained"
        )
    # An LM head of its own scores certain ids; the target's rows can be chosen anew.
    if config.own_lm_head or config.draft_vocab_size != options.draft_vocab:
        counted = _ids(module)
    return continued_head(head, train.tap_scale()), counted


def _ids(module: FeatureDrafter) -> np.ndarray:
    """The target ids that a head can draft."""
    ids = module.draft_ids
    return np.arange(module.head.config.vocab_size) if ids is None else np.asarray(ids[...])


def evaluate(run: Run) -> None:
    """Acceptance on held-out answers, simulated and real tau, and tau by tree."""
    options, target, store = run.options, run.target, open_store(run)
    drafter = load_drafter(str(run.path("head")), target)
    _, held = split(store.samples, options.seed, options.held_out)
    found = acceptance(*_drafts(run, drafter, store, held)[1])
    for name in ("conditional", "cumulative"):
        figures = " ".join(f"{share:.3f}" for share in getattr(found, name))
        run.say(f"{name} acceptance by depth: {figures}")
    run.say(f"calibration error of the first draft: {found.calibration_error:.3f}")
    report = dataclasses.asdict(found)

    greedy = [i for i in held if store.samples[i].greedy]
    if greedy:
        valid, (hits, weights, _) = _drafts(run, drafter, store, greedy)
        simulated = simulated_tau(hits, weights, valid)
        real = real_tau(target, drafter, [store.samples[i] for i in greedy], DEPTH)
        run.say(f"tau of a chain of {DEPTH}: {simulated:.3f} simulated, {real:.3f} when decoding")
        if abs(simulated / real - 1) > TOLERANCE:
            run.say(
                f"WARNING: these differ by more than {TOLERANCE:.0%}: the head is not used as it "
                "was trained"
            )
        report |= {"simulated_tau": simulated, "real_tau": real}
    else:
        run.say("no held-out answer says `temp` 0, so the decode cycle cannot be simulated")
    samples = [store.samples[i] for i in held[: options.tau_prompts]]
    table = tau_by_tree(target, drafter, [s.tokens[: s.answer_start].tolist() for s in samples])
    for row in table:
        run.say("tau {tau:.3f} with {nodes} nodes, depth {depth}, top_k {top_k}".format(**row))
    _update(run.path("head") / "config.json", {"tau": table})
    _update(run.path("evaluation.json"), report)


def export(run: Run) -> None:
    """Writes the head as other projects load it: `export/eagle3`, or `export/eagle`."""
    drafter = load_drafter(str(run.path("head")), run.target)
    if drafter.method == "eagle" and drafter.module.draft_ids is not None:
        run.say("not exported: EAGLE-1/2 files have no words for a reduced draft vocabulary")
        return
    folder = run.path("export") / drafter.method
    export_head(drafter.module, run.target, drafter.method, folder)
    run.say(f"head written to {folder} as the EAGLE repository, vLLM and SGLang load it")


def _drafts(run: Run, drafter: LoadedDrafter, store: Store, chosen):
    """The corpus of the chosen samples, and what `drafts` finds on it."""
    valid, module = corpus_of(run, store, chosen, 0.0), drafter.module
    vocab = _ids(module)
    lent = lend(run.target.model, vocab, valid)
    # A finished head reads taps as they are.
    lent = lent.replace(tap_scale=np.ones_like(lent.tap_scale))
    return valid, drafts(module.head, lent, vocab, valid, DEPTH)


def _update(path: Path, facts: dict) -> None:
    """Writes facts into a JSON file, beside what it holds."""
    held = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    path.write_text(json.dumps(held | facts, indent=1) + "\n", encoding="utf-8")


def _fields(kind, options: argparse.Namespace) -> dict:
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in vars(options).items() if name in names}


def _recipe(options: argparse.Namespace, store: Store) -> dict:
    tokens = sum(len(sample.tokens) for sample in store.samples)
    settings = _fields(FitConfig, options) | _fields(Objective, options)
    settings["prompt_weight"] = options.prompt_weight
    return {"conversations": len(store.samples), "tokens": tokens, **settings}


def _show(run: Run, row: dict) -> None:
    figures = [
        f"{name.replace('_', ' ')} {value:.3f}"
        for name, value in row.items()
        if name.startswith(("train_", "valid_")) and not math.isnan(value)
    ]
    done = f"step {row['step']}/{row['steps']}, {row['positions_per_s']:.0f} positions/s"
    run.say(f"{done}, {row['flops_per_s'] / 1e9:.0f} GFLOP/s: {', '.join(figures)}")
