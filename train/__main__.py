"""`python -m train`: from the target's answers to a head that `--drafter` loads."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from eagle_jax import hub
from eagle_jax.config import DrafterConfig, default_taps
from eagle_jax.drafters.load import HEADS, LoadedDrafter, bind, save_head
from eagle_jax.errors import EagleError, InputError
from eagle_jax.target.load import Target, load_target
from train.data import Sample, draft_vocabulary, pack, read_answers
from train.evaluate import tau_by_tree
from train.features import extract
from train.fit import Corpus, FitConfig, fit, lend
from train.loss import Objective
from train.start import initial_head


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m train", description=__doc__)
    p.add_argument("--target", default=hub.DEFAULT_TARGET, help="as for eagle-jax generate")
    p.add_argument(
        "--answers",
        nargs="+",
        type=Path,
        required=True,
        help="JSON lines with `prompt` and `out`, the target's own answers as token ids; .gz too",
    )
    p.add_argument("--method", choices=sorted(HEADS), default="eagle", help="kind of head")
    p.add_argument("--out", type=Path, required=True, help="folder of features, checkpoints, head")
    p.add_argument("--max-length", type=int, default=512, help="longer conversations are cut")
    p.add_argument("--draft-vocab", type=int, default=8192, help="ids that the head can draft")
    p.add_argument("--prompt-weight", type=float, default=0.1, help="loss weight of prompt tokens")
    p.add_argument("--epochs", type=int, default=FitConfig.epochs)
    p.add_argument("--batch", type=int, default=FitConfig.batch, help="packed rows a step")
    p.add_argument("--learning-rate", type=float, default=FitConfig.learning_rate)
    p.add_argument("--weight-decay", type=float, default=FitConfig.weight_decay)
    p.add_argument("--steps", type=int, default=Objective.steps, help="unrolled steps")
    p.add_argument("--feature-weight", type=float, default=Objective.feature_weight)
    p.add_argument("--token-weight", type=float, default=Objective.token_weight)
    p.add_argument("--noise", type=float, default=Objective.noise)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--tau-prompts", type=int, default=16, help="held-out prompts for tau by tree")
    return p


def split(samples: list[Sample], seed: int, held_out: float = 0.03):
    """Splits at random: (indices to train on, indices held out), at least one each."""
    order = np.random.default_rng(seed).permutation(len(samples))
    count = max(1, int(held_out * len(samples)))
    if count >= len(samples):
        raise InputError("training needs at least two conversations")
    return np.sort(order[count:]), np.sort(order[:count])


def corpus(samples: list[Sample], chosen, features, target: Target, arguments) -> Corpus:
    """Packs the chosen samples; features stay on disk, in the order of all samples."""
    packed = pack(samples, arguments.max_length, arguments.prompt_weight, target.eos, chosen)
    tokens = np.concatenate([sample.tokens for sample in samples])
    return Corpus(packed, tokens, features, target.config.hidden_size)


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    try:
        run(arguments)
    except EagleError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    return 0


def run(arguments: argparse.Namespace) -> None:
    target = load_target(arguments.target)
    samples = read_answers(arguments.answers, target.config.vocab_size, arguments.max_length)
    total = sum(len(sample.tokens) for sample in samples)
    taps = default_taps(target.config.num_layers) if arguments.method == "eagle3" else ()
    size = total * (1 + len(taps)) * target.config.hidden_size * 2 / 2**30
    print(f"{len(samples)} conversations, {total} tokens; features take {size:.2f} GiB", flush=True)

    def progress(done: int, of: int) -> None:
        print(f"features {done}/{of}", flush=True)

    features = extract(target.model, samples, arguments.out / "features", taps, progress)
    chosen, held = split(samples, arguments.seed)
    train = corpus(samples, chosen, features, target, arguments)
    valid = corpus(samples, held, features, target, arguments)
    draft_ids = draft_vocabulary(
        [samples[i] for i in chosen], target.config.vocab_size, arguments.draft_vocab
    )
    config = DrafterConfig.like(target.config, arguments.draft_vocab, taps)
    head = initial_head(target.model, config, arguments.seed, draft_ids)
    settings = FitConfig(
        epochs=arguments.epochs,
        batch=arguments.batch,
        learning_rate=arguments.learning_rate,
        weight_decay=arguments.weight_decay,
        seed=arguments.seed,
        objective=Objective(
            steps=arguments.steps,
            feature_weight=arguments.feature_weight,
            token_weight=arguments.token_weight,
            noise=arguments.noise,
        ),
    )
    print(f"fitting on {len(train)} packed rows, {len(valid)} held out", flush=True)
    head = fit(
        head, lend(target.model, draft_ids, train), train, valid, settings, arguments.out, _print
    )
    prompts = [samples[i].tokens[: samples[i].answer_start] for i in held]
    drafter = LoadedDrafter("trained", bind(head, draft_ids, target))
    tau = tau_by_tree(target, drafter, [p.tolist() for p in prompts][: arguments.tau_prompts])
    for row in tau:
        print(row, flush=True)
    facts = {"target": target.name, "tau": tau, "training": _recipe(arguments, len(samples), total)}
    save_head(arguments.out / "head", head, draft_ids, facts)
    print(f"head written to {arguments.out / 'head'}", flush=True)


def _recipe(arguments: argparse.Namespace, conversations: int, tokens: int) -> dict:
    names = ("epochs", "batch", "learning_rate", "weight_decay", "steps", "feature_weight")
    names += ("token_weight", "noise", "prompt_weight", "seed")
    recipe = {name: getattr(arguments, name) for name in names}
    return {"conversations": conversations, "tokens": tokens, **recipe}


def _print(row: dict) -> None:
    shown = " ".join(
        f"{name}={value:.3f}" for name, value in row.items() if name not in ("step", "steps")
    )
    print(f"step {row['step']}/{row['steps']} {shown}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
