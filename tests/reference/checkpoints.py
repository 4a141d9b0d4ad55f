"""Random heads under the published names, and the same tensors under the library's."""

from __future__ import annotations

import numpy as np

# Published prefixes of a layer's parts, and the library's.
PARTS = {
    "eagle": ("layers.0", "layer."),
    "eagle3": ("midlayer", ""),
}
NORMS = {
    "input_layernorm": "embed_norm",
    "hidden_norm": "hidden_norm",
    "post_attention_layernorm": "mlp_norm",
}
WHOLE = {
    "lm_head.weight": "lm_head",
    "embed_tokens.weight": "embed",
    "input_norm.weight": "taps_norm.weight",
}


def random_head(method: str, config, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Float32 weights of a head in the sizes of a `DrafterConfig`, every bias and norm at work."""
    hidden, inner = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    weights: dict[str, np.ndarray] = {}

    def linear(name: str, inputs: int, outputs: int, bias: bool = False):
        weights[f"{name}.weight"] = rng.normal(size=(outputs, inputs)) / np.sqrt(inputs)
        if bias:
            weights[f"{name}.bias"] = 0.5 * rng.normal(size=outputs)

    def norm(name: str, size: int = hidden):
        weights[f"{name}.weight"] = 1 + 0.3 * rng.normal(size=size)

    layer, _ = PARTS[method]
    three = method == "eagle3"
    reads = 2 * hidden if three else hidden
    fused = len(config.taps) * config.feature_size
    linear("fc", fused if three else 2 * hidden, hidden, config.fc_bias)
    if config.norm_before_fc:
        norm("input_norm", fused)
    for i in range(len(config.taps) if config.fc_norm else 0):
        norm(f"fc_norm.{i}", config.feature_size)
    for name, outputs in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        linear(f"{layer}.self_attn.{name}_proj", reads, outputs, config.qkv_bias)
    linear(f"{layer}.self_attn.o_proj", heads, hidden)
    linear(f"{layer}.mlp.gate_proj", hidden, inner)
    linear(f"{layer}.mlp.up_proj", hidden, inner)
    linear(f"{layer}.mlp.down_proj", inner, hidden)
    norm(f"{layer}.post_attention_layernorm")
    if three:
        for name in (f"{layer}.input_layernorm", f"{layer}.hidden_norm", "norm"):
            norm(name)
        if config.own_lm_head:
            linear("lm_head", hidden, config.draft_vocab_size)
    if config.own_embed:
        weights["embed_tokens.weight"] = rng.normal(size=(config.vocab_size, hidden))
    return {name: array.astype(np.float32) for name, array in weights.items()}


def library_head(method: str, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same head as the library's modules hold it: q, k, v in one matrix, gate and up too."""
    layer, inner = PARTS[method]
    out = {}
    for kind in ("weight", "bias"):
        qkv = [weights.get(f"{layer}.self_attn.{part}_proj.{kind}") for part in "qkv"]
        if qkv[0] is not None:
            out[f"{inner}attention.qkv.{kind}"] = np.concatenate(qkv)
    out[f"{inner}attention.out.weight"] = weights[f"{layer}.self_attn.o_proj.weight"]
    gate_up = [weights[f"{layer}.mlp.{part}_proj.weight"] for part in ("gate", "up")]
    out[f"{inner}mlp.gate_up.weight"] = np.concatenate(gate_up)
    out[f"{inner}mlp.down.weight"] = weights[f"{layer}.mlp.down_proj.weight"]
    for published, ours in NORMS.items():
        if f"{layer}.{published}.weight" in weights:
            out[f"{inner}{ours}.weight"] = weights[f"{layer}.{published}.weight"]
    for name in ("fc.weight", "fc.bias", "norm.weight"):
        if name in weights:
            out[name] = weights[name]
    for name, array in weights.items():
        if name.startswith("fc_norm."):
            out[name.replace("fc_norm.", "tap_norms.")] = array
    for published, ours in WHOLE.items():
        if published in weights:
            out[ours] = weights[published]
    return out


def published_target(parameters: dict[str, np.ndarray], config) -> dict[str, np.ndarray]:
    """A library target's parameters by dotted path, under the published names."""
    given = {name: np.asarray(array) for name, array in parameters.items()}
    out = {
        "model.embed_tokens.weight": given["embed"],
        "model.norm.weight": given["norm.weight"],
    }
    if "lm_head" in given:
        out["lm_head.weight"] = given["lm_head"]
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for i in range(config.num_layers):
        layer, ours = f"model.layers.{i}", f"layers.{i}"
        q, k, v = np.split(given[f"{ours}.attention.qkv.weight"], [heads, heads + kv_heads])
        gate, up = np.split(given[f"{ours}.mlp.gate_up.weight"], 2)
        out |= {
            f"{layer}.self_attn.q_proj.weight": q,
            f"{layer}.self_attn.k_proj.weight": k,
            f"{layer}.self_attn.v_proj.weight": v,
            f"{layer}.self_attn.o_proj.weight": given[f"{ours}.attention.out.weight"],
            f"{layer}.mlp.gate_proj.weight": gate,
            f"{layer}.mlp.up_proj.weight": up,
            f"{layer}.mlp.down_proj.weight": given[f"{ours}.mlp.down.weight"],
            f"{layer}.input_layernorm.weight": given[f"{ours}.input_norm.weight"],
            f"{layer}.post_attention_layernorm.weight": given[f"{ours}.mlp_norm.weight"],
        }
    return out
