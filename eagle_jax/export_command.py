"""`eagle-jax export`, and the options that every command with a head takes."""

from __future__ import annotations

import argparse
from pathlib import Path

from eagle_jax.errors import InputError


def add_head_options(command: argparse.ArgumentParser) -> None:
    """Options that win over what a head's own file says, or leaves open."""
    command.add_argument(
        "--drafter-rope-theta", type=float, help="base of the head's rotary positions"
    )
    command.add_argument(
        "--drafter-layers", type=_layers, help="layers that an EAGLE-3 head reads, e.g. 2,16,29"
    )
    command.add_argument(
        "--norm-before-residual",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="residual variant of an EAGLE-3 head",
    )


def head_options(arguments: argparse.Namespace) -> dict:
    """The same as arguments of `load_drafter`."""
    return {
        "rope_theta": arguments.drafter_rope_theta,
        "layers": arguments.drafter_layers,
        "norm_before_residual": arguments.norm_before_residual,
    }


def add_export(commands) -> None:
    """Adds the command to the subparsers of `eagle-jax`."""
    export = commands.add_parser("export", help="write a head as other projects load it")
    export.add_argument("path", help="the head's folder, or auto")
    export.add_argument("--format", required=True, choices=("eagle", "eagle3", "speculators"))
    export.add_argument("--out", type=Path, required=True, help="folder to write")
    export.add_argument("--target", default="smollm2-135m", help="the head's target")
    export.add_argument(
        "--verifier", help="the target's name for a server (speculators); default as --target"
    )
    add_head_options(export)
    export.set_defaults(command=_export)


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected layers such as 2,16,29, got {text!r}") from None


def _export(arguments: argparse.Namespace) -> int:
    from eagle_jax import hub
    from eagle_jax.drafters.formats.write import export_head
    from eagle_jax.drafters.load import head_folder, load_drafter
    from eagle_jax.target.load import load_target, read_json

    folder = head_folder(arguments.path, arguments.target)
    if arguments.out.resolve() == folder.resolve():
        raise InputError(f"--out {arguments.out} is the folder of the head itself")
    raw = read_json(hub.resolve(arguments.target) / "config.json")
    target = load_target(arguments.target)
    drafter = load_drafter(arguments.path, target, **head_options(arguments))
    export_head(
        drafter.module,
        target,
        arguments.format,
        arguments.out,
        verifier=arguments.verifier,
        architectures=raw.get("architectures") or ("LlamaForCausalLM",),
    )
    print(f"{drafter.method} head written to {arguments.out} in the format {arguments.format}")
    return 0
