"""The promise: the output never depends on drafter, tree, batch, or streaming."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from conftest import PROMPTS, replay

from eagle_jax import InputError, Sampling, TreeShape, generate, stream
from eagle_jax.config import PLAIN
from eagle_jax.decode.generate import NO_DRAFTER, engine
from eagle_jax.tiny import TINY, tiny_drafter, tiny_target

CHAIN = TreeShape(4, 3, 1)
WIDE = TreeShape(8, 2, 4)
DEEP = TreeShape(12, 5, 3)
GATED = TreeShape(4, 3, 1, gate=0.5)
SETTINGS = [Sampling(), Sampling(0.7), Sampling(1.0, top_k=12), Sampling(1.0, top_p=0.8)]


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_trees_and_batch_do_not_change_tokens(target, drafter, sampling):
    options = {"max_new_tokens": 24, "sampling": sampling}
    expected = generate(target, None, PROMPTS, seed=[5, 6, 7], **options).tokens
    assert len({tuple(row) for row in expected}) == 3
    for tree in (CHAIN, WIDE, DEEP):
        run = generate(target, drafter, PROMPTS, seed=[5, 6, 7], tree=tree, **options)
        assert run.tokens == expected, tree
    for row, prompt in enumerate(PROMPTS):
        alone = generate(target, drafter, prompt, seed=5 + row, tree=CHAIN, **options)
        assert alone.tokens == [expected[row]]


@pytest.mark.parametrize(
    ("prompts", "sampling"),
    [(PROMPTS, SETTINGS[0]), (PROMPTS, SETTINGS[2]), (PROMPTS[1:2], SETTINGS[1])],
    ids=["greedy batch", "sampled batch", "sampled alone"],
)
def test_a_gate_changes_the_passes_but_not_the_tokens(target, drafter, sampling, prompts):
    """Cycles with a tree and plain ones alternate as the drafter's promise says."""
    options = {"max_new_tokens": 24, "sampling": sampling, "seed": 5}
    expected = generate(target, None, prompts, **options)
    open_gate = engine(target, drafter, WIDE)
    state = open_gate.start(prompts, 24, sampling, [5] * len(prompts), ())
    promises = []
    while not np.asarray(state.done).all():
        promise = np.asarray(open_gate.promise(state))[~np.asarray(state.done)]
        assert ((promise > 0) & (promise <= 1)).all()
        promises.append(promise.mean())
        state = open_gate.step(state)
    between = float(np.median(promises))
    shares = []
    for gate in (0.0, between, 1.0):
        tree = dataclasses.replace(WIDE, gate=gate)
        run = generate(target, drafter, prompts, tree=tree, **options)
        assert run.tokens == expected.tokens, gate
        shares.append(run.stats.speculated / run.stats.passes)
    assert shares[0] == 1 and 0.1 < shares[1] < 0.9 and shares[2] == 0
    assert run.stats.passes == expected.stats.passes  # the last one never drafted


def test_seed_changes_samples_and_repeats(target):
    options = {"max_new_tokens": 12, "sampling": Sampling(1.0)}
    one, same, other = (
        generate(target, None, PROMPTS, seed=seed, **options).tokens for seed in (1, 1, 2)
    )
    assert one == same
    assert one != other


def test_sharing_the_noise_changes_tau_and_not_the_tokens(target):
    """Logits of a random head say little, so its guesses live by the noise."""
    options = {"max_new_tokens": 40, "sampling": Sampling(8.0), "seed": [1, 2, 3]}
    expected = generate(target, None, PROMPTS, **options).tokens
    tau = {}
    for coupled in (True, False):
        drafter = tiny_drafter(target, method="eagle3")
        drafter.module.coupled = coupled
        run = generate(target, drafter, PROMPTS, tree=CHAIN, **options)
        assert run.tokens == expected
        tau[coupled] = run.stats.tau
    assert tau[True] > 1.3 * tau[False]


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_full_and_reduced_draft_vocabulary(target, plain, method):
    full = tiny_drafter(target, seed=3, method=method)
    assert generate(target, full, PROMPTS, max_new_tokens=24, tree=CHAIN).tokens == plain.tokens


def test_a_tree_wider_than_the_draft_vocabulary_is_refused(target):
    drafter = tiny_drafter(target, draft_vocab_size=5)
    with pytest.raises(InputError, match="lower top_k"):
        generate(target, drafter, PROMPTS, max_new_tokens=4, tree=TreeShape(8, 1, 7))


def test_perfect_drafter_is_accepted_whole(target, plain):
    perfect = replay(target, PROMPTS, plain.tokens)
    run = generate(target, perfect, PROMPTS, max_new_tokens=24, tree=CHAIN)
    assert run.tokens == plain.tokens
    # 23 tokens after prefill's, 4 a pass: five full passes and one that the budget cuts.
    assert run.stats.row_passes == (6, 6, 6)
    assert run.stats.tau == pytest.approx(23 / 6)
    for row in run.stats.drafted:
        assert sum(row) == 23 - 5


def test_adversarial_drafter_costs_nothing_but_speed(target, plain):
    wrong = replay(target, PROMPTS, plain.tokens, offset=1)
    run = generate(target, wrong, PROMPTS, max_new_tokens=24, tree=TreeShape(6, 3, 2))
    assert run.tokens == plain.tokens
    assert run.stats.tau == 1.0
    assert run.stats.acceptance_by_depth == (0.0, 0.0, 0.0)


def test_perfect_drafter_under_sampling(target):
    options = {"max_new_tokens": 24, "sampling": Sampling(1.0), "seed": [1, 2, 3]}
    expected = generate(target, None, PROMPTS, **options)
    perfect = replay(target, PROMPTS, expected.tokens)
    run = generate(target, perfect, PROMPTS, tree=CHAIN, **options)
    assert run.tokens == expected.tokens
    assert run.stats.row_passes == (6, 6, 6)


@pytest.fixture(scope="module")
def perfect(target, plain):
    return replay(target, PROMPTS[:1], plain.tokens[:1])


@pytest.mark.parametrize("budget", range(1, 12))
def test_budget_at_every_offset(target, plain, perfect, budget):
    run = generate(target, perfect, PROMPTS[0], max_new_tokens=budget, tree=CHAIN)
    assert run.tokens[0] == plain.tokens[0][:budget]
    assert run.stats.passes == -(-(budget - 1) // 4)


def test_stop_token_at_every_offset(target, plain, perfect):
    answer = plain.tokens[0]
    firsts = {answer.index(token) for token in answer}
    assert len({(at - 1) % 4 for at in firsts if at}) == 4, "every offset of an accepted run"
    for at in sorted(firsts):
        run = generate(
            target, perfect, PROMPTS[0], max_new_tokens=24, tree=CHAIN, stop_tokens=[answer[at]]
        )
        assert run.tokens[0] == answer[: at + 1]


def test_end_of_sequence_of_the_target(target, plain, perfect):
    token = plain.tokens[0][5]
    end = plain.tokens[0].index(token) + 1
    target.eos = (token,)
    try:
        stopped = generate(target, perfect, PROMPTS[0], max_new_tokens=24, tree=CHAIN)
        going_on = generate(
            target, perfect, PROMPTS[0], max_new_tokens=24, tree=CHAIN, ignore_eos=True
        )
    finally:
        target.eos = ()
    assert stopped.tokens[0] == plain.tokens[0][:end]
    assert going_on.tokens[0] == plain.tokens[0]


def test_up_to_the_context_limit(target, drafter):
    prompt = list(range(1, 41))
    budget = target.config.context - len(prompt)
    expected = generate(target, None, prompt, max_new_tokens=budget).tokens
    assert len(expected[0]) == budget
    run = generate(target, drafter, prompt, max_new_tokens=budget, tree=DEEP)
    assert run.tokens == expected


def test_a_prompt_of_several_chunks(target, drafter, plain, monkeypatch):
    monkeypatch.setattr("eagle_jax.decode.engine.largest_chunk", lambda: 8)
    run = generate(target, drafter, PROMPTS, max_new_tokens=24, tree=CHAIN)
    assert run.tokens == plain.tokens


def test_stream_equals_generate(target, drafter, plain):
    pieces = {row: [] for row in range(3)}
    run = stream(target, drafter, PROMPTS, max_new_tokens=24, tree=CHAIN)
    flags = {row: [] for row in range(3)}
    while True:
        try:
            piece = next(run)
        except StopIteration as end:
            stats = end.value
            break
        pieces[piece.row].append(piece.token)
        flags[piece.row].append(piece.drafted)
    assert [pieces[row] for row in range(3)] == plain.tokens
    assert [tuple(flags[row]) for row in range(3)] == list(stats.drafted)


def test_compiles_once_a_bucket(target, drafter):
    tree = TreeShape(3, 2, 1)
    for prompt, budget in (([1], 20), ([2] * 9, 7), ([3] * 16, 40), ([4] * 5, 33)):
        generate(target, drafter, prompt, max_new_tokens=budget, tree=tree)
    counts = engine(target, drafter, tree).compilations
    assert counts == {"prefill": 1, "run": 1}


@pytest.mark.parametrize("tree", [PLAIN, CHAIN, GATED], ids=["plain", "chain", "gated"])
@pytest.mark.parametrize("batch", [1, 4])
def test_the_caches_stay_in_place(tree, batch):
    """A cycle's temporaries are smaller than the caches, which it updates where they lie."""
    # Heads of a usual size: with tiny ones the scores outweigh the cache.
    config = dataclasses.replace(TINY, head_dim=64, context=1000, num_layers=4)
    target = tiny_target(config=config)
    runner = engine(target, NO_DRAFTER if tree == PLAIN else tiny_drafter(target), tree)
    state = runner.start([[1, 2, 3]] * batch, 900, Sampling(), [0] * batch, ())
    caches = sum(x.nbytes for layer in state.caches for x in (layer.keys, layer.values))
    memory = runner.compile_ahead(state, steps=True).memory_analysis()
    assert memory.temp_size_in_bytes < caches / 2
    assert memory.alias_size_in_bytes >= caches
    old = state.caches[0].keys
    runner.step(state)
    assert old.is_deleted(), "the state is donated"


def test_rows_finish_at_different_times(target, drafter, plain):
    stop = plain.tokens[1][3]
    run = generate(target, drafter, PROMPTS, max_new_tokens=24, tree=WIDE, stop_tokens=[stop])
    for answer, whole in zip(run.tokens, plain.tokens, strict=True):
        end = whole.index(stop) + 1 if stop in whole else len(whole)
        assert answer == whole[:end]
    assert len(set(map(len, run.tokens))) > 1
    assert np.sum(run.stats.row_passes) == run.stats.passes
