"""`python -m train`: from a target to a head that `--drafter` loads."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from eagle_jax import hub
from eagle_jax.drafters.load import HEADS
from eagle_jax.errors import EagleError, InputError
from train.loss import Objective
from train.plan import FitConfig
from train.run import Run
from train.stages import STAGES


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m train",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("stage", nargs="?", choices=["all", *STAGES], default="all", help="what to run")
    p.add_argument("--target", default=hub.DEFAULT_TARGET, help="as for eagle-jax generate")
    p.add_argument("--out", type=Path, required=True, help="folder for everything that is made")
    p.add_argument("--seed", type=int, default=FitConfig.seed)

    data = p.add_argument_group("data")
    where = data.add_mutually_exclusive_group()
    where.add_argument(
        "--prompts", type=Path, help="JSON lines with `turns`; by default the target writes its own"
    )
    where.add_argument("--dataset", help="Hugging Face data set: owner/name[:split]")
    data.add_argument("--count", type=int, default=4096, help="prompts to write or to take")
    data.add_argument(
        "--answers",
        nargs="+",
        type=Path,
        help="the target's own answers, JSON lines with `prompt` and `out` as token ids (.gz too), "
        "instead of prompts",
    )
    data.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.0, 0.7, 1.0])
    data.add_argument("--max-new-tokens", type=int, default=192, help="of an answer")
    data.add_argument("--rows", type=int, default=64, help="answers decoded side by side")
    data.add_argument("--max-length", type=int, default=512, help="longer conversations are cut")
    data.add_argument(
        "--features",
        choices=["cached", "first-epoch", "live"],
        default="cached",
        help="on disk before the fit (default), kept from its first epoch on, or never kept",
    )
    data.add_argument("--prompt-weight", type=float, default=0.5, help="loss weight of prompts")

    data.add_argument("--held-out", type=float, default=0.03, help="share kept for evaluation")

    head = p.add_argument_group("head")
    head.add_argument("--method", choices=sorted(HEADS), default="eagle3")
    head.add_argument("--start", help="head to go on from: `auto` (the shipped one) or a folder")
    head.add_argument("--draft-vocab", type=int, default=8192, help="ids that the head can draft")

    head.add_argument(
        "--own-lm-head",
        action="store_true",
        help="an EAGLE-3 head trains an LM head of its own, which starts as the target's rows",
    )

    fit = p.add_argument_group("fit")
    for name, text in (
        ("epochs", "passes over the answers"),
        ("batch", "packed rows computed at once, shared by the devices"),
        ("accumulate", "batches a step"),
        ("learning_rate", "Muon's peak rate"),
        ("weight_decay", "of matrices"),
        ("newton_schulz", "Muon's iterations; 5 are usual, 3 a third cheaper"),
        ("warmup", "share of the steps with a rising rate"),
        ("single", "share of the steps before the head is unrolled"),
        ("checkpoint_every", "steps"),
    ):
        default = getattr(FitConfig, name)
        flag = "--" + name.replace("_", "-")
        fit.add_argument(flag, type=type(default), default=default, help=text)
    for name, text in (
        ("steps", "unrolled steps"),
        ("feature_weight", "of the feature regression"),
        ("token_weight", "of the soft cross-entropy"),
        ("variation_weight", "of the total variation"),
        ("noise", "uniform disturbance of what the head reads, by its root mean square"),
    ):
        default = getattr(Objective, name)
        flag = "--" + name.replace("_", "-")
        fit.add_argument(flag, type=type(default), default=default, help=text)
    fit.add_argument(
        "--compute-dtype", choices=["auto", "float32", "bfloat16"], default=FitConfig.compute_dtype
    )
    fit.add_argument("--remat", action="store_true", help="less memory, slower steps")
    p.add_argument("--tau-prompts", type=int, default=8, help="held-out prompts for tau by tree")
    return p


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    try:
        _check(options)
        run = Run(options)
        for name, stage in STAGES.items():
            given = options.answers and name in ("prompts", "answers")
            if options.stage == name or (options.stage == "all" and not given):
                stage(run)
    except EagleError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    return 0


def _check(options: argparse.Namespace) -> None:
    for name in (
        "count",
        "max_new_tokens",
        "rows",
        "epochs",
        "batch",
        "accumulate",
        "steps",
        "tau_prompts",
    ):
        if getattr(options, name) < 1:
            flag = name.replace("_", "-")
            raise InputError(f"--{flag} must be at least 1, got {getattr(options, name)}")
    if min(options.temperatures) < 0:
        raise InputError(f"temperatures must be 0 or more, got {options.temperatures}")
    if not 0 < options.held_out < 1:
        raise InputError(f"--held-out must lie between 0 and 1, got {options.held_out}")
    if options.own_lm_head and options.method != "eagle3":
        raise InputError("--own-lm-head needs --method eagle3; an EAGLE-1 head uses the target's")
    if options.own_lm_head and options.start:
        raise InputError("--own-lm-head is for new heads; --start goes on with the head as it is")
    if options.max_length < 8:
        raise InputError(f"--max-length must be at least 8, got {options.max_length}")


if __name__ == "__main__":
    sys.exit(main())
