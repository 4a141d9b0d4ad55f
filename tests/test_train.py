"""Training on the tiny target: packing, masks, the unroll against brute force, resume, overfit."""

from __future__ import annotations

import dataclasses
import gzip
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from eagle_jax import FormatError, InputError, TreeShape, generate
from eagle_jax.config import DrafterConfig, default_taps
from eagle_jax.drafters.load import LoadedDrafter, bind
from eagle_jax.nn.modules import parameters
from eagle_jax.tiny import TINY, tiny_target
from train.__main__ import main as train_main
from train.corpus import Corpus
from train.cost import step_flops
from train.data import Sample, draft_vocabulary, pack, read_answers
from train.features import extract
from train.fit import fit, lend
from train.loss import Batch, Frozen, Objective, objective, unroll
from train.metrics import read_metrics
from train.plan import FitConfig
from train.start import initial_head
from train.store import lay_out

TAPS = default_taps(TINY.num_layers)
HIDDEN = TINY.hidden_size


@pytest.fixture(scope="module")
def small():
    """Target, eight conversations that it wrote, and their features on disk."""
    import tempfile
    from pathlib import Path

    target = tiny_target()
    prompts = [[i, i + 1] for i in range(1, 9)]
    answers = generate(target, None, prompts, max_new_tokens=40).tokens
    samples = [
        Sample(np.array(p + a[: 40 - 2 * i], np.int32), 2)
        for i, (p, a) in enumerate(zip(prompts, answers, strict=True))
    ]
    with tempfile.TemporaryDirectory() as folder:
        features = extract(target.model, samples, Path(folder), TAPS)
        yield target, samples, features


def corpus(samples, features, length=96):
    store = lay_out(samples, features)
    return Corpus(pack(store.samples, length, 0.5, ()), store, HIDDEN)


def new_head(target, method, draft_ids):
    """A head to train; EAGLE-3 with its own LM head."""
    taps = TAPS if method == "eagle3" else ()
    config = DrafterConfig.like(target.config, len(draft_ids), taps)
    config = dataclasses.replace(config, own_lm_head=bool(taps))
    return initial_head(target.model, config, 0, draft_ids)


def test_features_do_not_depend_on_padding_or_company(small):
    target, samples, features = small
    from eagle_jax.nn.attention import Visible

    at = 0
    for sample in samples:
        rows = len(sample.tokens)
        visible = Visible(jnp.zeros(1, jnp.int32), jnp.tri(rows, dtype=bool)[None])
        alone, taps, _ = target.model(
            jnp.asarray(sample.tokens)[None], jnp.arange(rows)[None], visible, None, TAPS
        )
        found = features[at : at + rows]
        np.testing.assert_allclose(found[:, :HIDDEN], alone[0], atol=5e-3)
        np.testing.assert_allclose(found[:, HIDDEN:], taps[0], atol=5e-3)
        at += rows


def test_extraction_resumes_and_refuses_other_samples(small, tmp_path):
    target, samples, features = small
    extract(target.model, samples, tmp_path, TAPS)
    marker = tmp_path / "progress.json"
    state = json.loads(marker.read_text())
    marker.write_text(json.dumps({**state, "batches": state["batches"] - 1}))
    np.testing.assert_array_equal(extract(target.model, samples, tmp_path, TAPS), features)
    for others, taps in ((samples[1:], TAPS), (samples, (0,))):
        with pytest.raises(InputError, match="other samples"):
            extract(target.model, others, tmp_path, taps)


def test_packing_keeps_documents_whole_and_weights_by_owner():
    samples = [Sample(np.arange(1, n + 1, dtype=np.int32), 3) for n in (6, 9, 4, 12, 5)]
    store = lay_out(samples, np.zeros((36, 0), np.float16))
    packed, tokens = pack(store.samples, 16, 0.25, eos=(5,)), store.tokens
    seen = []
    for row in range(len(packed)):
        for document in set(packed.document[row]) - {-1}:
            at = np.flatnonzero(packed.document[row] == document)
            assert (np.diff(at) == 1).all()
            text = tokens[packed.source[row, at]]
            seen.append(len(text))
            np.testing.assert_array_equal(packed.position[row, at], np.arange(len(text)))
            for t, weight in enumerate(packed.weight[row, at]):
                if t + 1 >= len(text):
                    expected = 0.0  # nothing follows
                elif t + 1 < 3:
                    expected = 0.25  # the next token belongs to the prompt
                else:
                    expected = 0.0 if text[t + 1] == 5 else 1.0  # nothing after the end
                assert weight == expected
    assert sorted(seen) == [4, 5, 6, 9, 12]
    assert (packed.weight[packed.document == -1] == 0).all()
    with pytest.raises(InputError):
        pack(samples, 8, 1.0, ())


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_noise_goes_by_the_size_of_a_row(small, method):
    """A row of equal values v has the root mean square |v|, so a noise of 0.5 makes it 1.5 v."""
    target, samples, features = small
    data = corpus(samples, features)
    batch = jax.tree.map(jnp.asarray, data.batch(np.array([0])))
    size = 1.0 + jnp.arange(96.0)[None, :, None]
    level = batch.replace(
        features=jnp.broadcast_to(size, batch.features.shape),
        taps=jnp.broadcast_to(size, batch.taps.shape),
    )
    larger = level.replace(features=1.5 * level.features, taps=1.5 * level.taps)
    ids = draft_vocabulary(samples, 61, 30)
    frozen = lend(target.model, ids, data).replace(tap_scale=1.0)
    head = new_head(target, method, ids)
    read = level.taps if method == "eagle3" else level.features
    ((noisy, _),) = unroll(head, frozen, level, 1, jnp.full(read.shape, 0.5))
    ((scaled, _),) = unroll(head, frozen, larger, 1)
    ((still, _),) = unroll(head, frozen, level, 1)
    np.testing.assert_allclose(noisy, scaled, rtol=1e-4, atol=1e-4)
    assert np.abs(noisy - still).max() > 1e-2


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_unrolled_steps_against_brute_force(small, method):
    """Each row's steps are run one at a time through the head with an explicit row cache."""
    target, samples, features = small
    data = corpus(samples, features)
    batch = jax.tree.map(jnp.asarray, data.batch(np.array([0])))
    ids = draft_vocabulary(samples, 61, 30)
    frozen = lend(target.model, ids, data)
    head = new_head(target, method, ids)
    weights = Objective(steps=3, step_decay=0.7, feature_weight=0.8, token_weight=0.3)

    from eagle_jax.nn.attention import Visible

    def one(token, feature, position, earlier):
        """One row that sees everything in `earlier` and itself."""
        seen = 0 if earlier is None else earlier.keys.shape[-1]
        visible = Visible(jnp.zeros(1, jnp.int32), jnp.ones((1, 1, seen + 1), bool))
        embedding = frozen.embed[token][None, None]
        out, keys = head(
            embedding, feature[None, None], jnp.array([[position]]), visible, None, earlier
        )
        return out[0, 0], keys

    def terms(predicted, wanted):
        d = np.abs(predicted - wanted)
        smooth = np.where(d < 1, 0.5 * d**2, d - 0.5).mean()
        teacher = np.asarray(jax.nn.softmax(jnp.asarray(frozen.head_rows @ wanted)))
        own = frozen.head_rows if head.lm_head is None else head.lm_head[...]
        return smooth, -(teacher * np.asarray(jax.nn.log_softmax(own @ predicted))).sum()

    document, weight = np.asarray(batch.document[0]), np.asarray(batch.weight[0])
    tokens, true = np.asarray(batch.tokens[0]), np.asarray(batch.features[0])
    read = head.fuse(batch.taps * frozen.tap_scale if method == "eagle3" else batch.features)[0]
    sums = np.zeros((3, 3))
    earlier = None
    for t in range(len(document)):  # the first document of the row
        if document[t] != document[0]:
            break
        if t + 1 >= len(document) or document[t + 1] != document[t]:
            continue
        out, earlier = one(tokens[t + 1], read[t], t, earlier)
        keys = earlier
        for step in range(3):
            if step:
                at = t + step
                if at + 1 >= len(document) or document[at + 1] != document[t]:
                    break
                out, keys = one(tokens[at + 1], out, t + step, keys)
            smooth, cross = terms(np.asarray(head.readout(out)), true[t + 1 + step])
            w = weight[t + step]
            sums[step] += [w, w * smooth, w * cross]
    first = jnp.where(batch.document == batch.document[0, 0], batch.weight, 0.0)
    only = dataclasses.replace(batch, weight=first)
    loss, parts = objective(head, frozen, only, None, weights)
    np.testing.assert_allclose(parts["supervised"], sums[:, 0], rtol=1e-5)
    np.testing.assert_allclose(parts["feature_loss"], sums[:, 1], rtol=2e-3)
    np.testing.assert_allclose(parts["token_loss"], sums[:, 2], rtol=2e-3)
    by_step = (0.8 * sums[:, 1] + 0.3 * sums[:, 2]) / sums[:, 0]
    np.testing.assert_allclose(loss, (by_step * 0.7 ** np.arange(3)).sum(), rtol=2e-3)


def test_documents_do_not_see_one_another(small):
    target, samples, features = small
    batch = corpus(samples, features).batch(np.array([0]))
    ids = draft_vocabulary(samples, 61, 61)
    frozen = lend(target.model, ids, corpus(samples, features))
    head = new_head(target, "eagle", ids)
    second = batch.document[0] == 1
    assert second.any()

    def first_loss(batch):
        only = dataclasses.replace(batch, weight=np.where(batch.document == 0, batch.weight, 0))
        return objective(head, frozen, jax.tree.map(jnp.asarray, only), None, Objective(2))[0]

    changed = dataclasses.replace(
        batch, features=np.where(second[:, None], batch.features + 1, batch.features)
    )
    assert first_loss(batch) == first_loss(changed)


FIT = FitConfig(epochs=6, batch=1, learning_rate=0.02, checkpoint_every=6)


def run_fit(small, folder, config, method="eagle"):
    target, samples, features = small
    data = corpus(samples, features)
    ids = draft_vocabulary(samples, 61, 61)
    head = new_head(target, method, ids)
    return fit(head, lend(target.model, ids, data), data, data, config, folder), ids


def test_resume_is_bit_for_bit(small, tmp_path):
    whole, _ = run_fit(small, tmp_path / "whole", FIT)

    class Killed(Exception):
        pass

    def stop(row):
        if row["step"] == 12:
            raise Killed

    target, samples, features = small
    data = corpus(samples, features)
    ids = draft_vocabulary(samples, 61, 61)
    lent, head = lend(target.model, ids, data), new_head(target, "eagle", ids)
    with pytest.raises(Killed):  # killed after step 12 was logged and before it was saved
        fit(head, lent, data, data, FIT, tmp_path / "cut", stop)
    resumed, _ = run_fit(small, tmp_path / "cut", FIT)
    for name, array in parameters(whole).items():
        np.testing.assert_array_equal(array, parameters(resumed)[name], err_msg=name)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_overfits_and_decodes_as_trained(small, tmp_path, method):
    """Eight conversations are learnt, and the decode cycle accepts what training promised."""
    target, samples, features = small
    goal = Objective(steps=2, token_weight=1.0, noise=0.0)
    config = dataclasses.replace(FIT, epochs=200, checkpoint_every=1000, objective=goal)
    head, ids = run_fit(small, tmp_path, config, method)
    data = corpus(samples, features)
    batch = jax.tree.map(jnp.asarray, data.batch(np.arange(3)))
    frozen = lend(target.model, ids, data)
    frozen = frozen.replace(tap_scale=np.ones_like(frozen.tap_scale))  # folded into the head
    _, parts = objective(head, frozen, batch, None, config.objective)
    trained = np.asarray(parts["hits"] / parts["supervised"])
    assert trained[0] >= 0.95
    drafter = LoadedDrafter("fitted", bind(head, ids, target))
    prompts = [s.tokens[:2].tolist() for s in samples]
    run = generate(target, drafter, prompts, max_new_tokens=24, tree=TreeShape(4, 3, 1))
    plain = generate(target, None, prompts, max_new_tokens=24)
    assert run.tokens == plain.tokens
    assert run.stats.acceptance_by_depth[0] >= 0.85
    assert run.stats.tau >= 3.0


def test_answers_are_read_and_checked(tmp_path):
    good = tmp_path / "a.jsonl.gz"
    with gzip.open(good, "wt") as out:
        out.write(json.dumps({"prompt": [1, 2], "out": [3, 4, 5]}) + "\n")
        out.write(json.dumps({"prompt": [1] * 9, "out": [3, 4]}) + "\n")
    samples = read_answers([good], 61, max_length=6)
    assert [s.tokens.tolist() for s in samples] == [[1, 2, 3, 4, 5]]
    assert [s.cut for s in read_answers([good], 61, max_length=4)] == [1]
    for line in ('{"prompt": [1]}', "[]", "{", '{"prompt": [1], "out": [99, 1]}'):
        bad = tmp_path / "bad.jsonl"
        bad.write_text(line + "\n")
        with pytest.raises(FormatError, match="line 1"):
            read_answers([bad], 61, 6)
    with pytest.raises(InputError, match="no such file"):
        read_answers([tmp_path / "none"], 61, 6)


def test_draft_vocabulary_ranks_by_use_in_answers():
    samples = [Sample(np.array([9, 9, 9, 4, 7, 7], np.int32), 3)]
    assert draft_vocabulary(samples, 12, 2).tolist() == [4, 7]
    assert draft_vocabulary(samples, 12, 4).tolist() == [0, 1, 4, 7]
    with pytest.raises(InputError):
        draft_vocabulary(samples, 12, 13)


def test_command_refuses_bad_input(tmp_path, capsys):
    arguments = ["--answers", str(tmp_path / "none.jsonl"), "--out", str(tmp_path / "out")]
    assert train_main([*arguments, "--target", str(tmp_path / "nowhere.gguf")]) == 2
    assert "no such target" in capsys.readouterr().err


def one_step(small, folder, **changes):
    """Weights after an epoch of one step over all rows, without noise; and the metrics."""
    still = Objective(noise=0.0, remat=changes.pop("remat", False))
    config = FitConfig(epochs=1, learning_rate=0.02, single=0.0, objective=still)
    config = dataclasses.replace(config, **changes)
    target, samples, features = small
    data = corpus(samples, features)
    assert len(data) == 4
    ids = draft_vocabulary(samples, 61, 61)
    head = new_head(target, "eagle3", ids)
    head = fit(head, lend(target.model, ids, data), data, data, config, folder)
    return parameters(head), read_metrics(folder / "metrics.csv")


@pytest.fixture(scope="module")
def at_once(small, tmp_path_factory):
    return one_step(small, tmp_path_factory.mktemp("once"), batch=4)


@pytest.mark.parametrize("changes", [{"batch": 1, "accumulate": 4}, {"batch": 4, "remat": True}])
def test_accumulated_and_rematerialised_steps_are_the_same_step(small, at_once, tmp_path, changes):
    weights, metrics = one_step(small, tmp_path, **changes)
    assert len(metrics) == 1
    for name, array in at_once[0].items():
        np.testing.assert_allclose(weights[name], array, atol=2e-4, err_msg=name)
    assert metrics[0]["positions"] == at_once[1][0]["positions"]


def test_bfloat16_computes_near_float32_and_keeps_float32_weights(small, at_once, tmp_path):
    weights, metrics = one_step(small, tmp_path, batch=4, compute_dtype="bfloat16")
    assert all(array.dtype == jnp.float32 for array in weights.values())
    for name in ("train_token_loss_1", "train_feature_loss_2"):
        assert metrics[0][name] == pytest.approx(at_once[1][0][name], rel=0.03)
    rounded = [jnp.array_equal(x, x.astype(jnp.bfloat16)) for x in weights.values()]
    assert not all(rounded)


def test_the_arithmetic_of_a_step_agrees_with_the_compilers(small):
    """Within a few percent of XLA's count for loss and gradient, at sizes where products rule."""
    target = tiny_target(config=dataclasses.replace(TINY, hidden_size=128, head_dim=32))
    config = DrafterConfig.like(target.config, 61, TAPS)
    head = initial_head(target.model, config, 0, np.arange(61))
    rows, length, goal = 2, 64, Objective(steps=2)
    width = target.config.hidden_size
    batch = Batch(
        tokens=jnp.zeros((rows, length), jnp.int32),
        features=jnp.ones((rows, length, width)),
        taps=jnp.ones((rows, length, len(TAPS) * width)),
        document=jnp.zeros((rows, length), jnp.int32),
        position=jnp.tile(jnp.arange(length), (rows, 1)),
        weight=jnp.ones((rows, length)),
    )
    model = target.model
    frozen = Frozen(model.embed[...], model.head_weight, jnp.ones(len(TAPS) * width))
    graph, state = nnx.split(head)

    def loss(state):
        return objective(nnx.merge(graph, state), frozen, batch, None, goal)[0]

    counted = jax.jit(jax.grad(loss)).lower(state).compile().cost_analysis()["flops"]
    ours = step_flops(head, FitConfig(newton_schulz=0), goal, rows, length)
    assert ours == pytest.approx(counted, rel=0.15)
