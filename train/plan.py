"""How a fit runs: its settings, the rows of every step, and the devices that share them."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.errors import InputError
from train.loss import Batch, Objective


@dataclasses.dataclass(frozen=True)
class FitConfig:
    """How to fit.

    Attributes:
      epochs: passes over the packed rows.
      batch: packed rows that are computed at once, or all where there are fewer; devices share
        them.
      accumulate: batches whose gradients make one step.
      learning_rate: peak rate of Muon on matrices; vectors use AdamW at a tenth of it.
      weight_decay: of matrices, times the rate, a step.
      warmup: share of the steps with a rising rate; the rate then falls to zero along a cosine.
      single: share of the steps that train one unrolled step only, before the rest unrolls.
      newton_schulz: iterations of Muon's orthogonalisation; five, as is usual, cost a third of a
        step here.
      checkpoint_every: steps between checkpoints.
      seed: of initialisation, order and noise.
      compute_dtype: `float32`, `bfloat16`, or `auto`, which is the latter on TPU and GPU; weights
        and optimiser stay in float32.
    """

    epochs: int = 4
    batch: int = 4
    accumulate: int = 1
    learning_rate: float = 0.01
    weight_decay: float = 0.0
    newton_schulz: int = 3
    warmup: float = 0.03
    single: float = 0.6
    checkpoint_every: int = 100
    seed: int = 0
    compute_dtype: str = "auto"
    objective: Objective = Objective()

    def __post_init__(self):
        if self.compute_dtype not in ("auto", "float32", "bfloat16"):
            raise InputError(
                f"compute_dtype must be auto, float32 or bfloat16, got {self.compute_dtype!r}"
            )

    @property
    def dtype(self):
        """The dtype that the head computes in here."""
        on_cpu = jax.default_backend() == "cpu"
        named = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
        return named.get(self.compute_dtype, jnp.float32 if on_cpu else jnp.bfloat16)


class Plan:
    """Which rows each step takes, and where its arrays lie."""

    def __init__(self, config: FitConfig, rows: int, length: int):
        """Plans for `rows` packed rows of `length` positions.

        Raises:
          InputError: the devices cannot share the batch evenly.
        """
        self.config, self.available = config, rows
        self.batch = min(config.batch, rows)
        self.accumulate = min(config.accumulate, rows // self.batch)
        self.per_epoch = rows // (self.batch * self.accumulate)
        self.steps = self.per_epoch * config.epochs
        self.positions = self.batch * self.accumulate * length  # of a step, padding included
        devices = jax.devices()
        if self.batch % len(devices):
            raise InputError(
                f"a batch of {self.batch} rows cannot be shared by {len(devices)} devices; give "
                f"--batch a multiple of {len(devices)}"
            )
        self.mesh = jax.sharding.Mesh(np.array(devices), ("data",))

    def rows(self, step: int) -> list[np.ndarray]:
        """Row numbers of a step's batches; every epoch has an order of its own."""
        epoch, at = divmod(step, self.per_epoch)
        order = np.random.default_rng([self.config.seed, epoch]).permutation(self.available)
        size = self.batch * self.accumulate
        return np.split(order[at * size : (at + 1) * size], self.accumulate)

    def phases(self) -> list[tuple[int, int, Objective]]:
        """(first step, one after the last, objective): one unrolled step at first, then all."""
        goal, turn = self.config.objective, math.ceil(self.config.single * self.steps)
        return [(0, turn, dataclasses.replace(goal, steps=1)), (turn, self.steps, goal)]

    def goal(self, step: int) -> Objective:
        """What a step minimises."""
        return next(goal for _, end, goal in self.phases() if step < end)

    def whole(self, tree, dtype=None):
        """A tree of arrays on every device, floats as `dtype`."""
        return self._put(tree, dtype, jax.sharding.PartitionSpec())

    def shared(self, batches: list[Batch], dtype) -> Batch:
        """Batches stacked, their rows divided among the devices."""
        # What the target computed just now stays on its device.
        stacked = jax.tree.map(
            lambda *x: (jnp if isinstance(x[0], jax.Array) else np).stack(x), *batches
        )
        return self._put(stacked, dtype, jax.sharding.PartitionSpec(None, "data"))

    def _put(self, tree, dtype, spec):
        def cast(x):
            floating = jnp.issubdtype(x.dtype, jnp.floating)
            return x.astype(dtype) if dtype is not None and floating else x

        return jax.device_put(jax.tree.map(cast, tree), jax.sharding.NamedSharding(self.mesh, spec))
