"""Heads out: files that the EAGLE repository, vLLM, SGLang and speculators load.

The tests state what those loaders read: names, shapes, dtypes and fields.
A head of ours that scores with rows of its target's LM head gets those rows as its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from eagle_jax.config import DrafterConfig
from eagle_jax.drafters.feature import FeatureDrafter
from eagle_jax.drafters.formats.layout import LAYER, layout, shapes
from eagle_jax.errors import InputError
from eagle_jax.nn.modules import parameters
from eagle_jax.target.load import Target

FORMATS = {"eagle": "eagle", "eagle3": "eagle3", "speculators": "eagle3"}  # and their methods
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
SPECULATIVE_TOKENS = 4  # drafts a step that a speculators file proposes to its server


def export_head(
    drafter: FeatureDrafter,
    target: Target,
    format: str,
    folder: Path,
    *,
    verifier: str | None = None,
    architectures: Sequence[str] = ("LlamaForCausalLM",),
) -> None:
    """Writes `config.json` and `model.safetensors` of a bound head.

    Weights are written in the narrowest of bfloat16, float16 and float32 that holds every value of
    them exactly.

    Args:
      drafter: the head, bound to `target`.
      format: `eagle` (EAGLE-1/2), `eagle3`, or `speculators` (EAGLE-3).
      folder: where to, made if absent.
      verifier: the name by which a server of a speculators file finds the target; by default the
        target's own.
      architectures: those of the target's `config.json`, for the same file.

    Raises:
      InputError: the format cannot say what the head is.
    """
    if format not in FORMATS:
        raise InputError(f"expected a format of {', '.join(FORMATS)}, got {format!r}")
    config = drafter.head.config
    _refuse(drafter, format)
    tensors = _tensors(drafter, target, format)
    if format != "eagle":
        tensors |= _vocabulary(drafter, config)
    dtype = _exact_dtype(tensors.values())
    for name, array in tensors.items():
        if array.dtype == np.float32:
            tensors[name] = array.astype(DTYPES[dtype])
    layer = _layer_fields(config, target, dtype)
    if format == "eagle":
        fields = layer | {"architectures": ["LlamaForCausalLM"], "bias": config.fc_bias}
        fields["qkv_bias"] = config.qkv_bias
    elif format == "eagle3":
        fields = layer | {"architectures": ["LlamaForCausalLMEagle3"]} | _head_fields(config)
        fields["eagle_config"] = {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(config.taps),
        }
    else:
        fields = _speculators(config, layer, verifier or target.name, architectures)
    _store(folder, fields, tensors)


def _refuse(drafter: FeatureDrafter, format: str) -> None:
    """Refuses a head that the format has no words for."""
    config = drafter.head.config
    if drafter.method != FORMATS[format]:
        raise InputError(
            f"a head of the method {drafter.method!r} cannot be written in the format {format!r}"
        )
    if format == "eagle" and drafter.draft_ids is not None:
        raise InputError(
            f"EAGLE-1/2 files score the whole vocabulary ({config.vocab_size}), this head drafts "
            f"{config.draft_vocab_size} ids; train one with --draft-vocab {config.vocab_size}"
        )
    if format != "eagle" and config.fc_bias:
        raise InputError("EAGLE-3 files have no bias in `fc`, this head has one")
    if format == "speculators" and config.norm_before_fc and config.fc_norm:
        raise InputError("speculators files have norm_before_fc or fc_norm, this head has both")


def _tensors(drafter: FeatureDrafter, target: Target, format: str) -> dict[str, np.ndarray]:
    """Every weight in float32 by its name in the format."""
    head, kind = drafter.head, drafter.method
    ours = {n: np.asarray(a, np.float32) for n, a in parameters(head).items()}
    sizes = shapes(kind, head.config)
    found = {}
    for name, joined in layout(kind, head.config).items():
        at = np.cumsum([sizes[part][0] for part in joined])[:-1]
        found |= dict(zip(joined, np.split(ours[name], at), strict=True))
    if kind == "eagle3" and head.lm_head is None:
        rows = target.model.head_weight if drafter.head_rows is None else drafter.head_rows[...]
        found["lm_head.weight"] = np.asarray(rows, np.float32)
    if kind == "eagle" and head.embed is None:
        # Released files repeat the target's embedding.
        found["embed_tokens.weight"] = np.asarray(target.model.embed[...], np.float32)
    prefix = "midlayer." if format == "eagle3" else LAYER
    return {name.replace(LAYER, prefix): array for name, array in found.items()}


def _vocabulary(drafter: FeatureDrafter, config: DrafterConfig) -> dict[str, np.ndarray]:
    """`d2t` int64 offsets `[draft_vocab]` and `t2d` bool `[vocab]`."""
    every = np.arange(config.vocab_size)
    ids = every if drafter.draft_ids is None else np.asarray(drafter.draft_ids[...])
    offsets = ids.astype(np.int64) - np.arange(len(ids))
    return {"d2t": offsets, "t2d": np.isin(every, ids)}


def _exact_dtype(arrays) -> str:
    floats = [array for array in arrays if array.dtype == np.float32]
    for name, dtype in DTYPES.items():
        with np.errstate(over="ignore"):
            if all(np.array_equal(a.astype(dtype).astype(np.float32), a) for a in floats):
                return name
    raise InputError("the head holds values that are not numbers")


def _layer_fields(config: DrafterConfig, target: Target, dtype: str) -> dict[str, Any]:
    """The fields that any Llama configuration has."""
    return {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": target.config.context,
        "attention_bias": config.qkv_bias,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
    }


def _head_fields(config: DrafterConfig) -> dict[str, Any]:
    """The fields that EAGLE-3 adds."""
    fields: dict[str, Any] = {"draft_vocab_size": config.draft_vocab_size}
    for switch in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        fields[switch] = getattr(config, switch)
    if config.own_embed:  # tells the reference not to copy the target's embedding
        fields["target_hidden_size"] = config.feature_size
    return fields


def _speculators(
    config: DrafterConfig, layer: Mapping[str, Any], verifier: str, architectures: Sequence[str]
) -> dict[str, Any]:
    proposal = {"proposal_type": "greedy", "speculative_tokens": SPECULATIVE_TOKENS}
    return {
        "architectures": ["Eagle3Speculator"],
        "model_type": "speculators",
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        **_head_fields(config),
        "eagle_aux_hidden_state_layer_ids": list(config.taps),
        "tie_word_embeddings": False,
        "torch_dtype": layer["torch_dtype"],
        "transformer_layer_config": dict(layer),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": verifier, "architectures": list(architectures)},
        },
    }


def _store(folder: Path, fields: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> None:
    """Writes both files, the configuration last, so that a folder with one is whole."""
    from safetensors.numpy import save_file

    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").unlink(missing_ok=True)
        temporary = folder / "model.safetensors.part"
        whole = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
        save_file(whole, temporary, metadata={"format": "pt"})
        temporary.replace(folder / "model.safetensors")
        text = json.dumps(dict(fields), indent=2) + "\n"
        (folder / "config.json").write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write a head to {folder}: {error}") from error
