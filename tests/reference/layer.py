"""The parts of a Llama layer: RMSNorm, rotary positions, causal attention, SwiGLU."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What a layer's weights alone do not tell."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0


def linear(weights: dict, name: str, x: np.ndarray) -> np.ndarray:
    """x [T, in] times the named weight [out, in], plus its bias where there is one."""
    out = x @ weights[f"{name}.weight"].astype(np.float64).T
    bias = weights.get(f"{name}.bias")
    return out if bias is None else out + bias


def rms_norm(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * scale


def rotate(x: np.ndarray, theta: float) -> np.ndarray:
    """Vectors [T, head_dim], row t at position t: component i turns together with i + half."""
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None] * theta ** (-np.arange(half) / half)
    low, high = x[:, :half], x[:, half:]
    return np.concatenate(
        [
            low * np.cos(angles) - high * np.sin(angles),
            high * np.cos(angles) + low * np.sin(angles),
        ],
        axis=-1,
    )


def attention(weights: dict, prefix: str, x: np.ndarray, sizes: Sizes) -> np.ndarray:
    """Causal grouped-query attention of x [T, in] on itself; row t sits at position t."""
    length = len(x)
    q = linear(weights, f"{prefix}.q_proj", x).reshape(length, sizes.num_heads, sizes.head_dim)
    k = linear(weights, f"{prefix}.k_proj", x).reshape(length, sizes.num_kv_heads, sizes.head_dim)
    v = linear(weights, f"{prefix}.v_proj", x).reshape(length, sizes.num_kv_heads, sizes.head_dim)
    out = np.empty_like(q)
    for head in range(sizes.num_heads):
        group = head // (sizes.num_heads // sizes.num_kv_heads)
        queries = rotate(q[:, head], sizes.rope_theta)
        keys = rotate(k[:, group], sizes.rope_theta)
        scores = queries @ keys.T / np.sqrt(sizes.head_dim)
        scores[~np.tri(length, dtype=bool)] = -np.inf
        share = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[:, head] = share @ v[:, group] / share.sum(axis=-1, keepdims=True)
    return linear(weights, f"{prefix}.o_proj", out.reshape(length, -1))


def swiglu(weights: dict, prefix: str, x: np.ndarray) -> np.ndarray:
    gate = linear(weights, f"{prefix}.gate_proj", x)
    return linear(
        weights,
        f"{prefix}.down_proj",
        gate / (1 + np.exp(-gate)) * linear(weights, f"{prefix}.up_proj", x),
    )


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
