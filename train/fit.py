"""Fits an EAGLE head to cached features: optimiser, checkpoints, resume."""

from __future__ import annotations

import csv
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

from eagle_jax.config import DrafterConfig
from eagle_jax.drafters.eagle import EagleHead
from eagle_jax.nn.modules import fill, parameters
from eagle_jax.target.transformer import Transformer
from train.data import Packed
from train.loss import Batch, Frozen, Objective, objective


@dataclasses.dataclass(frozen=True)
class FitConfig:
    """How to fit.

    Attributes:
      epochs: passes over the packed rows.
      batch: packed rows a step, or all where there are fewer.
      learning_rate: peak rate of Muon on matrices; vectors use AdamW at a tenth of it.
      warmup: share of the steps with a rising rate; the rate then falls to zero along a cosine.
      checkpoint_every: steps between checkpoints.
      seed: of initialisation, order and noise.
    """

    epochs: int = 6
    batch: int = 4
    learning_rate: float = 0.01
    warmup: float = 0.03
    checkpoint_every: int = 100
    seed: int = 0
    objective: Objective = Objective()


class Corpus:
    """Packed rows with their tokens and features; gives batches."""

    def __init__(self, packed: Packed, tokens: np.ndarray, features: np.ndarray):
        self.packed, self.tokens, self.features = packed, tokens, features

    def __len__(self) -> int:
        return len(self.packed)

    def batch(self, rows: np.ndarray) -> Batch:
        source = self.packed.source[rows]
        real = source >= 0
        at = np.maximum(source, 0)
        return Batch(
            tokens=np.where(real, self.tokens[at], 0).astype(np.int32),
            features=np.where(real[..., None], self.features[at], 0).astype(np.float32),
            document=self.packed.document[rows],
            position=self.packed.position[rows],
            weight=self.packed.weight[rows],
        )


def lend(model: Transformer, draft_ids: np.ndarray) -> Frozen:
    """The target's embedding and the LM head rows of the draft vocabulary, in float32."""
    return Frozen(
        embed=model.embed[...].astype(jnp.float32),
        head_rows=model.head_weight[draft_ids].astype(jnp.float32),
    )


def initial_head(model: Transformer, config: DrafterConfig, seed: int) -> EagleHead:
    """A head that starts as the target's own last layer, where the sizes agree.

    The layer works on the residual stream, the head on features, which are the stream after the
    final norm: scaled to unit mean square and multiplied by the norm's weight. That weight is
    folded into the matrices, so that the layer sees and writes what it is used to.
    """
    head = EagleHead(config, rngs=nnx.Rngs(seed))
    last = model.layers[-1]
    weights, source = parameters(head), parameters(last)
    same = all(source[n].shape == weights[f"layer.{n}"].shape for n in source if "input" not in n)
    hidden = config.hidden_size
    identity = jnp.concatenate([0.1 * jnp.eye(hidden), jnp.eye(hidden)], axis=1)
    weights["fc.weight"] = 0.2 * weights["fc.weight"] + identity
    if same:
        final = model.norm.weight[...].astype(jnp.float32)
        into = {n: a.astype(jnp.float32) for n, a in source.items()}
        weights["layer.attention.qkv.weight"] = into["attention.qkv.weight"] * (
            into["input_norm.weight"] / final
        )
        weights["layer.mlp_norm.weight"] = into["mlp_norm.weight"] / final
        weights["layer.mlp.gate_up.weight"] = into["mlp.gate_up.weight"]
        for name in ("attention.out.weight", "mlp.down.weight"):
            weights[f"layer.{name}"] = 0.1 * into[name] * final[:, None]
    return fill(lambda: EagleHead(config, rngs=nnx.Rngs(0)), weights)


def fit(
    head: EagleHead,
    frozen: Frozen,
    train: Corpus,
    valid: Corpus,
    config: FitConfig,
    folder: Path,
    log: Callable[[dict], None] = lambda row: None,
) -> EagleHead:
    """Fits the head; resumes from the newest checkpoint in `folder`, bit for bit.

    Metrics go to `metrics.csv` there: losses and acceptance by unrolled step.
    """
    size = min(config.batch, len(train))
    per_epoch = len(train) // size
    steps = per_epoch * config.epochs
    graph, _ = nnx.split(head)
    names = list(parameters(head))
    params = parameters(head)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, max(1, int(config.warmup * steps)), steps
    )
    optimiser = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.contrib.muon(schedule, adam_learning_rate=lambda step: 0.1 * schedule(step)),
    )

    def build(params) -> EagleHead:
        flat = [(tuple(_path(name)), nnx.Param(params[name])) for name in names]
        return nnx.merge(graph, nnx.from_flat_state(flat))

    @jax.jit
    def update(params, opt_state, frozen, batch, key):
        def loss(params):
            return objective(build(params), frozen, batch, key, config.objective)

        gradients, parts = jax.grad(loss, has_aux=True)(params)
        updates, opt_state = optimiser.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, parts

    @jax.jit
    def check(params, frozen, batch):
        return objective(build(params), frozen, batch, None, config.objective)[1]

    opt_state, first = optimiser.init(params), 0
    folder.mkdir(parents=True, exist_ok=True)
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager((folder / "checkpoints").absolute(), options=options) as manager:
        if (latest := manager.latest_step()) is not None:
            like = {"params": params, "opt_state": opt_state}
            restored = manager.restore(latest, args=ocp.args.StandardRestore(like))
            params, opt_state, first = restored["params"], restored["opt_state"], latest
        key = jax.random.key(config.seed)
        started = time.perf_counter()
        for step in range(first, steps):
            epoch, at = divmod(step, per_epoch)
            order = np.random.default_rng([config.seed, epoch]).permutation(len(train))
            batch = train.batch(order[at * size : (at + 1) * size])
            noise = jax.random.fold_in(key, step)
            params, opt_state, parts = update(params, opt_state, frozen, batch, noise)
            done = step + 1
            if done % config.checkpoint_every == 0 or done == steps:
                total = [
                    check(params, frozen, valid.batch(np.array([r]))) for r in range(len(valid))
                ]
                summed = jax.tree.map(lambda *x: np.sum(x, axis=0), *total)
                row = {"step": done, "steps": steps, "seconds": time.perf_counter() - started}
                row |= _ratios("train", parts) | _ratios("valid", summed)
                _append(folder / "metrics.csv", row)
                log(row)
                state = {"params": params, "opt_state": opt_state}
                manager.save(done, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
    return build(params)


def _path(name: str):
    return (int(part) if part.isdigit() else part for part in name.split("."))


def _ratios(prefix: str, parts: dict) -> dict[str, float]:
    row = {}
    for step, weight in enumerate(np.asarray(parts["supervised"])):
        scale = 1.0 / max(float(weight), 1.0)
        row[f"{prefix}_acceptance_{step + 1}"] = float(parts["hits"][step]) * scale
        row[f"{prefix}_feature_loss_{step + 1}"] = float(parts["feature_loss"][step]) * scale
        row[f"{prefix}_token_loss_{step + 1}"] = float(parts["token_loss"][step]) * scale
    return row


def _append(path: Path, row: dict) -> None:
    new = not path.is_file()
    with path.open("a", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, row.keys())
        if new:
            writer.writeheader()
        writer.writerow(row)
