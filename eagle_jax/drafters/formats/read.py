"""Heads in: EAGLE-1/2/3 as released, third-party EAGLE-3, and the speculators format.

The kind is told from tensors and their shapes. Sizes come from shapes; whatever `config.json` says
of them must agree.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from eagle_jax.config import DrafterConfig, default_taps
from eagle_jax.drafters.eagle import EagleHead
from eagle_jax.drafters.eagle3 import Eagle3Head
from eagle_jax.drafters.feature import Head
from eagle_jax.drafters.formats.layout import (
    LAYER,
    canonical,
    check_tensors,
    draft_ids,
    kind_of,
    layout,
    shapes,
)
from eagle_jax.drafters.formats.settings import Overrides, Raw, Setting
from eagle_jax.drafters.formats.tensors import read_tensors
from eagle_jax.errors import FormatError, InputError
from eagle_jax.nn.modules import fill
from eagle_jax.target.load import Target

HEADS = {kind.method: kind for kind in (EagleHead, Eagle3Head)}
TAPS = 3  # layers that a head fuses where its configuration does not name them


@dataclasses.dataclass(frozen=True, eq=False)
class HeadFile:
    """A released head, read and checked, before it meets a target.

    Attributes:
      format: `EAGLE-1/2`, `EAGLE-3` or `speculators EAGLE-3`.
      kind: `eagle` or `eagle3`.
      config: its sizes and switches. Its taps count the layers even where nobody names them.
      layers: the layers that are named, None for the default of the target's depth.
      tensors: by canonical name, in the dtypes of the file.
      draft_ids: `[draft_vocab]` ascending target ids, None for the full vocabulary.
      settings: what was chosen, and why.
    """

    format: str
    kind: str
    config: DrafterConfig
    layers: tuple[int, ...] | None
    tensors: dict[str, np.ndarray]
    draft_ids: np.ndarray | None
    settings: tuple[Setting, ...]


def read_head(folder: Path, fields: dict[str, Any], overrides: Overrides) -> HeadFile:
    """Reads the head of a folder whose `config.json` holds `fields`.

    Raises:
      InputError: a head of another method, or with a switch that is not supported.
      FormatError: a missing, unknown or misshapen tensor, values that are not finite, or tensors
        and configuration that disagree.
    """
    if "medusa_num_heads" in fields:
        raise InputError(f"{folder} is a Medusa head; EAGLE heads are loaded here, Medusa's not")
    raw = Raw(fields, folder / "config.json")
    tensors = canonical(read_tensors(folder), folder)
    kind = kind_of(tensors, folder)
    raw.refuse_variants()
    named = raw.layers() if kind == "eagle3" else None
    if overrides.layers is not None and kind != "eagle3":
        raise InputError(f"{folder} is an EAGLE-1/2 head, which reads no layers to choose")
    layers = named if overrides.layers is None else overrides.layers
    rope, residual = raw.rope(overrides.rope_theta), raw.residual(overrides.norm_before_residual)
    if kind == "eagle" and residual.source == "option":
        raise InputError(f"{folder} is an EAGLE-1/2 head, whose residual has no variants")
    try:
        config = DrafterConfig(
            **_sizes(kind, raw, tensors, layers, folder),
            rope_theta=rope.value,
            norm_before_residual=residual.value if kind == "eagle3" else False,
        )
    except FormatError:
        raise
    except InputError as error:
        raise FormatError(f"{raw.where} or its tensors: {error}") from error
    check_tensors(tensors, shapes(kind, config), folder)
    settings = [rope]
    if kind == "eagle3":
        source = "default of the target's depth" if layers is None else "config.json"
        source = source if overrides.layers is None else "option"
        settings += [Setting("capture layers", layers, source), residual]
    ids = _ids(kind, config, tensors, folder)
    name = "EAGLE-1/2" if kind == "eagle" else "EAGLE-3"
    name = f"speculators {name}" if raw.speculators else name
    return HeadFile(name, kind, config, layers, tensors, ids, tuple(settings))


def build(file: HeadFile, target: Target) -> tuple[Head, tuple[Setting, ...]]:
    """The head as a module in the target's dtype, and what was chosen for it.

    Its own embedding is kept where it differs from the target's.

    Raises:
      InputError: the head belongs to another target.
    """
    config, chosen = file.config, list(file.settings)
    check_fit(config, target.config, target.name)
    if config.taps and file.layers is None:
        config = dataclasses.replace(config, taps=default_taps(target.config.num_layers))
        at = next(i for i, setting in enumerate(chosen) if setting.name == "capture layers")
        chosen[at] = dataclasses.replace(chosen[at], value=config.taps)
    source = "the target's, as the file has none"
    if config.own_embed:
        difference = _difference(file.tensors["embed_tokens.weight"], target.model.embed[...])
        source = "its own, of another width than the target's"
        if difference is not None:
            same = difference <= 2**-8  # the rounding of bfloat16
            config = dataclasses.replace(config, own_embed=not same)
            source = "the target's, which the file repeats"
            if not same:
                source = f"its own, which differs from the target's by up to {difference:.2g}"
    chosen.append(Setting("embedding", "own" if config.own_embed else "shared", source))
    arrays = {
        ours: jnp.asarray(np.concatenate([file.tensors[name] for name in names]), target.dtype)
        for ours, names in layout(file.kind, config).items()
    }
    kind = HEADS[file.kind]
    return fill(lambda: kind(config, rngs=nnx.Rngs(0)), arrays), tuple(chosen)


def check_fit(config: DrafterConfig, target, name: str) -> None:
    """Refuses a head for a target (a `ModelConfig`) of another width, vocabulary or depth.

    Raises:
      InputError: with both sides.
    """
    for field, ours, theirs in (
        ("hidden_size", config.feature_size, target.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
    ):
        if ours != theirs:
            raise InputError(
                f"this head was made for a target with {field}={ours}, but {name!r} has "
                f"{theirs}; load the head that belongs to the target"
            )
    if not all(0 <= tap <= target.num_layers for tap in config.taps):
        raise InputError(
            f"this head reads the layers {config.taps}, but {name!r} has {target.num_layers}; load "
            "the head that belongs to the target, or name others"
        )


def _difference(theirs: np.ndarray, ours) -> float | None:
    """The largest difference of two embeddings by their largest value; None for other widths."""
    if theirs.shape != ours.shape:
        return None
    ours = np.asarray(ours, np.float32)
    scale = max(float(np.abs(ours).max()), 1e-30)
    return float(np.abs(theirs.astype(np.float32) - ours).max()) / scale


def _sizes(
    kind: str, raw: Raw, tensors: dict[str, np.ndarray], layers: tuple | None, folder: Path
) -> dict[str, Any]:
    """The fields of `DrafterConfig` that shapes and configuration give together."""
    attention = f"{LAYER}self_attn."
    gate, k = f"{LAYER}mlp.gate_proj.weight", f"{attention}k_proj.weight"
    for name in (gate, k) + (("lm_head.weight",) if kind == "eagle3" else ()):
        if name not in tensors or tensors[name].ndim != 2:
            raise FormatError(f"{folder}: expected a matrix {name}, found none")
    hidden, queries = tensors[f"{attention}o_proj.weight"].shape
    heads = raw.need("num_attention_heads", int)
    if heads < 1 or queries % heads or tensors[k].shape[0] % max(queries // heads, 1):
        raise FormatError(
            f"{folder}: {queries} query rows and {tensors[k].shape[0]} key rows do not make "
            f"{heads} heads of one size"
        )
    head_dim = max(queries // heads, 1)
    found = {
        "hidden_size": hidden,
        "intermediate_size": tensors[gate].shape[0],
        "num_kv_heads": tensors[k].shape[0] // head_dim,
        "head_dim": head_dim,
    }
    vocab = raw.need("vocab_size", int)
    sizes = {"num_heads": heads, "vocab_size": vocab, "draft_vocab_size": vocab, **found}
    sizes |= {
        "norm_eps": raw.need("rms_norm_eps", float),
        "own_embed": "embed_tokens.weight" in tensors,
    }
    fused = tensors["fc.weight"].shape[1]
    stated = {**found, "num_key_value_heads": found["num_kv_heads"]}
    if kind == "eagle3":
        taps = TAPS if layers is None else len(layers)
        if fused % taps:
            raise FormatError(f"{folder}: fc reads {fused} values, which {taps} layers cannot give")
        found_vocab = tensors["lm_head.weight"].shape[0]
        stated |= {"target_hidden_size": fused // taps, "draft_vocab_size": found_vocab}
        sizes |= {
            "draft_vocab_size": found_vocab,
            "target_hidden_size": 0 if fused == taps * hidden else fused // taps,
            "taps": tuple(range(taps)) if layers is None else layers,
            "own_lm_head": True,
            "fc_bias": raw.get("bias", bool, False) and "fc.bias" in tensors,
            "norm_before_fc": raw.get("norm_before_fc", bool, False),
            "fc_norm": raw.get("fc_norm", bool, False),
            "norm_output": raw.get("norm_output", bool, False)
            or raw.get("return_hidden_post_norm", bool, False),
        }
    else:
        sizes["fc_bias"] = raw.get("bias", bool, True)
    # Older files do not say; those of other trainers call it attention_bias.
    sizes["qkv_bias"] = raw.get("qkv_bias", bool, raw.get("attention_bias", bool)) or (
        f"{attention}q_proj.bias" in tensors
    )
    for name, size in stated.items():
        if raw.get(name, int, size) != size:
            raise FormatError(
                f"{folder}: config.json says {name}={raw.get(name, int)}, but the tensors have "
                f"{size}"
            )
    return sizes


def _ids(kind: str, config: DrafterConfig, tensors, folder: Path) -> np.ndarray | None:
    """Target ids of a reduced draft vocabulary, or None."""
    vocab, drafts = config.vocab_size, config.draft_vocab_size
    if kind == "eagle" and (extra := [name for name in ("d2t", "t2d") if name in tensors]):
        raise FormatError(f"{folder}: unexpected {extra} in an EAGLE-1/2 head")
    if "d2t" not in tensors:
        if drafts != vocab:
            raise FormatError(
                f"{folder}: d2t is missing, which says what the {drafts} draft ids of {vocab} mean"
            )
        return None
    ids = draft_ids(tensors, vocab, folder)
    if len(ids) != drafts:
        raise FormatError(f"{folder}: expected d2t with {drafts} offsets, found {len(ids)}")
    return None if drafts == vocab else ids
