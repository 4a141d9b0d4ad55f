"""`eagle-jax inspect`: what a folder holds, what it takes to run, and what fits together."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from eagle_jax.errors import InputError
from eagle_jax.export_command import add_head_options, head_options


def add_inspect(commands) -> None:
    """Adds the command to the subparsers of `eagle-jax`."""
    inspect = commands.add_parser(
        "inspect", help="say what a target or a head is, what it needs, and whether both fit"
    )
    inspect.add_argument("path", help="a target or a head, named as for generate")
    inspect.add_argument("--target", help="the target to fit with, where the path is a head")
    inspect.add_argument("--drafter", help="the head to fit with, where the path is a target")
    add_head_options(inspect)
    inspect.add_argument("--length", type=int, help="tokens of a row (default: the context)")
    inspect.add_argument("--batch", type=int, default=1, help="rows (default: 1)")
    inspect.add_argument("--nodes", type=int, default=32, help="tree nodes (default: 32)")
    inspect.add_argument("--depth", type=int, default=6, help="tree levels (default: 6)")
    inspect.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of weights and caches (default: as this machine would load them)",
    )
    inspect.add_argument("--json", action="store_true", help="print one JSON object")
    inspect.set_defaults(command=_inspect)


def _inspect(arguments: argparse.Namespace) -> int:
    import jax.numpy as jnp

    from eagle_jax import hub
    from eagle_jax.config import TreeShape
    from eagle_jax.drafters.formats.settings import Overrides
    from eagle_jax.drafters.load import head_folder
    from eagle_jax.overview import head_facts, is_head, memory, misfit, target_facts
    from eagle_jax.target.load import default_dtype

    if min(arguments.batch, 1 if arguments.length is None else arguments.length) < 1:
        raise InputError("--batch and --length must be at least 1")
    nodes, depth = arguments.nodes, min(arguments.depth, arguments.nodes - 1)
    shape = TreeShape(nodes, depth, max(1, nodes - 1))
    path = arguments.path
    folder = Path(path).expanduser()
    heads = path == "auto" or ((folder / "config.json").is_file() and is_head(folder))
    if arguments.target and not heads:
        raise InputError(f"{path} is a target; name its head with --drafter, not --target")
    if arguments.drafter and heads:
        raise InputError(f"{path} is a head; name its target with --target, not --drafter")
    target_name = arguments.target if heads else path
    if path == "auto" and target_name is None:
        target_name = hub.DEFAULT_TARGET
    head_name = path if heads else arguments.drafter
    # The head first: where it is corrupt, no target need be fetched.
    head = target = None
    if head_name not in (None, "none"):
        overrides = Overrides(**head_options(arguments))
        head = head_facts(head_folder(head_name, target_name), overrides)
    if target_name is not None:
        target = target_facts(hub.resolve(target_name))

    report: dict[str, Any] = {}
    if target is not None:
        report["target"] = {"name": target_name, **_plain(target)}
    if head is not None:
        report["head"] = {"name": head_name, **_plain(head)}
    if target is not None:
        why = None if head is None else misfit(head, target.config, target_name)
        if head is not None:
            report["fits"], report["misfit"] = why is None, why
        length = arguments.length or target.config.context
        dtype = jnp.dtype(arguments.dtype or default_dtype())
        fitting = head if why is None else None
        parts = memory(
            target.config, fitting, length=length, batch=arguments.batch, shape=shape, dtype=dtype
        )
        report["memory"] = {
            "length": length,
            "batch": arguments.batch,
            "nodes": nodes,
            "depth": depth,
            "dtype": dtype.name,
            "bytes": parts,
            "total": sum(parts.values()),
        }
    if arguments.json:
        print(json.dumps(report))
    else:
        _show(report)
    return 0 if report.get("fits", True) else 1


def _plain(facts) -> dict[str, Any]:
    """The facts as JSON knows them."""
    return {**dataclasses.asdict(facts), "folder": str(facts.folder)}


def _show(report: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)

    def table(title: str, rows: list[tuple[str, Any]], justify="left") -> None:
        made = Table(title=title, title_justify="left", show_header=False, box=box.SIMPLE)
        made.add_column(no_wrap=True)
        made.add_column(justify=justify)
        for name, value in rows:
            made.add_row(name, str(value))
        console.print(made)

    if "target" in report:
        table(f"target {report['target']['name']}", _target_rows(report["target"]))
    if "head" in report:
        table(f"head {report['head']['name']}", _head_rows(report["head"], report.get("target")))
    if memory := report.get("memory"):
        rows = [(name, _size(size)) for name, size in memory["bytes"].items()]
        rows.append(("total", _size(memory["total"])))
        title = (
            f"memory: {memory['batch']} x {memory['length']} tokens, a tree of {memory['nodes']} "
            f"nodes and depth {memory['depth']}, {memory['dtype']}"
        )
        table(title, rows, "right")
    if "fits" in report:
        said = "target and head fit together" if report["fits"] else report["misfit"]
        console.print(said, soft_wrap=True)
    elif "head" in report:
        console.print("name its target with --target to see whether both fit", soft_wrap=True)


def _target_rows(target: dict[str, Any]) -> list[tuple[str, Any]]:
    config = target["config"]
    stored = ", ".join(f"{_size(size)} {kind}" for kind, size in target["stored"].items())
    head_of = "the embedding matrix" if config["tied"] else "a matrix of its own"
    rows = [
        ("family", config["family"]),
        ("parameters", f"{target['parameters']:,}"),
        ("stored", f"{stored} in {target['files']} file{'s' * (target['files'] > 1)}"),
        ("layers", config["num_layers"]),
        ("hidden size", f"{config['hidden_size']}, feed-forward {config['intermediate_size']}"),
        ("attention", _attention(config)),
        ("vocabulary", f"{config['vocab_size']:,}; LM head is {head_of}"),
        ("context", f"{config['context']:,} tokens"),
        ("end of sequence", ", ".join(map(str, target["eos"])) or "none"),
        ("chat template", "yes" if target["chat_template"] else "no"),
    ]
    if windows := [layer["window"] for layer in config["layers"] if layer["window"]]:
        rows.insert(6, ("sliding window", f"{windows[0]} tokens in {len(windows)} layers"))
    if experts := next((layer["experts"] for layer in config["layers"] if layer["experts"]), None):
        rows.insert(5, ("experts", f"{experts['active']} of {experts['count']} a token"))
    if defaults := target["generation_defaults"]:
        rows.append(("suggests", ", ".join(f"{k}={v}" for k, v in defaults.items())))
    return rows


def _head_rows(head: dict[str, Any], target: dict[str, Any] | None) -> list[tuple[str, Any]]:
    config, layers = head["config"], head["layers"]
    if head["method"] == "eagle":
        reads = "the target's features after its last layer"
    elif layers is not None:
        reads = f"the inputs of layers {', '.join(map(str, layers))}"
    else:
        reads = f"{len(config['taps'])} layers that the target's depth decides"
    scored = f"{config['draft_vocab_size']:,} of {config['vocab_size']:,} tokens"
    if config["draft_vocab_size"] == config["vocab_size"]:
        scored = f"all {config['vocab_size']:,} tokens"
    rows = [
        ("format", head["format"]),
        ("method", head["method"]),
        ("made for", head["target"] or "(the file does not say)"),
        ("parameters", f"{head['parameters']:,}"),
        ("hidden size", f"{config['hidden_size']}, feed-forward {config['intermediate_size']}"),
        ("attention", _attention(config)),
        ("reads", reads),
        ("draft vocabulary", f"{scored}; LM head is {_whose(config['own_lm_head'])}"),
        ("embedding", _whose(config["own_embed"])),
    ]
    rows += [("setting", text) for text in head["settings"]]
    for row in head["tau"]:
        tree = f"{row['nodes']} nodes, depth {row['depth']}, top-k {row['top_k']}"
        rows.append(("measured tau", f"{row['tau']:.2f} with {tree}"))
    return rows


def _attention(config: dict[str, Any]) -> str:
    return (
        f"{config['num_heads']} heads of {config['head_dim']}, {config['num_kv_heads']} for keys "
        f"and values, rotary base {config['rope_theta']:,.0f}"
    )


def _whose(own: bool) -> str:
    return "its own" if own else "the target's"


def _size(count: int) -> str:
    """Bytes for people, in powers of 1024."""
    size, units = float(count), ("B", "KiB", "MiB", "GiB", "TiB")
    for unit in units:
        if size < 1024 or unit == units[-1]:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError
