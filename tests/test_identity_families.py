"""The promise on targets with windows, capped scores and logits, and routed experts."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import PROMPTS, replay

from eagle_jax import Sampling, TreeShape, generate
from eagle_jax.config import ExpertsConfig, LayerSwitches, RopeScaling
from eagle_jax.nn.experts import by_expert, by_row
from eagle_jax.tiny import TINY, tiny_drafter, tiny_target

WHOLE = LayerSwitches(
    qk_norm="head",
    score_scale=0.3,
    score_cap=2.0,
    norms="around",
    shifted_norms=True,
    gelu=True,
)
GEMMA_LIKE = dataclasses.replace(
    TINY,
    num_layers=3,
    tied=True,
    rope_scaling=RopeScaling(8.0),
    window_rope_theta=100.0,
    scaled_embedding=True,
    logit_cap=8.0,
    layers=(dataclasses.replace(WHOLE, window=4), WHOLE, dataclasses.replace(WHOLE, window=1)),
)
EXPERTS = LayerSwitches(
    qk_norm="whole", norms="after", qkv_bias=True, rope=False, experts=ExpertsConfig(6, 2, 24)
)
MIXTURE = dataclasses.replace(
    TINY, layers=(EXPERTS, dataclasses.replace(EXPERTS, rope=True, window=6))
)
TREE = TreeShape(12, 6, 3)  # deeper than a window


@pytest.fixture(scope="module", params=[GEMMA_LIKE, MIXTURE], ids=["gemma-like", "mixture"])
def target(request):
    return tiny_target(config=request.param)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, top_p=0.9)], ids=str)
def test_speculation_does_not_change_tokens(target, sampling):
    options = {"max_new_tokens": 24, "sampling": sampling, "seed": [5, 6, 7]}
    plain = generate(target, None, PROMPTS, **options)
    assert len({tuple(row) for row in plain.tokens}) == 3
    random = generate(target, tiny_drafter(target), PROMPTS, tree=TREE, **options)
    assert random.tokens == plain.tokens
    perfect = replay(target, PROMPTS, plain.tokens)
    run = generate(target, perfect, PROMPTS, tree=TREE, **options)
    assert run.tokens == plain.tokens
    assert run.stats.row_passes == (4, 4, 4)  # 23 tokens, 7 a pass
    wrong = replay(target, PROMPTS, plain.tokens, offset=1)
    run = generate(target, wrong, PROMPTS, tree=TREE, **options)
    assert run.tokens == plain.tokens
    assert run.stats.tau == 1.0


def test_a_window_hides_what_lies_before_it():
    """With windows alone, no token of long ago reaches the answer; with a whole layer it does."""
    sliding = LayerSwitches(window=3)
    blind = tiny_target(config=dataclasses.replace(TINY, layers=(sliding, sliding)))
    seeing = tiny_target(config=dataclasses.replace(TINY, layers=(sliding, LayerSwitches())))
    one, other = [[first, *range(2, 14)] for first in (1, 40)]
    last = [
        [np.asarray(_last_logits(target, ids)) for ids in (one, other)]
        for target in (blind, seeing)
    ]
    np.testing.assert_array_equal(*last[0])
    assert np.abs(last[1][0] - last[1][1]).max() > 1e-3


def _last_logits(target, ids):
    from test_target import forward

    return forward(target.model, np.array([ids]))[0][0, -1]


@pytest.mark.parametrize("rows", [1, 7])
def test_experts_one_by_one_or_row_by_row(rows):
    """Both ways of running experts against a loop over rows in NumPy."""
    rng, count, active, hidden, size = np.random.default_rng(0), 5, 2, 8, 6
    x, gate_up, down = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in ((rows, hidden), (count, 2 * size, hidden), (count, hidden, size))
    )
    chosen = np.array([rng.permutation(count)[:active] for _ in range(rows)], np.int32)
    share = rng.random((rows, active)).astype(np.float32)
    expected = np.zeros_like(x)
    for row in range(rows):
        for expert, weight in zip(chosen[row], share[row], strict=True):
            gate, up = np.split(gate_up[expert] @ x[row], 2)
            expected[row] += weight * (down[expert] @ (gate / (1 + np.exp(-gate)) * up))
    for run in (by_expert, by_row):
        arguments = map(jnp.asarray, (x, gate_up, down, share, chosen))
        np.testing.assert_allclose(jax.jit(run)(*arguments), expected, atol=1e-5)
