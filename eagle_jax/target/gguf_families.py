"""Architectures of GGUF files: their metadata as a `config.json`, their tensors by both names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from eagle_jax.errors import FormatError

Expected = dict[str, tuple[str, tuple[int, ...]]]

_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_GEMMA_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


@dataclasses.dataclass(frozen=True)
class Architecture:
    """What a GGUF architecture is in Hugging Face's terms.

    Attributes:
      model_type: of `config.json`.
      model_class: of transformers.
      norms: modules that are norms, by GGUF's name of their weight.
      bias: q, k and v have a bias.
      permuted: rows of q and k come in llama.cpp's order.
      shifted_norms: norm weights come with the one added that Gemma's norms add themselves.
    """

    model_type: str
    model_class: str
    norms: Mapping[str, str]
    bias: bool = False
    permuted: bool = False
    shifted_norms: bool = False


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", _NORMS, permuted=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _NORMS, bias=True),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", {**_NORMS, **_QK_NORMS}),
    "gemma3": Architecture(
        "gemma3_text", "Gemma3ForCausalLM", {**_GEMMA_NORMS, **_QK_NORMS}, shifted_norms=True
    ),
}


def architecture(metadata: Any) -> Architecture:
    """The file's architecture; FormatError where it is not supported."""
    found = metadata.get("general.architecture")
    if found not in ARCHITECTURES:
        known = ", ".join(map(repr, ARCHITECTURES))
        raise FormatError(f"{metadata.path}: expected one of {known}, found {found!r}")
    return ARCHITECTURES[found]


def config(metadata: Any) -> dict[str, Any]:
    """The content of `config.json`, as transformers writes it.

    Args:
      metadata: has `path`, `get(key[, default])` and `number(key[, default])`.
    """
    path, kind, name = metadata.path, architecture(metadata), metadata.get("general.architecture")

    def number(key: str, *default: Any) -> int | float:
        return metadata.number(f"{name}.{key}", *default)

    if metadata.number("split.count", 1) > 1:
        raise FormatError(f"{path} is one part of a split model; merge the parts into one file")
    if number("expert_count", 0) > 0:
        raise FormatError(f"{path}: mixture-of-experts models are not supported")
    hidden, heads = int(number("embedding_length")), int(number("attention.head_count"))
    head_dim = int(number("attention.key_length", hidden // max(heads, 1)))
    rotary = int(number("rope.dimension_count", head_dim))
    if rotary != head_dim:
        raise FormatError(
            f"{path}: expected rotary angles over the whole head ({head_dim}), found {rotary}"
        )
    ends = [metadata.get(f"tokenizer.ggml.{kind}_token_id", None) for kind in ("eos", "eot", "eom")]
    ends = list(dict.fromkeys(end for end in ends if end is not None))
    vocab_size = number("vocab_size", len(metadata.get("tokenizer.ggml.tokens")))
    content = {
        "architectures": [kind.model_class],
        "model_type": kind.model_type,
        "vocab_size": int(vocab_size),
        "hidden_size": hidden,
        "intermediate_size": int(number("feed_forward_length")),
        "num_hidden_layers": int(number("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(number("attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "max_position_embeddings": int(number("context_length")),
        "rms_norm_eps": _shortest(number("attention.layer_norm_rms_epsilon")),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id", None),
        "eos_token_id": ends[0] if len(ends) == 1 else (ends or None),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id", None),
        "torch_dtype": "float32",
    }
    scaling = metadata.get(f"{name}.rope.scaling.type", "none")
    if scaling == "linear":
        factor = _shortest(number("rope.scaling.factor"))
        content["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    elif scaling != "none":
        raise FormatError(f"{path}: rotary scaling {scaling!r} is not supported")
    if name == "gemma3":
        return content | _gemma3(number, hidden, heads, head_dim)
    biases = {"attention_bias": False, "mlp_bias": False} if name == "llama" else {}
    theta = _shortest(number("rope.freq_base", 10_000.0))
    return content | {"hidden_act": "silu", **biases, "rope_theta": theta}


def _gemma3(number: Any, hidden: int, heads: int, head_dim: int) -> dict[str, Any]:
    """What llama.cpp's code for Gemma 3 holds and the file does not say."""
    layers = int(number("block_count"))
    scalar = hidden // heads if layers == 62 else head_dim  # the 27B model alone differs
    cap = number("final_logit_softcapping", 0)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": int(number("attention.sliding_window")),
        "sliding_window_pattern": 6,
        "rope_theta": _shortest(number("rope.freq_base", 1_000_000.0)),
        "rope_local_base_freq": _shortest(number("rope.freq_base_swa", 10_000.0)),
        "final_logit_softcapping": _shortest(cap) if cap else None,
    }


def llama3_scaling(factors: np.ndarray, theta: float, head_dim: int) -> dict[str, Any] | None:
    """The `rope_scaling` that Llama 3.1 and 3.2 were converted from.

    GGUF keeps `factors` `[head_dim / 2]` that frequencies are divided by, where `config.json` has
    their rule. None where the factors do not follow that rule with the constants of those models.
    """
    factor, low, high, context = float(factors.max()), 1.0, 4.0, 8192
    frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    kept = np.clip((context * frequencies / (2 * np.pi) - low) / (high - low), 0, 1)
    expected = 1 / ((1 - kept) / factor + kept)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        return None
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": context,
    }


def expected_tensors(content: Mapping[str, Any], kind: Architecture) -> Expected:
    """GGUF name -> (Hugging Face name, shape) of every tensor that such a model may have."""
    hidden, inner, vocab = (content[f"{k}_size"] for k in ("hidden", "intermediate", "vocab"))
    queries = content["num_attention_heads"] * content["head_dim"]
    keys = content["num_key_value_heads"] * content["head_dim"]
    shapes = {
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, queries),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
        **dict.fromkeys(_QK_NORMS, (content["head_dim"],)),
    }
    expected = {
        "token_embd.weight": ("model.embed_tokens.weight", (vocab, hidden)),
        "output_norm.weight": ("model.norm.weight", (hidden,)),
        "output.weight": ("lm_head.weight", (vocab, hidden)),
    }
    for layer in range(content["num_hidden_layers"]):
        ours, theirs = f"model.layers.{layer}.", f"blk.{layer}."
        for part, module in {**_ATTENTION, **_MLP, **kind.norms}.items():
            shape = shapes.get(part, (hidden,))
            expected[f"{theirs}{part}.weight"] = (f"{ours}{module}.weight", shape)
        for part in ("attn_q", "attn_k", "attn_v") if kind.bias else ():
            name = f"{ours}{_ATTENTION[part]}.bias"
            expected[f"{theirs}{part}.bias"] = (name, shapes[part][:1])
    return expected


def _shortest(value: float) -> float:
    """The float32 value's shortest decimal: 1e-05 where Python would show 9.999999747378752e-06."""
    return float(str(np.float32(value)))
