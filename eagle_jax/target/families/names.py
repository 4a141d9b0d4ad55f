"""How the tensors of a checkpoint are named, and how `Transformer` holds them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from eagle_jax.config import LLAMA, LayerSwitches, ModelConfig
from eagle_jax.errors import FormatError

Read = Callable[[str], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Names:
    """Where a family's names differ from Llama's.

    Attributes:
      roots: what the names of the network start with; the first that fits counts.
      fused: q, k, v and gate, up come as one tensor each.
      router: the router of a layer's experts.
      expert: an expert by number, and its matrices gate, up and down.
    """

    roots: tuple[str, ...] = ("model.",)
    fused: bool = False
    router: str = "mlp.gate"
    expert: tuple[str, str, str, str] = ("mlp.experts.{}.", "gate_proj", "up_proj", "down_proj")


PLAIN = Names()
NAMES = {
    "phi3": Names(fused=True),
    "mixtral": Names(
        router="block_sparse_moe.gate",
        expert=("block_sparse_moe.experts.{}.", "w1", "w3", "w2"),
    ),
    "gemma3": Names(roots=("language_model.model.", "model.language_model.")),
}

# Our norms by where they stand. Llama's name of the norm before the feed-forward block is that of
# the norm after attention elsewhere.
_NORMS = {
    "before": {
        "input_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
    },
    "after": {
        "attention_out_norm": "post_attention_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    },
    "around": {
        "input_norm": "input_layernorm",
        "attention_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    },
}


def layer_tensors(
    read: Read, prefix: str, switches: LayerSwitches = LLAMA, names: Names = PLAIN
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (parameter path, array) of one decoder layer, fused as `DecoderLayer` holds them.

    Args:
      read: returns a checkpoint's tensor by name.
      prefix: e.g. `model.layers.3.`.
    """
    attention = prefix + "self_attn."
    yield "attention.qkv.weight", _joined(read, attention, "qkv", "weight", names.fused)
    yield "attention.out.weight", read(attention + "o_proj.weight")
    if switches.qkv_bias:
        yield "attention.qkv.bias", _joined(read, attention, "qkv", "bias", names.fused)
    if switches.out_bias:
        yield "attention.out.bias", read(attention + "o_proj.bias")
    if switches.qk_norm is not None:
        for part in ("q_norm", "k_norm"):
            yield f"attention.{part}.weight", read(f"{attention}{part}.weight")
    for ours, theirs in _NORMS[switches.norms].items():
        yield f"{ours}.weight", read(f"{prefix}{theirs}.weight")
    if switches.experts is not None:
        yield from _expert_tensors(read, prefix, switches.experts.count, names)
    else:
        mlp = prefix + "mlp."
        parts = ("gate", "up")
        yield "mlp.gate_up.weight", _joined(read, mlp, parts, "weight", names.fused)
        yield "mlp.down.weight", read(mlp + "down_proj.weight")


def _joined(read: Read, prefix: str, parts, kind: str, fused: bool) -> np.ndarray:
    if fused:
        joint = "_".join(parts) if len(parts) == 2 else "".join(parts)
        return read(f"{prefix}{joint}_proj.{kind}")
    return np.concatenate([read(f"{prefix}{part}_proj.{kind}") for part in parts])


def _expert_tensors(read: Read, prefix: str, count: int, names: Names):
    """The experts' matrices stacked, each written into its place as it is read."""
    expert, gate, up, down = names.expert
    yield "mlp.router", read(f"{prefix}{names.router}.weight")
    for path, parts in (("mlp.gate_up", (gate, up)), ("mlp.down", (down,))):
        stacked = None
        for index in range(count):
            at = prefix + expert.format(index)
            one = np.concatenate([read(f"{at}{part}.weight") for part in parts])
            if stacked is None:
                stacked = np.empty((count, *one.shape), one.dtype)
            if one.shape != stacked.shape[1:]:
                raise FormatError(
                    f"{at}{parts[0]}: expected shape {stacked.shape[1:]}, found {one.shape}"
                )
            stacked[index] = one
        yield path, stacked


def target_tensors(read: Read, config: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (parameter path, array) for a whole target, tensor by tensor."""
    names = NAMES.get(config.family, PLAIN)
    root = _root(read, names)
    yield "embed", read(root + "embed_tokens.weight")
    for index in range(config.num_layers):
        layer = layer_tensors(read, f"{root}layers.{index}.", config.layer(index), names)
        for name, array in layer:
            yield f"layers.{index}.{name}", array
    yield "norm.weight", read(root + "norm.weight")
    if not config.tied:
        yield "lm_head", read("lm_head.weight")


def _root(read: Read, names: Names) -> str:
    for root in names.roots[:-1]:
        try:
            read(root + "norm.weight")
        except FormatError:
            continue
        return root
    return names.roots[-1]
