"""The tensors of released heads: their names, their shapes, and where they lie in our modules.

One table serves both directions. Names are those of the EAGLE repository without prefixes, with
`layers.0.` for the one layer, which EAGLE-3 files also call `midlayer.`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from eagle_jax.config import DrafterConfig
from eagle_jax.errors import FormatError, InputError

LAYER = "layers.0."
VOCABULARY = ("d2t", "t2d")
_MEDUSA = re.compile(r"(medusa_heads?\.)?\d+\.\d+\.(linear\.)?(weight|bias)")


def canonical(tensors: Mapping[str, np.ndarray], where: object) -> dict[str, np.ndarray]:
    """Tensors by their names in the table.

    Raises:
      FormatError: two tensors become one, such as `midlayer.x` and `layers.0.x`.
    """
    found: dict[str, np.ndarray] = {}
    for name, array in tensors.items():
        short = name.removeprefix("model.")
        if short.startswith("midlayer."):
            short = LAYER + short.removeprefix("midlayer.")
        if short in found:
            raise FormatError(f"{where} holds {short} twice, once as {name}; expected it once")
        found[short] = array
    return found


def kind_of(tensors: Mapping[str, np.ndarray], where: object) -> str:
    """`eagle` or `eagle3`, by what attention reads: a feature, or a feature and an embedding.

    Raises:
      InputError: a Medusa head.
      FormatError: the tensors are those of no head that is known here.
    """
    if tensors and all(_MEDUSA.fullmatch(name) for name in tensors):
        raise InputError(f"{where} is a Medusa head; EAGLE heads are loaded here, Medusa's are not")
    attention = f"{LAYER}self_attn."
    needed = ("fc.weight", f"{attention}q_proj.weight", f"{attention}o_proj.weight")
    shapes = [tensors[name].shape for name in needed if name in tensors]
    if len(shapes) != len(needed) or any(len(shape) != 2 for shape in shapes):
        raise FormatError(
            f"{where} is no EAGLE head: expected matrices {', '.join(needed)} (or `midlayer.`), "
            f"found {_shown(tensors)}"
        )
    reads, hidden = shapes[1][1], shapes[2][0]
    marked = f"{LAYER}hidden_norm.weight" in tensors
    if (reads, marked) not in ((hidden, False), (2 * hidden, True)):
        raise FormatError(
            f"{where}: expected queries that read {hidden} values (EAGLE-1/2), or {2 * hidden} "
            f"with a hidden_norm (EAGLE-3), found {reads} {'with' if marked else 'without'} one"
        )
    return "eagle3" if marked else "eagle"


def layout(kind: str, config: DrafterConfig) -> dict[str, tuple[str, ...]]:
    """Parameter of our module -> the tensors whose rows it joins."""
    attention, prefix = f"{LAYER}self_attn.", "layer." if kind == "eagle" else ""
    ends = (".weight", ".bias") if config.qkv_bias else (".weight",)
    table = {
        f"{prefix}attention.qkv{end}": tuple(f"{attention}{x}_proj{end}" for x in "qkv")
        for end in ends
    }
    table |= {
        f"{prefix}attention.out.weight": (f"{attention}o_proj.weight",),
        f"{prefix}mlp_norm.weight": (f"{LAYER}post_attention_layernorm.weight",),
        f"{prefix}mlp.gate_up.weight": tuple(f"{LAYER}mlp.{x}_proj.weight" for x in ("gate", "up")),
        f"{prefix}mlp.down.weight": (f"{LAYER}mlp.down_proj.weight",),
        "fc.weight": ("fc.weight",),
    }
    if kind == "eagle3":
        table["embed_norm.weight"] = (f"{LAYER}input_layernorm.weight",)
        table["hidden_norm.weight"] = (f"{LAYER}hidden_norm.weight",)
        table["norm.weight"] = ("norm.weight",)
    if config.fc_bias:
        table["fc.bias"] = ("fc.bias",)
    if config.own_lm_head:
        table["lm_head"] = ("lm_head.weight",)
    if config.own_embed:
        table["embed"] = ("embed_tokens.weight",)
    if config.norm_before_fc:
        table["taps_norm.weight"] = ("input_norm.weight",)
    if config.fc_norm:
        for tap in range(len(config.taps)):
            table[f"tap_norms.{tap}.weight"] = (f"fc_norm.{tap}.weight",)
    return table


def shapes(kind: str, config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of `layout`."""
    hidden, inner, feature = config.hidden_size, config.intermediate_size, config.feature_size
    queries, keys = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
    reads, taps = (hidden, 1) if kind == "eagle" else (2 * hidden, len(config.taps))
    fused = 2 * hidden if kind == "eagle" else taps * feature
    attention = f"{LAYER}self_attn."
    sizes = {
        f"{attention}q_proj.weight": (queries, reads),
        f"{attention}k_proj.weight": (keys, reads),
        f"{attention}v_proj.weight": (keys, reads),
        f"{attention}q_proj.bias": (queries,),
        f"{attention}k_proj.bias": (keys,),
        f"{attention}v_proj.bias": (keys,),
        f"{attention}o_proj.weight": (hidden, queries),
        f"{LAYER}mlp.gate_proj.weight": (inner, hidden),
        f"{LAYER}mlp.up_proj.weight": (inner, hidden),
        f"{LAYER}mlp.down_proj.weight": (hidden, inner),
        "fc.weight": (hidden, fused),
        "input_norm.weight": (fused,),
        "lm_head.weight": (config.draft_vocab_size, hidden),
        "embed_tokens.weight": (config.vocab_size, hidden),
    }
    sizes |= {f"fc_norm.{tap}.weight": (feature,) for tap in range(taps)}
    names = [name for joined in layout(kind, config).values() for name in joined]
    return {name: sizes.get(name, (hidden,)) for name in names}


def check_tensors(
    tensors: Mapping[str, np.ndarray], expected: Mapping[str, tuple[int, ...]], where: object
) -> None:
    """Refuses missing, unknown and misshapen tensors, other dtypes than floats, and NaN.

    Raises:
      FormatError: with what was expected and what was found.
    """
    weights = {name: array for name, array in tensors.items() if name not in VOCABULARY}
    missing = sorted(expected.keys() - weights.keys())
    extra = sorted(weights.keys() - expected.keys())
    if missing or extra:
        raise FormatError(
            f"{where} does not hold the tensors that its config.json promises: missing "
            f"{_shown(missing)}, unexpected {_shown(extra)}"
        )
    for name, shape in expected.items():
        array = weights[name]
        if array.shape != shape:
            raise FormatError(f"{where}: {name} should have shape {shape}, found {array.shape}")
        # ml_dtypes' bfloat16 is of no kind that NumPy knows.
        if array.dtype.kind != "f" and array.dtype.name != "bfloat16":
            raise FormatError(f"{where}: {name} should hold floats, found {array.dtype}")
        if not np.isfinite(array).all():
            raise FormatError(f"{where}: {name} holds values that are not finite")


def draft_ids(tensors: Mapping[str, np.ndarray], vocab_size: int, where: object) -> np.ndarray:
    """Target id of each draft id, of the offsets `d2t` `[draft_vocab]`.

    Raises:
      FormatError: the ids do not rise within the vocabulary, or `t2d` marks others.
    """
    offsets = tensors["d2t"]
    if offsets.ndim != 1 or offsets.dtype not in (np.int64, np.int32):
        raise FormatError(
            f"{where}: d2t should be a vector of int64, found {offsets.dtype} {offsets.shape}"
        )
    ids = offsets.astype(np.int64) + np.arange(len(offsets))
    if not len(ids) or ids[0] < 0 or ids[-1] >= vocab_size or (np.diff(ids) <= 0).any():
        raise FormatError(
            f"{where}: d2t should hold offsets, draft id + offset = target id, that rise within "
            f"[0, {vocab_size})"
        )
    if "t2d" in tensors:
        marks = tensors["t2d"]
        if marks.dtype != np.bool_ or marks.shape != (vocab_size,):
            raise FormatError(
                f"{where}: t2d should be {vocab_size} bools, found {marks.dtype} {marks.shape}"
            )
        if not np.array_equal(np.flatnonzero(marks), ids):
            raise FormatError(f"{where}: t2d marks other ids than d2t gives")
    return ids


def _shown(names) -> str:
    names = list(names)
    return (", ".join(map(str, names[:4])) or "none") + (", ..." if len(names) > 4 else "")
