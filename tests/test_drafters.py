"""Draft models, n-grams and merged drafters: the promise, what a draft model reads, names."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import PROMPTS
from make_fixtures import FOLDER
from test_gguf import TOKENS, write_gguf
from test_head_formats import config as head_config
from test_head_formats import eagle_tensors, write
from test_identity_families import GEMMA_LIKE
from test_target import forward

from eagle_jax import InputError, Sampling, TreeShape, generate, load_drafter
from eagle_jax.decode.engine import Engine
from eagle_jax.decode.generate import engine
from eagle_jax.decode.tune import best_tree
from eagle_jax.drafters.draft_model import DraftModel
from eagle_jax.drafters.load import NGRAM_TREE, LoadedDrafter
from eagle_jax.drafters.merged import MergedDrafter
from eagle_jax.nn.modules import parameters
from eagle_jax.tiny import TINY, tiny_drafter, tiny_target
from eagle_jax.tree import DraftTree

CHAIN = TreeShape(4, 3, 1)
DEEP = TreeShape(12, 5, 3)
GATED = TreeShape(8, 2, 4, gate=0.3)
LOOPING = [7, 8, 9, 7, 8, 9, 7]  # something to look up
TEXTS = [*PROMPTS[:2], LOOPING]


@pytest.fixture(scope="module")
def drafters(target):
    """By name; those of one test share their compiled engines."""
    head = tiny_drafter(target)
    names = ("ngram", "layers:1", "layers:2", "layers:1+ngram")
    found = {name: load_drafter(name, target) for name in names}
    module = MergedDrafter(head.module, target.config.vocab_size)
    return found | {"head+ngram": LoadedDrafter("head+ngram", module)}


@pytest.fixture(scope="module")
def expected(target):
    """Plain runs by sampling; one row ends early at a stop token."""

    def run(sampling):
        options = {"max_new_tokens": 24, "sampling": sampling, "seed": [5, 6, 7]}
        whole = generate(target, None, TEXTS, **options).tokens
        options["stop_tokens"] = [whole[0][7]]
        return options, generate(target, None, TEXTS, **options).tokens

    return {sampling: run(sampling) for sampling in (Sampling(), Sampling(1.0, top_k=12))}


@pytest.mark.parametrize("name", ["ngram", "layers:1", "layers:1+ngram", "head+ngram"])
@pytest.mark.parametrize(
    ("sampling", "tree"),
    [(Sampling(), DEEP), (Sampling(1.0, top_k=12), GATED), (Sampling(1.0, top_k=12), CHAIN)],
    ids=["greedy deep", "sampled gated", "sampled chain"],
)
def test_drafters_do_not_change_tokens(target, drafters, expected, name, sampling, tree):
    options, tokens = expected[sampling]
    assert len(set(map(len, tokens))) > 1, "rows end at different times"
    run = generate(target, drafters[name], TEXTS, tree=tree, **options)
    assert run.tokens == tokens
    if name != "head+ngram" or sampling.greedy:  # a random head guesses a sampled token by luck
        assert any(map(sum, run.stats.drafted)), "some drafts were accepted"


def test_a_draft_model_that_equals_the_target_is_accepted_whole(target, drafters):
    """Sharing the noise, at temperature 1 and greedily, whatever the prompt's length."""
    twin = drafters["layers:2"]
    for sampling in (Sampling(1.0), Sampling()):
        options = {"max_new_tokens": 24, "sampling": sampling, "seed": [1, 2, 3]}
        expected = generate(target, None, PROMPTS, **options).tokens
        run = generate(target, twin, PROMPTS, tree=CHAIN, **options)
        assert run.tokens == expected
        assert run.stats.row_passes == (6, 6, 6)  # 23 tokens after prefill's, 4 a pass
    for budget in range(1, 10):  # the end at every offset of an accepted run
        run = generate(target, twin, PROMPTS, max_new_tokens=budget, tree=CHAIN)
        assert run.tokens == [row[:budget] for row in expected]
        assert run.stats.row_passes == (-(-(budget - 1) // 4),) * 3


@pytest.mark.parametrize("name", ["ngram", "layers:2"])
def test_up_to_the_context_limit(target, drafters, name):
    prompt = list(range(1, 41))
    budget = target.config.context - len(prompt)
    expected = generate(target, None, prompt, max_new_tokens=budget).tokens
    run = generate(target, drafters[name], prompt, max_new_tokens=budget, tree=DEEP)
    assert run.tokens == expected and len(run.tokens[0]) == budget


@pytest.fixture(scope="module", params=["llama", "windows"])
def smaller(request):
    """A draft model of other sizes than the target's, also with windows and caps."""
    config = {
        "llama": dataclasses.replace(TINY, hidden_size=16, num_layers=1, num_kv_heads=1),
        "windows": dataclasses.replace(GEMMA_LIKE, vocab_size=61),
    }[request.param]
    return DraftModel(tiny_target(seed=9, config=config).model)


def test_it_scores_as_a_forward_over_the_whole_text_does(target, smaller, monkeypatch):
    """After prefill in several chunks, and after every cycle with its accepted and cut drafts."""
    monkeypatch.setattr("eagle_jax.decode.engine.largest_chunk", lambda: 4)
    runner = Engine(target.model, smaller, DEEP)
    rows = [*TEXTS, [5], list(range(1, 17))]  # of one token, and of whole chunks
    state = runner.start(rows, 12, Sampling(1.0), range(5), ())
    cycles = 0
    while not np.asarray(state.done).all():
        length, tokens = np.asarray(state.length), np.asarray(state.tokens)
        logits = np.asarray(state.drafter.logits)
        for row in np.flatnonzero(~np.asarray(state.done)):
            text = tokens[row : row + 1, : length[row] + 1]
            whole, _ = forward(smaller.model, text)
            np.testing.assert_allclose(logits[row], whole[0, -1], atol=2e-4)
        state = runner.step(state)
        cycles += 1
    assert cycles >= 4
    assert int(np.asarray(state.accepted).sum()) > 0, "some cycles committed several tokens"


def test_the_tree_is_scored_as_forwards_along_its_paths_are(target, smaller):
    runner = Engine(target.model, smaller, DEEP)
    state = runner.start(TEXTS, 12, Sampling(), [0] * 3, ())
    root = jnp.take_along_axis(state.tokens, state.length[:, None], axis=1)[:, 0]
    draw = state.sampler.draw(state.length + 1, DEEP.depth, 61)
    tree: DraftTree = jax.jit(smaller.propose, static_argnums=4)(
        state.drafter, root, state.length, draw, DEEP
    )
    assert tree.depth.max() >= 2, "the scores of a level rest on those of the level above"
    for row, length in enumerate(np.asarray(state.length)):
        for node in range(1, DEEP.nodes):
            path = np.flatnonzero(tree.ancestors[row, node])
            text = np.asarray(state.tokens)[row, :length].tolist()
            text += np.asarray(tree.tokens)[row, path].tolist()
            logits, _ = forward(smaller.model, np.array([text]))
            scores = jax.nn.log_softmax(logits)[0]
            found = sum(scores[at, text[at + 1]] for at in range(length, len(text) - 1))
            assert tree.scores[row, node] == pytest.approx(float(found), abs=1e-3)


def test_first_layers_share_the_weights(target, drafters):
    shallow = drafters["layers:1"].module.model
    own = parameters(target.model)
    for name, array in parameters(shallow).items():
        assert array is own[name], name
    assert shallow.config.num_layers == 1


def test_a_model_folder_or_file_is_a_draft_model(target, tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE_JAX_CACHE", str(tmp_path / "cache"))
    drafter = load_drafter(str(FOLDER / "llama-separate"), target)
    assert (drafter.method, drafter.format) == ("draft_model", "a whole model")
    run = generate(target, drafter, PROMPTS, max_new_tokens=4, tree=CHAIN)
    assert run.tokens == generate(target, None, PROMPTS, max_new_tokens=4).tokens
    write_gguf(tmp_path / "model.gguf")
    wide = tiny_target(config=dataclasses.replace(TINY, vocab_size=len(TOKENS)))
    assert load_drafter(str(tmp_path / "model.gguf"), wide).method == "draft_model"
    for name in (FOLDER / "llama3", tmp_path / "model.gguf"):
        with pytest.raises(InputError, match="needs the target's vocabulary"):
            load_drafter(str(name), target)
    # A head names a family too.
    fields = head_config(model_type="llama", architectures=["LlamaForCausalLM"])
    head = write(tmp_path / "head", fields, eagle_tensors())
    assert load_drafter(head, tiny_target(config=dataclasses.replace(TINY, num_layers=8))).method


NAMES = [
    ("layers:0", "from 1 to the target's 2 layers"),
    ("layers:3", "from 1 to the target's 2 layers"),
    ("layers:two", "from 1 to the target's 2 layers"),
    ("ngrams", "no drafter at"),
    ("nowhere.gguf", "no such target"),
    ("layers:1+layers:2", r"expected '\+ngram' after"),
    ("none+ngram", r"expected '\+ngram' after"),
    ("ngram+ngram", r"expected '\+ngram' after"),
    ("nowhere+ngram", "no drafter at 'nowhere'"),
    ("auto+ngram", "no head ships"),
]


@pytest.mark.parametrize(("name", "message"), NAMES, ids=lambda x: x[:20])
def test_names_that_mean_nothing_are_refused(target, name, message):
    with pytest.raises(InputError, match=message):
        load_drafter(name, target)


def test_options_of_heads_are_refused_elsewhere(target):
    for name in ("ngram", "layers:1", "layers:1+ngram"):
        with pytest.raises(InputError, match="is no head"):
            load_drafter(name, target, rope_theta=5e5)


def test_the_tree_where_none_is_asked_for(target, drafters, monkeypatch, tmp_path):
    """N-grams name theirs; a draft model is measured, once, and known by its name."""
    monkeypatch.setenv("EAGLE_JAX_CACHE", str(tmp_path))
    assert best_tree(target, drafters["ngram"]) == NGRAM_TREE
    asked = []

    def predict(target, drafter, batch):
        asked.append(drafter.name)
        return [{"nodes": 4, "depth": 3, "top_k": 1, "gate": 0.0, "speedup": 2.0}]

    monkeypatch.setattr("eagle_jax.decode.tune.predict", predict)
    for name in ("layers:1", "layers:2", "layers:1", "layers:1+ngram"):
        assert best_tree(target, drafters[name]) == CHAIN
    assert asked == ["layers:1", "layers:2", "layers:1+ngram"]


def test_merged_drafters_share_the_noise_of_their_base(drafters):
    merged = drafters["head+ngram"].module
    assert merged.coupled
    merged.coupled = False
    assert not merged.base.coupled
    merged.coupled = True


def test_engines_compile_once(target, drafters):
    tree = TreeShape(3, 2, 1)
    for prompt, budget in (([1], 20), ([2] * 9, 7), ([3] * 16, 40)):
        generate(target, drafters["layers:1+ngram"], prompt, max_new_tokens=budget, tree=tree)
    counts = engine(target, drafters["layers:1+ngram"], tree).compilations
    assert counts == {"prefill": 1, "run": 1}
