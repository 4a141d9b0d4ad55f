"""Fits an EAGLE head to cached features: optimiser, checkpoints, resume."""

from __future__ import annotations

import csv
import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

from eagle_jax.drafters.feature import Head
from eagle_jax.nn.modules import parameters
from eagle_jax.target.transformer import Transformer
from train.data import Packed
from train.loss import Batch, Frozen, Objective, objective
from train.store import Store


@dataclasses.dataclass(frozen=True)
class FitConfig:
    """How to fit.

    Attributes:
      epochs: passes over the packed rows.
      batch: packed rows a step, or all where there are fewer.
      learning_rate: peak rate of Muon on matrices; vectors use AdamW at a tenth of it.
      weight_decay: of matrices, times the rate, a step.
      warmup: share of the steps with a rising rate; the rate then falls to zero along a cosine.
      single: share of the steps that train one unrolled step only, before the rest unrolls.
      newton_schulz: iterations of Muon's orthogonalisation; five, as is usual, cost a third of a
        step here.
      checkpoint_every: steps between checkpoints.
      seed: of initialisation, order and noise.
    """

    epochs: int = 4
    batch: int = 4
    learning_rate: float = 0.01
    weight_decay: float = 0.0
    newton_schulz: int = 3
    warmup: float = 0.03
    single: float = 0.6
    checkpoint_every: int = 100
    seed: int = 0
    objective: Objective = Objective()


class Corpus:
    """Packed rows with their tokens and the target's features and taps; gives batches."""

    def __init__(self, packed: Packed, store: Store, hidden: int):
        """Takes samples of a store, packed, for a target of `hidden` size."""
        self.packed, self.hidden = packed, hidden
        self.tokens, self.features = store.tokens, store.features

    def __len__(self) -> int:
        return len(self.packed)

    def tap_scale(self, positions: int = 4096) -> np.ndarray:
        """`[len(taps) * hidden]` factors that bring every tap to the size of the last one.

        Sizes are medians over positions, since attention sinks are a hundred times larger.
        """
        rows = np.arange(min(positions, len(self.tokens)))
        taps = self.features[rows][:, self.hidden :]
        count = taps.shape[1] // self.hidden
        taps = taps.astype(np.float32).reshape(len(taps), count, self.hidden)
        size = np.median(np.sqrt((taps**2).mean(axis=2)), axis=0)
        return np.repeat(size[-1:] / np.maximum(size, 1e-6), self.hidden).astype(np.float32)

    def batch(self, rows: np.ndarray) -> Batch:
        source = self.packed.source[rows]
        real = source >= 0
        at, hidden = np.maximum(source, 0), self.hidden
        signals = np.where(real[..., None], self.features[at], 0).astype(np.float32)
        return Batch(
            tokens=np.where(real, self.tokens[at], 0).astype(np.int32),
            features=signals[..., :hidden],
            taps=signals[..., hidden:],
            document=self.packed.document[rows],
            position=self.packed.position[rows],
            weight=self.packed.weight[rows],
        )


def lend(model: Transformer, draft_ids: np.ndarray, train: Corpus) -> Frozen:
    """What training needs of the target, in float32; see `Frozen`."""
    return Frozen(
        embed=model.embed[...].astype(jnp.float32),
        head_rows=model.head_weight[draft_ids].astype(jnp.float32),
        tap_scale=train.tap_scale(),
    )


def fit(
    head: Head,
    frozen: Frozen,
    train: Corpus,
    valid: Corpus,
    config: FitConfig,
    folder: Path,
    log: Callable[[dict], None] = lambda row: None,
) -> Head:
    """Fits the head; resumes from the newest checkpoint in `folder`, bit for bit.

    The head given reads scaled taps (see `Frozen.tap_scale`), the one returned reads true ones.
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
        optax.contrib.muon(
            schedule,
            ns_steps=config.newton_schulz,
            weight_decay=config.weight_decay,
            adam_learning_rate=lambda step: 0.1 * schedule(step),
        ),
    )

    def build(params) -> Head:
        flat = [(tuple(_path(name)), nnx.Param(params[name])) for name in names]
        return nnx.merge(graph, nnx.from_flat_state(flat))

    @functools.partial(jax.jit, static_argnums=5)
    def update(params, opt_state, frozen, batch, key, weights):
        def loss(params):
            return objective(build(params), frozen, batch, key, weights)

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
            goal = config.objective
            if step < config.single * steps:
                goal = dataclasses.replace(goal, steps=1)
            params, opt_state, parts = update(params, opt_state, frozen, batch, noise, goal)
            done = step + 1
            if done % config.checkpoint_every == 0 or done == steps:
                total = [
                    check(params, frozen, valid.batch(np.array([r]))) for r in range(len(valid))
                ]
                summed = jax.tree.map(lambda *x: np.sum(x, axis=0), *total)
                row = {"step": done, "steps": steps, "seconds": time.perf_counter() - started}
                row |= _ratios("train", parts, config.objective.steps)
                row |= _ratios("valid", summed, config.objective.steps)
                _append(folder / "metrics.csv", row)
                log(row)
                state = {"params": params, "opt_state": opt_state}
                manager.save(done, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
    if head.config.taps:
        params = params | {"fc.weight": params["fc.weight"] * frozen.tap_scale}
    return build(params)


def _path(name: str):
    return (int(part) if part.isdigit() else part for part in name.split("."))


def _ratios(prefix: str, parts: dict, steps: int) -> dict[str, float]:
    """Means by unrolled step; not a number where a step was not trained yet."""
    weights = np.asarray(parts["supervised"])
    row = {}
    for name, sums in (("acceptance", "hits"), ("feature_loss",) * 2, ("token_loss",) * 2):
        means = np.asarray(parts[sums]) / np.maximum(weights, 1.0)
        for step in range(steps):
            value = float(means[step]) if step < len(means) else float("nan")
            row[f"{prefix}_{name}_{step + 1}"] = value
    return row


def _append(path: Path, row: dict) -> None:
    new = not path.is_file()
    with path.open("a", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, row.keys())
        if new:
            writer.writeheader()
        writer.writerow(row)
