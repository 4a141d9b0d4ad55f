"""A tiny random target and head: tests and notebooks run on them in seconds."""

from __future__ import annotations

import dataclasses

import numpy as np
from flax import nnx

from eagle_jax.config import DrafterConfig, ModelConfig, default_taps
from eagle_jax.drafters.load import HEADS, LoadedDrafter, bind
from eagle_jax.target.load import Target
from eagle_jax.target.transformer import Transformer

TINY = ModelConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    context=96,
    tied=False,
)


def tiny_target(seed: int = 0, config: ModelConfig = TINY, eos: tuple[int, ...] = ()) -> Target:
    """A target with random weights, without a tokenizer, on any vocabulary size."""
    model = Transformer(config, rngs=nnx.Rngs(seed))
    # Random logits of unit scale lie close together; larger ones keep near ties away.
    weight = model.embed if config.tied else model.lm_head
    weight[...] = weight[...] * 4.0
    return Target("tiny", model, None, eos)


def tiny_drafter(
    target: Target, seed: int = 1, draft_vocab_size: int | None = None, method: str = "eagle"
) -> LoadedDrafter:
    """A head with random weights, on a reduced draft vocabulary or the full.

    An EAGLE-3 head comes with its own LM head.
    """
    config = DrafterConfig.like(target.config, draft_vocab_size or target.config.vocab_size)
    if method == "eagle3":
        config = dataclasses.replace(
            config, taps=default_taps(target.config.num_layers), own_lm_head=True
        )
    head = HEADS[method](config, rngs=nnx.Rngs(seed))
    ids = None
    if draft_vocab_size:
        rng = np.random.default_rng(seed)
        ids = np.sort(rng.permutation(config.vocab_size)[:draft_vocab_size])
    return LoadedDrafter(f"tiny-{method}", bind(head, ids, target))
