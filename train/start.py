"""Where training starts: heads made from the target's own last layer, or trained before."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from eagle_jax.config import DrafterConfig
from eagle_jax.drafters.feature import Head
from eagle_jax.drafters.load import HEADS
from eagle_jax.nn.modules import fill, parameters
from eagle_jax.target.transformer import Transformer


def initial_head(
    model: Transformer, config: DrafterConfig, seed: int, draft_ids: np.ndarray | None = None
) -> Head:
    """A head that starts as the target's own last layer, where the sizes agree.

    EAGLE-1 where the configuration has no taps, else EAGLE-3. An LM head of its own starts as the
    target's rows of `draft_ids` `[draft_vocab]`, or as all of them.
    """
    kind = HEADS["eagle3" if config.taps else "eagle"]
    weights = parameters(kind(config, rngs=nnx.Rngs(seed)))
    last = {n: a.astype(jnp.float32) for n, a in parameters(model.layers[-1]).items()}
    begin = _eagle3 if config.taps else _eagle
    weights |= begin(model, config, weights, last)
    if config.own_lm_head:
        rows = model.head_weight if draft_ids is None else model.head_weight[draft_ids]
        weights["lm_head"] = rows.astype(jnp.float32)
    return fill(lambda: kind(config, rngs=nnx.Rngs(0)), weights)


def continued_head(head: Head, tap_scale: np.ndarray) -> Head:
    """A finished head that reads taps times `tap_scale`, as `fit` takes it."""
    weights = {name: array.astype(jnp.float32) for name, array in parameters(head).items()}
    if head.config.taps:
        weights["fc.weight"] /= tap_scale
    return fill(lambda: type(head)(head.config, rngs=nnx.Rngs(0)), weights)


def _eagle(model, config, weights, last) -> dict[str, jax.Array]:
    """The layer works on the residual stream, the head on features, which are the stream after the
    final norm: scaled to unit mean square and multiplied by the norm's weight. That weight is
    folded into the matrices, so that the layer sees and writes what it is used to.
    """
    eye = jnp.eye(config.hidden_size)
    fc = 0.2 * weights["fc.weight"] + jnp.concatenate([0.1 * eye, eye], axis=1)
    if not _fits(weights, last, "layer."):
        return {"fc.weight": fc}
    final = model.norm.weight[...].astype(jnp.float32)
    into = {
        "attention.qkv.weight": last["attention.qkv.weight"] * (last["input_norm.weight"] / final),
        "mlp_norm.weight": last["mlp_norm.weight"] / final,
        "mlp.gate_up.weight": last["mlp.gate_up.weight"],
    }
    for name in ("attention.out.weight", "mlp.down.weight"):
        into[name] = 0.1 * last[name] * final[:, None]
    return {"fc.weight": fc} | {f"layer.{name}": array for name, array in into.items()}


def _eagle3(model, config, weights, last) -> dict[str, jax.Array]:
    """`fc` passes the highest tap on; the half of qkv that reads the embedding starts small."""
    hidden = config.hidden_size
    fc = 0.2 * weights["fc.weight"]
    start = {
        "fc.weight": fc.at[:, -hidden:].set(jnp.eye(hidden)),
        "norm.weight": model.norm.weight[...].astype(jnp.float32),
    }
    qkv = weights["attention.qkv.weight"]
    if not _fits(weights, last, "") or last["attention.qkv.weight"].shape[0] != qkv.shape[0]:
        return start
    halves = [0.5 * qkv[:, :hidden], last["attention.qkv.weight"]]
    kept = ("attention.out.weight", "mlp_norm.weight", "mlp.gate_up.weight", "mlp.down.weight")
    return start | {
        "attention.qkv.weight": jnp.concatenate(halves, axis=1),
        "hidden_norm.weight": last["input_norm.weight"],
        **{name: last[name] for name in kept},
    }


def _fits(weights, last, prefix: str) -> bool:
    """Whether every matrix of the target's layer but qkv has the shape of the head's."""
    return all(
        weights[prefix + name].shape == array.shape
        for name, array in last.items()
        if "input_norm" not in name and "qkv" not in name
    )
