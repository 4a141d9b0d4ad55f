"""Tiny heads as others release them, built from the documented keys, and what they compute.

The forward pass here is NumPy in float64 over the tensors' released names, written from the papers
and from what the reference and vLLM do with each switch.
"""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from eagle_jax.config import ModelConfig
from eagle_jax.tiny import TINY, tiny_target

VOCAB, WIDTH, INNER, HEADS, KV, SIZE = 61, 32, 40, 4, 2, 8
TARGET = ModelConfig(**{**TINY.__dict__, "num_layers": 8})
LAYERS = (2, 4, 5)  # 2, L // 2, L - 3
DRAFTS = 30


def deep_target(seed=0):
    return tiny_target(seed, TARGET)


def config(**changes):
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "max_position_embeddings": 2048,
        "model_type": "llama",
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "float16",
        "vocab_size": VOCAB,
    }
    return {name: value for name, value in {**fields, **changes}.items() if value != "absent"}


def draws(rng, shapes):
    made = {}
    for name, shape in shapes.items():
        made[name] = rng.normal(size=shape) * (0.3 if len(shape) > 1 else 0.2)
        if "norm" in name:
            made[name] += 1.0
    return {name: array.astype(np.float32) for name, array in made.items()}


def eagle_tensors(seed=0, bias=True, qkv_bias=False, embed=None):
    a = "layers.0.self_attn."
    shapes = {
        "fc.weight": (WIDTH, 2 * WIDTH),
        f"{a}q_proj.weight": (HEADS * SIZE, WIDTH),
        f"{a}k_proj.weight": (KV * SIZE, WIDTH),
        f"{a}v_proj.weight": (KV * SIZE, WIDTH),
        f"{a}o_proj.weight": (WIDTH, HEADS * SIZE),
        "layers.0.mlp.gate_proj.weight": (INNER, WIDTH),
        "layers.0.mlp.up_proj.weight": (INNER, WIDTH),
        "layers.0.mlp.down_proj.weight": (WIDTH, INNER),
        "layers.0.post_attention_layernorm.weight": (WIDTH,),
    }
    if bias:
        shapes["fc.bias"] = (WIDTH,)
    if qkv_bias:
        shapes |= {f"{a}q_proj.bias": (HEADS * SIZE,), f"{a}k_proj.bias": (KV * SIZE,),
                   f"{a}v_proj.bias": (KV * SIZE,)}  # fmt: skip
    tensors = draws(np.random.default_rng(seed), shapes)
    if embed is not None:
        tensors["embed_tokens.weight"] = embed
    return tensors


def eagle3_tensors(
    seed=0, width=WIDTH, layers=3, layer="midlayer.", drafts=DRAFTS, extra=(), embed=None
):
    a, head = f"{layer}self_attn.", width // HEADS
    shapes = {
        "fc.weight": (width, layers * WIDTH),
        f"{a}q_proj.weight": (HEADS * head, 2 * width),
        f"{a}k_proj.weight": (KV * head, 2 * width),
        f"{a}v_proj.weight": (KV * head, 2 * width),
        f"{a}o_proj.weight": (width, HEADS * head),
        f"{layer}mlp.gate_proj.weight": (INNER, width),
        f"{layer}mlp.up_proj.weight": (INNER, width),
        f"{layer}mlp.down_proj.weight": (width, INNER),
        f"{layer}hidden_norm.weight": (width,),
        f"{layer}input_layernorm.weight": (width,),
        f"{layer}post_attention_layernorm.weight": (width,),
        "norm.weight": (width,),
        "lm_head.weight": (drafts, width),
    }
    if "input_norm" in extra:
        shapes["input_norm.weight"] = (layers * WIDTH,)
    if "fc_norm" in extra:
        shapes |= {f"fc_norm.{i}.weight": (WIDTH,) for i in range(layers)}
    if "bias" in extra:
        shapes |= {f"{a}q_proj.bias": (HEADS * head,), f"{a}k_proj.bias": (KV * head,),
                   f"{a}v_proj.bias": (KV * head,)}  # fmt: skip
    rng = np.random.default_rng(seed)
    tensors = draws(rng, shapes)
    if embed is not None:
        tensors["embed_tokens.weight"] = embed
    if drafts < VOCAB:
        ids = np.sort(rng.permutation(VOCAB)[:drafts])
        tensors["d2t"] = ids - np.arange(drafts)
        tensors["t2d"] = np.isin(np.arange(VOCAB), ids)
    return tensors


def cast(tensors, dtype):
    floats = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32}[dtype]
    return {n: a.astype(floats) if a.dtype.kind == "f" else a for n, a in tensors.items()}


def write(folder, fields, tensors):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def forward(tensors, tokens, features, embed, theta=1e4, residual=False, output=False):
    """(feature after the last row, its draft logits or None) of rows (x_{t+1}, f_t)."""
    w = {
        n.removeprefix("model.").replace("midlayer.", "layers.0."): np.asarray(a, np.float64)
        for n, a in tensors.items()
    }
    embed = np.asarray(w.get("embed_tokens.weight", embed), np.float64)[tokens]

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * w[name]

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    x, third = np.asarray(features, np.float64), "layers.0.hidden_norm.weight" in w
    if third:
        if "input_norm.weight" in w:
            x = norm(x, "input_norm.weight")
        if "fc_norm.0.weight" in w:
            parts = np.split(x, x.shape[-1] // WIDTH, axis=-1)
            x = np.concatenate([norm(p, f"fc_norm.{i}.weight") for i, p in enumerate(parts)], -1)
        u = linear(x, "fc")
        normed = norm(u, "layers.0.hidden_norm.weight")
        seen = np.concatenate([norm(embed, "layers.0.input_layernorm.weight"), normed], axis=-1)
        u = normed if residual else u
    else:
        u = seen = linear(np.concatenate([embed, x], axis=-1), "fc")
    q, k, v = (linear(seen, f"layers.0.self_attn.{p}_proj") for p in "qkv")
    size = q.shape[-1] // HEADS
    angles = np.arange(len(tokens))[:, None] * theta ** (-np.arange(0, size, 2) / size)

    def rotate(x):
        low, high = np.split(x, 2, axis=-1)
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)

    out = []
    for head in range(HEADS):
        group = head // (HEADS // KV)
        mine, theirs = (
            slice(head * size, (head + 1) * size),
            slice(group * size, (group + 1) * size),
        )
        scores = rotate(q[:, mine]) @ rotate(k[:, theirs]).T / np.sqrt(size)
        scores = np.where(np.tri(len(tokens), dtype=bool), scores, -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        out.append(p / p.sum(-1, keepdims=True) @ v[:, theirs])
    x = u + linear(np.concatenate(out, axis=-1), "layers.0.self_attn.o_proj")
    inner = norm(x, "layers.0.post_attention_layernorm.weight")
    gate = linear(inner, "layers.0.mlp.gate_proj")
    gate = gate / (1 + np.exp(-gate)) * linear(inner, "layers.0.mlp.up_proj")
    g = (x + linear(gate, "layers.0.mlp.down_proj"))[-1]
    if not third:
        return g, None
    final = norm(g, "norm.weight")
    return (final if output else g), w["lm_head.weight"] @ final
