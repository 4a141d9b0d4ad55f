"""Fits an EAGLE head to cached features: optimiser, devices, checkpoints, resume."""

from __future__ import annotations

import functools
import operator
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
from train.corpus import Corpus
from train.cost import fit_flops
from train.loss import Frozen, objective, supervised
from train.metrics import Metrics, plot, read_metrics
from train.plan import FitConfig, Plan


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
    progress: Callable[[int], None] = lambda done: None,
) -> Head:
    """Fits the head on all devices; resumes from the newest checkpoint in `folder`, bit for bit.

    The head given reads scaled taps (see `Frozen.tap_scale`), the one returned reads true ones.
    Losses and acceptance by unrolled step go to `folder` (see `Metrics`, and `metrics.png`), and to
    `log`; `progress` is called with the steps done.

    Raises:
      InputError: the devices cannot share the batch evenly.
    """
    plan = Plan(config, *train.packed.source.shape)
    graph, _ = nnx.split(head)
    names, params = list(parameters(head)), parameters(head)
    schedule, optimiser = _optimiser(config, plan.steps)

    def build(params) -> Head:
        flat = [
            (tuple(_path(name)), nnx.Param(params[name].astype(config.dtype))) for name in names
        ]
        return nnx.merge(graph, nnx.from_flat_state(flat))

    def loss(params, frozen, batch, key, goal, whole):
        return objective(build(params), frozen, batch, key, goal, whole)

    @functools.partial(jax.jit, static_argnums=5)
    def update(params, opt_state, frozen, batches, key, goal):
        """One step over batches `[accumulate, B, ...]`, weighted as one large batch would be."""
        whole = jax.vmap(lambda batch: supervised(batch, goal.steps))(batches).sum(axis=0)

        def one(batch, number):
            noise = jax.random.fold_in(key, number)
            return jax.grad(loss, has_aux=True)(params, frozen, batch, noise, goal, whole)

        found = one(jax.tree.map(lambda x: x[0], batches), 0)
        for number in range(1, len(batches.tokens)):
            # One after the other: the batch is as large as memory allows.
            batches, found = jax.lax.optimization_barrier((batches, found))
            batch = jax.tree.map(operator.itemgetter(number), batches)
            found = jax.tree.map(jnp.add, found, one(batch, number))
        gradients, parts = found
        updates, opt_state = optimiser.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, parts

    @jax.jit
    def check(params, frozen, batch):
        return loss(params, frozen, batch, None, config.objective, None)[1]

    def measure(params) -> dict:
        total = [
            check(params, lent, plan.whole(valid.batch(np.array([row])), config.dtype))
            for row in range(len(valid))
        ]
        return jax.tree.map(lambda *x: np.sum(x, axis=0), *total)

    lent = plan.whole(frozen, config.dtype)
    state, first = plan.whole({"params": params, "opt_state": optimiser.init(params)}), 0
    folder.mkdir(parents=True, exist_ok=True)
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager((folder / "checkpoints").absolute(), options=options) as manager:
        if (latest := manager.latest_step()) is not None:
            state = manager.restore(latest, args=ocp.args.StandardRestore(state))
            first = latest
        metrics = Metrics(folder, first)
        key = jax.random.key(config.seed)
        since, started = first, time.perf_counter()
        for step in range(first, plan.steps):
            batches = plan.shared([train.batch(rows) for rows in plan.rows(step)], config.dtype)
            noise = jax.random.fold_in(key, step)
            params, opt_state, parts = update(
                state["params"], state["opt_state"], lent, batches, noise, plan.goal(step)
            )
            state = {"params": params, "opt_state": opt_state}
            done = step + 1
            if done % config.checkpoint_every == 0 or done == plan.steps:
                row = {"step": done, "steps": plan.steps, "positions": done * plan.positions}
                jax.block_until_ready(state)
                seconds = time.perf_counter() - started
                speed = {"positions": (done - since) * plan.positions}
                speed["flops"] = fit_flops(head, config, plan, since, done)
                row |= {"seconds": seconds, "rate": float(schedule(step))}
                row |= {f"{name}_per_s": amount / seconds for name, amount in speed.items()}
                row |= _ratios("train", parts, config.objective.steps)
                row |= _ratios("valid", measure(params), config.objective.steps)
                metrics.add(row)
                log(row)
                manager.save(done, args=ocp.args.StandardSave(state))
                since, started = done, time.perf_counter()
            progress(done)
        manager.wait_until_finished()
        metrics.close()
    plot(read_metrics(folder / "metrics.csv"), folder / "metrics.png")
    params = jax.device_get(state["params"])
    if head.config.taps:
        params = params | {"fc.weight": params["fc.weight"] * frozen.tap_scale}
    fitted = [(tuple(_path(name)), nnx.Param(jnp.asarray(params[name]))) for name in names]
    return nnx.merge(graph, nnx.from_flat_state(fitted))


def _optimiser(config: FitConfig, steps: int):
    """The learning rate by step, and Muon for matrices with AdamW for vectors."""
    warmup = min(max(1, int(config.warmup * steps)), steps - 1)
    schedule = optax.warmup_cosine_decay_schedule(0.0, config.learning_rate, warmup, steps)
    muon = optax.contrib.muon(
        schedule,
        ns_steps=config.newton_schulz,
        weight_decay=config.weight_decay,
        adam_learning_rate=lambda step: 0.1 * schedule(step),
    )
    return schedule, optax.chain(optax.clip_by_global_norm(1.0), muon)


def _path(name: str):
    return (int(part) if part.isdigit() else part for part in name.split("."))


def _ratios(prefix: str, parts: dict, steps: int) -> dict[str, float]:
    """Means by unrolled step; not a number where a step was not trained yet."""
    weights = np.asarray(parts["supervised"])
    row = {}
    for name in ("acceptance", "overlap", "feature_loss", "token_loss"):
        sums = "hits" if name == "acceptance" else name
        means = np.asarray(parts[sums]) / np.maximum(weights, 1.0)
        for step in range(steps):
            value = float(means[step]) if step < len(means) else float("nan")
            row[f"{prefix}_{name}_{step + 1}"] = value
    return row
