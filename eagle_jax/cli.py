"""The command line: `eagle-jax generate` and `bench`; other commands lie beside it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path

from eagle_jax.errors import EagleError, InputError
from eagle_jax.export_command import add_export, add_head_options, head_options
from eagle_jax.inspect_command import add_inspect

COMPARED = 3  # runs of each kind that `--compare` times


def main(argv: list[str] | None = None) -> int:
    """Runs a command; returns 0, 2 for bad input, 1 for other failures that we foresee."""
    arguments = parser().parse_args(argv)
    try:
        return arguments.command(arguments)
    except EagleError as error:
        print(f"eagle-jax: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has gone; keep Python from complaining once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="eagle-jax", description="EAGLE speculative decoding in JAX: same text, fewer passes."
    )
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    generate = commands.add_parser("generate", help="write an answer to a prompt")
    generate.add_argument("prompt", help="the user's message; '-' reads it from standard input")
    _common(generate)
    generate.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    generate.add_argument("--top-k", type=int, default=0, help="0 keeps every token (default)")
    generate.add_argument("--top-p", type=float, default=1.0)
    generate.add_argument("--seed", type=int, default=0)
    generate.add_argument("--max-new-tokens", type=int, default=256)
    generate.add_argument("--raw", action="store_true", help="no chat template")
    generate.add_argument(
        "--compare", action="store_true", help="decode plainly as well, and compare"
    )
    generate.add_argument("--json", action="store_true", help="print one JSON object, no stream")
    generate.set_defaults(command=_generate)

    bench = commands.add_parser("bench", help="measure plain and speculative decoding")
    bench.add_argument("--prompts", type=Path, required=True, help="JSON lines with `turns`")
    _common(bench)
    bench.add_argument("--temperature", type=float, default=0.0)
    bench.add_argument("--seed", type=int, default=0)
    bench.add_argument("--max-new-tokens", type=int, default=128)
    bench.add_argument("--runs", type=int, default=3, help="timed runs of each kind a prompt")
    bench.add_argument(
        "--uncoupled",
        action="store_true",
        help="draft without the noise that the target draws with, to see what sharing it gains",
    )
    bench.add_argument("--limit", type=int, help="use the first prompts only")
    bench.add_argument("--json", type=Path, help="write the report here")
    bench.add_argument(
        "--transformers",
        action="store_true",
        help="also time transformers' generate (needs torch) on the same prompts",
    )
    bench.set_defaults(command=_bench)
    add_export(commands)
    add_inspect(commands)
    return top


def _common(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--target",
        default="smollm2-135m",
        help="smollm2-135m (default), a folder, a .gguf file or a Hugging Face id",
    )
    command.add_argument(
        "--drafter",
        default="auto",
        help="auto (the head that ships for the target), none, ngram, layers:N (the target's own "
        "first layers), a draft model's folder or .gguf file, or a head's folder; +ngram after it, "
        "as in auto+ngram, merges n-grams into its tree"
        + ("; bench also takes replay" if "bench" in command.prog else ""),
    )
    add_head_options(command)
    command.add_argument("--nodes", type=int, help="tree nodes a pass, root included")
    command.add_argument("--depth", type=int, help="tree levels below the root")
    command.add_argument("--tree-top-k", type=int, help="children a node may have")
    command.add_argument(
        "--gate", type=float, help="probability of the best draft up to which none is checked"
    )


def _compilation_cache() -> None:
    """Keeps compiled programs between runs, unless the user has chosen a place."""
    import jax

    from eagle_jax import hub

    folder = hub.cache_root() / "compiled"
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


def tree_from(arguments: argparse.Namespace):
    """The tree asked for; None leaves the choice to the tuner."""
    from eagle_jax.config import TreeShape

    nodes, depth, top_k = arguments.nodes, arguments.depth, arguments.tree_top_k
    if nodes is None and depth is None and top_k is None and arguments.gate is None:
        return None
    if nodes is None:
        raise InputError("--depth, --tree-top-k and --gate need --nodes")
    if depth is None:
        depth = min(nodes - 1, 4 if nodes <= 8 else 6)
    if top_k is None:
        # The smallest width that fills the tree.
        top_k = 1
        while depth and top_k + (depth - 1) * top_k**2 < nodes - 1:
            top_k += 1
        top_k = min(max(top_k, 2 if nodes > depth + 1 else 1), max(nodes - 1, 1))
    return TreeShape(nodes, depth, top_k, arguments.gate or 0.0)


def _load(arguments: argparse.Namespace):
    from eagle_jax.drafters.load import load_drafter
    from eagle_jax.target.load import load_target

    tree = tree_from(arguments)
    target = load_target(arguments.target)
    if arguments.drafter == "replay":
        return target, None, tree
    drafter = load_drafter(arguments.drafter, target, **head_options(arguments))
    if drafter is not None and drafter.settings:
        chosen = "; ".join(map(str, drafter.settings))
        print(f"[head: {drafter.format}; {chosen}]", file=sys.stderr)
    return target, drafter, tree


def _generate(arguments: argparse.Namespace) -> int:
    from eagle_jax.config import Sampling
    from eagle_jax.decode.generate import generate, stream
    from eagle_jax.target.generation import differences

    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p)
    tree_from(arguments)
    if arguments.max_new_tokens < 1:
        raise InputError(f"--max-new-tokens must be at least 1, got {arguments.max_new_tokens}")
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    if not prompt.strip():
        raise InputError("the prompt is empty")
    _compilation_cache()
    target, drafter, tree = _load(arguments)
    if said := differences(target.generation_defaults, sampling):
        print(f"[{said}]", file=sys.stderr)
    options = {
        "max_new_tokens": arguments.max_new_tokens,
        "sampling": sampling,
        "seed": arguments.seed,
        "chat": not arguments.raw,
    }
    pieces = []
    run = stream(target, drafter, prompt, tree=tree, **options)
    write = _Writer(quiet=arguments.json)
    while True:
        try:
            pieces.append(next(run))
        except StopIteration as end:
            stats = end.value
            break
        write(pieces[-1])
    write.end()
    tokens = [piece.token for piece in pieces]
    report = {"text": "".join(p.text for p in pieces), "tokens": tokens, **_figures(stats)}
    report["drafted"] = [piece.drafted for piece in pieces]
    if arguments.compare:
        # They take turns and the fastest of each counts: one call says little on a busy machine.
        runs = [
            [generate(target, d, prompt, tree=tree, **options) for d in (None, drafter)]
            for _ in range(COMPARED)
        ]
        plain, again = (
            min(of, key=lambda run: run.stats.seconds) for of in zip(*runs, strict=True)
        )
        report["plain"] = _figures(plain.stats)
        report["tokens_per_s"] = again.stats.tokens_per_s
        report["identical"] = plain.tokens[0] == tokens
        report["speedup"] = plain.stats.seconds / again.stats.seconds
    if arguments.json:
        print(json.dumps(report))
    else:
        _summary(report)
    return 0


def _figures(stats) -> dict:
    return {
        "tau": stats.tau,
        "target_passes": stats.passes,
        "speculated_passes": stats.speculated,
        "tokens_per_s": stats.tokens_per_s,
        "acceptance_by_depth": stats.acceptance_by_depth,
        "tree": dataclasses.asdict(stats.shape),
    }


def _summary(report: dict) -> None:
    tree = report["tree"]
    print(
        f"[{len(report['tokens'])} tokens, tau {report['tau']:.2f}, {report['target_passes']} "
        f"target passes, {report['tokens_per_s']:.1f} tokens/s; tree of {tree['nodes']} nodes, "
        f"depth {tree['depth']}, in {report['speculated_passes']} passes]",
        file=sys.stderr,
    )
    if plain := report.get("plain"):
        same = "identical" if report["identical"] else "NOT identical"
        print(
            f"[plain: {plain['target_passes']} target passes, "
            f"{plain['tokens_per_s']:.1f} tokens/s; {report['speedup']:.2f}x; "
            f"the tokens are {same}]",
            file=sys.stderr,
        )


class _Writer:
    """Streams text; accepted drafts are green and underlined where the terminal has colours."""

    def __init__(self, quiet: bool):
        from rich.console import Console

        self.quiet, self.console = quiet, Console(highlight=False, soft_wrap=True)

    def __call__(self, piece) -> None:
        if not self.quiet and piece.text:
            from rich.text import Text

            style = "underline green" if piece.drafted else ""
            self.console.print(Text(piece.text, style=style), end="")
            sys.stdout.flush()

    def end(self) -> None:
        if not self.quiet:
            self.console.print()


def _bench(arguments: argparse.Namespace) -> int:
    from eagle_jax.bench.prompts import read_prompts
    from eagle_jax.bench.report import show
    from eagle_jax.bench.run import bench
    from eagle_jax.config import Sampling
    from eagle_jax.target.generation import differences

    if arguments.runs < 1:
        raise InputError(f"--runs must be at least 1, got {arguments.runs}")
    if arguments.json and not arguments.json.absolute().parent.is_dir():
        raise InputError(f"the folder of --json {arguments.json} does not exist")
    sampling = Sampling(arguments.temperature)
    prompts = read_prompts(arguments.prompts)[: arguments.limit]
    target, drafter, tree = _load(arguments)
    if arguments.uncoupled:
        if drafter is None or not hasattr(drafter.module, "coupled"):
            raise InputError(f"--uncoupled needs a head, got --drafter {arguments.drafter}")
        drafter.module.coupled = False
    if said := differences(target.generation_defaults, sampling):
        print(f"[{said}]", file=sys.stderr)
    report = bench(
        target,
        drafter,
        prompts,
        tree=tree,
        replay=arguments.drafter == "replay",
        max_new_tokens=arguments.max_new_tokens,
        runs=arguments.runs,
        sampling=sampling,
        seed=arguments.seed,
        transformers=arguments.transformers,
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    show(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
