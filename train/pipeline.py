"""The stages of training; each can be run alone and is restartable."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from eagle_jax.bench.prompts import read_prompts
from eagle_jax.config import DrafterConfig, default_taps
from eagle_jax.decode.acceptance import tau_by_tree
from eagle_jax.decode.measure import target_pass_ms
from eagle_jax.drafters.feature import FeatureDrafter
from eagle_jax.drafters.load import LoadedDrafter, load_drafter, save_head
from eagle_jax.errors import InputError
from eagle_jax.target.load import Target, load_target
from train.answers import Question, write_answers
from train.check import check_spans, marked
from train.corpus import Corpus
from train.cost import EXPECTED, fit_flops, matrix_flops
from train.data import Sample, draft_vocabulary, pack, read_answers
from train.datasets import open_dataset, write_dataset_prompts
from train.evaluate import TOLERANCE, acceptance, drafts, real_tau, simulated_tau
from train.features import extract
from train.fit import fit, lend
from train.loss import Objective
from train.plan import FitConfig, Plan
from train.prompts import write_own_prompts
from train.start import continued_head, initial_head
from train.store import Store, join, lay_out, open_shelf

DEPTH = 4  # of the chains that are evaluated


@dataclasses.dataclass
class Run:
    """A training folder and how it was asked for; the folder holds `prompts.jsonl`, `answers/`,
    `features/`, `fit/`, `head/` and `evaluation.json`."""

    options: argparse.Namespace
    console: Console = dataclasses.field(default_factory=lambda: Console(highlight=False))

    @functools.cached_property
    def target(self) -> Target:
        return load_target(self.options.target)

    @property
    def taps(self) -> tuple[int, ...]:
        """What is recorded: taps for either kind of head."""
        return default_taps(self.target.config.num_layers)

    @property
    def width(self) -> int:
        return (1 + len(self.taps)) * self.target.config.hidden_size

    def path(self, name: str) -> Path:
        return self.options.out / name

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    @contextmanager
    def bar(self, title: str) -> Iterator[Callable[[int, int], None]]:
        """A progress bar; the function that it gives takes (done, in all)."""
        columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self.console) as progress:
            task = progress.add_task(title, total=None)
            yield lambda done, of: progress.update(task, completed=done, total=of)


def prompts(run: Run) -> None:
    """Takes user turns from a data set, or lets the target write them; a file is taken as it is."""
    if run.options.prompts:
        run.say(f"{len(read_prompts(run.options.prompts))} prompts in {run.options.prompts}")
        return
    count = run.options.count
    if run.options.dataset:
        path = run.path("prompts.jsonl")
        if not path.is_file():
            with run.bar("prompts") as bar:
                skipped = write_dataset_prompts(open_dataset(run.options.dataset), path, count, bar)
            run.say(f"{skipped} rows of {run.options.dataset} held no user turns")
        run.say(f"{len(read_prompts(path))} prompts in {path}")
        return
    with run.bar("prompts") as bar:
        write_own_prompts(run.target, run.path("prompts.jsonl"), count, bar)
    run.say(f"{count} prompts in {run.path('prompts.jsonl')}")


def answers(run: Run) -> None:
    """Lets the target answer the prompts, turn by turn, and records its features."""
    options, target = run.options, run.target
    conversations = read_prompts(options.prompts or run.path("prompts.jsonl"))
    budget, folder = options.max_new_tokens, run.path("answers")
    expected = sum(len(c.turns) for c in conversations) * (budget + 64)
    rate = options.rows / target_pass_ms(target, 1, options.rows) * 1e3
    hours = expected / rate / 3600
    run.say(
        f"answering {len(conversations)} conversations: up to {expected} tokens at about "
        f"{rate:.0f} a second, {hours:.1f} hours; features take up to "
        f"{expected * run.width * 2 / 2**30:.1f} GiB"
    )
    written: dict[str, list[int]] = {}
    for turn in range(max(len(c.turns) for c in conversations)):
        questions, long = [], 0
        for index, conversation in enumerate(conversations):
            if turn >= len(conversation.turns):
                continue
            if (ids := _context(target, conversation, turn, written)) is None:
                continue
            if len(ids) > options.max_length - budget:
                long += 1
                continue
            temperature = options.temperatures[index % len(options.temperatures)]
            name = conversation.id if turn == 0 else f"{conversation.id}+{turn}"
            questions.append(Question(name, tuple(ids), temperature, seed=index))
        if long:
            run.say(
                f"turn {turn + 1}: {long} prompts left out; with {budget} new tokens they are "
                f"longer than --max-length {options.max_length}"
            )
        if not questions:
            continue
        with run.bar(f"answers, turn {turn + 1}") as bar:
            write_answers(
                target,
                questions,
                folder,
                run.taps,
                budget,
                lambda done, of, tokens, bar=bar: bar(done, of),
                rows=options.rows,
            )
        for line in (folder / "answers.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            written[row["id"]] = row["out"]


def _context(target: Target, conversation, turn: int, written) -> list[int] | None:
    """Token ids up to where the answer to a turn begins; None where an earlier one is missing."""
    messages = []
    for number, text in enumerate(conversation.turns[: turn + 1]):
        messages.append({"role": "user", "content": text})
        if number < turn:
            name = conversation.id if number == 0 else f"{conversation.id}+{number}"
            if name not in written:
                return None
            messages.append(
                {"role": "assistant", "content": target.tokenizer.decode(written[name])}
            )
    if target.tokenizer is None:
        raise InputError("this target has no tokenizer; give --answers as token ids")
    if target.tokenizer.has_chat_template:
        return target.tokenizer.encode_chat(messages)
    return target.tokenizer.encode(conversation.turns[0]) if turn == 0 else None


def check(run: Run) -> None:
    """Shows one conversation with its supervised span; refuses spans that are empty or shifted."""
    options, tokenizer = run.options, run.target.tokenizer
    path = run.path("answers") / "answers.jsonl"
    files = [*(options.answers or ()), *([path] if path.is_file() else ())]
    whole = np.iinfo(np.int32).max
    samples = read_answers(files, run.target.config.vocab_size, whole, all=True)
    templated = check_spans(tokenizer, samples)
    if tokenizer is None:
        return
    run.console.print(marked(tokenizer, samples[0]))
    run.say(f"{templated} of {len(samples)} prompts end as the chat template lets them end")
    if tokenizer.has_chat_template and templated < len(samples):
        run.say("WARNING: the others look otherwise than what `generate` will feed the target")


def features(run: Run) -> None:
    """Computes the target's features of answers that were given as files."""
    if not run.options.answers:
        run.say("features: recorded with the answers")
        return
    samples = _given(run)
    total = sum(len(sample.tokens) for sample in samples)
    rate = 64 / target_pass_ms(run.target, 64) * 1e3
    run.say(
        f"features of {len(samples)} conversations, {total} tokens: about "
        f"{total / rate / 60:.0f} minutes, {total * run.width * 2 / 2**30:.2f} GiB"
    )
    with run.bar("features") as bar:
        extract(run.target.model, samples, run.path("features"), run.taps, bar)


def _given(run: Run) -> list[Sample]:
    options = run.options
    return read_answers(options.answers, run.target.config.vocab_size, options.max_length)


def open_store(run: Run) -> Store:
    """Everything there is to train on: given answers, and those that the target wrote here."""
    stores, options = [], run.options
    if options.answers:
        samples = _given(run)
        found = extract(run.target.model, samples, run.path("features"), run.taps)
        stores.append(lay_out(samples, found))
    if (run.path("answers") / "answers.jsonl").is_file():
        vocab = run.target.config.vocab_size
        stores.append(open_shelf(run.path("answers"), vocab, options.max_length, run.width))
    if not stores:
        raise InputError(
            f"no answers in {run.path('answers')}; run the stage `answers` first, or give some "
            "with --answers"
        )
    store = join(stores)
    if len(store.samples) < 2:
        raise InputError("training needs at least two conversations")
    return store


def split(samples: list[Sample], seed: int, share: float = 0.03) -> tuple[np.ndarray, np.ndarray]:
    """Splits at random: indices to train on, and a share of indices held out, at least one."""
    order = np.random.default_rng(seed).permutation(len(samples))
    count = max(1, int(share * len(samples)))
    return np.sort(order[count:]), np.sort(order[:count])


def fit_head(run: Run) -> None:
    """Fits a head and writes it to `head/`."""
    options, target, store = run.options, run.target, open_store(run)
    chosen, held = split(store.samples, options.seed, options.held_out)
    train = _corpus(run, store, chosen, options.prompt_weight)
    valid = _corpus(run, store, held, 0.0)
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
        return initial_head(target.model, config, options.seed, counted), counted
    module = load_drafter(options.start, target).module
    head, config = module.head, module.head.config
    if config.taps != taps:
        raise InputError(
            f"--start {options.start}: expected a head that reads the layers {taps} (--method "
            f"{options.method}), found one that reads {config.taps}"
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


def _drafts(run: Run, drafter: LoadedDrafter, store: Store, chosen):
    """The corpus of the chosen samples, and what `drafts` finds on it."""
    valid, module = _corpus(run, store, chosen, 0.0), drafter.module
    vocab = _ids(module)
    lent = lend(run.target.model, vocab, valid)
    # A finished head reads taps as they are.
    lent = lent.replace(tap_scale=np.ones_like(lent.tap_scale))
    return valid, drafts(module.head, lent, vocab, valid, DEPTH)


def _update(path: Path, facts: dict) -> None:
    """Writes facts into a JSON file, beside what it holds."""
    held = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    path.write_text(json.dumps(held | facts, indent=1) + "\n", encoding="utf-8")


def _corpus(run: Run, store: Store, chosen, prompt_weight: float) -> Corpus:
    eos = run.target.eos
    packed = pack(store.samples, run.options.max_length, prompt_weight, eos, chosen)
    return Corpus(packed, store, run.target.config.hidden_size)


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


STAGES = {
    "prompts": prompts,
    "answers": answers,
    "check": check,
    "features": features,
    "fit": fit_head,
    "evaluate": evaluate,
}
