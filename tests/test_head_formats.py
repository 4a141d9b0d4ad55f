"""Heads of other projects: loaded, they compute what a NumPy reading of their tensors computes;
whatever is missing, extra or inconsistent is refused."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest
from released import (
    DRAFTS,
    INNER,
    LAYERS,
    VOCAB,
    WIDTH,
    cast,
    config,
    deep_target,
    eagle3_tensors,
    eagle_tensors,
    forward,
    write,
)
from safetensors.numpy import save_file

from eagle_jax import FormatError, InputError, TreeShape, generate, load_drafter
from eagle_jax.config import ModelConfig
from eagle_jax.nn.modules import parameters
from eagle_jax.tiny import TINY, tiny_target

EAGLE3 = {"draft_vocab_size": DRAFTS}
OWN = np.random.default_rng(5).normal(size=(VOCAB, WIDTH)).astype(np.float32)
WIDE = np.random.default_rng(6).normal(size=(VOCAB, 48)).astype(np.float32)


@pytest.fixture(scope="module")
def target():
    return deep_target()


def observed(drafter, tokens, features):
    module = drafter.module
    state = module.observe(
        module.init(1, 24),
        jnp.asarray(tokens[None], jnp.int32),
        jnp.asarray(features[None], jnp.float32),
        jnp.array([0]),
        jnp.array([len(tokens)]),
    )
    return np.asarray(state.feature[0]), np.asarray(state.logits[0])


def nested(**changes):
    """A speculators configuration."""
    top = {
        "architectures": ["Eagle3Speculator"],
        "model_type": "speculators",
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "draft_vocab_size": DRAFTS,
        "norm_before_residual": True,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 8],
        "transformer_layer_config": config(
            head_dim=8, rope_parameters={"rope_type": "default", "rope_theta": 5e5}
        ),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "x/y", "architectures": ["LlamaForCausalLM"]},
        },
    }
    return {**top, **changes}


# Each: configuration, tensors, options of the loader, what the oracle must know, expected settings.
CASES = {
    "eagle": (config(), eagle_tensors(), {}, {}, {"rope base": 1e4}),
    "eagle without fc bias": (
        config(bias=False, rope_theta=500000), eagle_tensors(bias=False), {}, {"theta": 5e5}, {}),
    "eagle with qkv bias": (
        config(qkv_bias=True), eagle_tensors(qkv_bias=True), {}, {}, {"embedding": "shared"}),
    "eagle with its own embedding": (
        config(), eagle_tensors(embed=OWN), {}, {}, {"embedding": "own"}),
    "eagle3": (config(**EAGLE3), eagle3_tensors(), {}, {}, {
        "capture layers": LAYERS, "rope base": 1e4, "norm before residual": False}),
    "eagle3 over the full vocabulary": (
        config(), eagle3_tensors(drafts=VOCAB), {}, {}, {}),
    "other spellings": (
        config(**EAGLE3, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 4, 6],
                                       "use_aux_hidden_state": True}),
        {f"model.{n}": a for n, a in eagle3_tensors(layer="layers.0.").items()}, {}, {},
        {"capture layers": (1, 4, 6)}),
    "eagle3.1": (
        config(**EAGLE3, fc_norm=True, norm_output=True), eagle3_tensors(extra=("fc_norm",)), {},
        {"output": True}, {}),
    "norm before fc": (
        config(**EAGLE3, norm_before_fc=True), eagle3_tensors(extra=("input_norm",)), {}, {}, {}),
    "norm before residual": (
        config(**EAGLE3, norm_before_residual=True), eagle3_tensors(), {}, {"residual": True}, {}),
    "qkv bias": (
        config(**EAGLE3, attention_bias=True), eagle3_tensors(extra=("bias",)), {}, {}, {}),
    "a width of its own": (
        config(**EAGLE3, hidden_size=48, target_hidden_size=WIDTH),
        eagle3_tensors(width=48, embed=WIDE), {}, {}, {"embedding": "own"}),
    "four layers": (
        config(**EAGLE3, eagle_aux_hidden_state_layer_ids=[0, 2, 4, 6]), eagle3_tensors(layers=4),
        {}, {}, {"capture layers": (0, 2, 4, 6)}),
    "speculators": (
        nested(), eagle3_tensors(layer="layers.0."), {}, {"theta": 5e5, "residual": True},
        {"capture layers": (1, 3, 8), "norm before residual": True, "rope base": 5e5}),
    "chosen by the caller": (
        config(**EAGLE3, rope_theta=5e5, norm_before_residual=True), eagle3_tensors(),
        {"rope_theta": 100.0, "layers": [1, 2, 3], "norm_before_residual": False},
        {"theta": 100.0}, {"capture layers": (1, 2, 3), "rope base": 100.0}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_loaded_head_computes_what_its_tensors_say(target, tmp_path, name):
    fields, tensors, options, oracle, settings = CASES[name]
    drafter = load_drafter(write(tmp_path / "head", fields, tensors), target, **options)
    found = {setting.name: setting.value for setting in drafter.settings}
    assert settings.items() <= found.items()
    expected = "EAGLE-1/2" if drafter.method == "eagle" else "EAGLE-3"
    assert drafter.format == ("speculators EAGLE-3" if name == "speculators" else expected)
    taps = drafter.module.taps
    assert taps == found.get("capture layers", ())
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, VOCAB, 9)
    features = rng.normal(size=(9, WIDTH * max(1, len(taps))))
    embed = np.asarray(target.model.embed[...])
    feature, logits = forward(tensors, tokens, features, embed, **oracle)
    ours, scores = observed(drafter, tokens, features)
    np.testing.assert_allclose(ours, feature, atol=3e-4, rtol=1e-3)
    if logits is None:
        logits = np.asarray(target.model.head_weight) @ feature
    np.testing.assert_allclose(scores, logits, atol=3e-3, rtol=1e-3)
    if "d2t" in tensors:
        ids = np.flatnonzero(tensors["t2d"])
        np.testing.assert_array_equal(drafter.module.draft_ids[...], ids)
    # The switches matter: the same tensors under another reading are another function.
    for wrong in ({"theta": 3.0}, {"residual": not oracle.get("residual", False)}):
        other, _ = forward(tensors, tokens, features, embed, **{**oracle, **wrong})
        if drafter.method == "eagle3" or "theta" in wrong:
            assert np.abs(other - feature).max() > 1e-3


@pytest.mark.parametrize("name", ["eagle", "a width of its own", "eagle3.1", "speculators"])
def test_text_is_the_targets_own(target, tmp_path, name):
    fields, tensors, *_ = CASES[name]
    drafter = load_drafter(write(tmp_path / "head", fields, tensors), target)
    run = generate(target, drafter, [[1, 2, 3]], max_new_tokens=12, tree=TreeShape(6, 3, 2))
    assert run.tokens == generate(target, None, [[1, 2, 3]], max_new_tokens=12).tokens


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
def test_dtypes_and_shards(target, tmp_path, dtype):
    tensors = cast(eagle3_tensors(), dtype)
    folder = tmp_path / "head"
    whole = load_drafter(write(folder, config(**EAGLE3), tensors), target)
    names = sorted(tensors)
    files = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({n: tensors[n] for n in names if files[n] == file}, folder / file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    sharded = load_drafter(str(folder), target)
    expected = parameters(whole.module.head)
    for name, array in parameters(sharded.module.head).items():
        assert array.dtype == target.dtype
        np.testing.assert_array_equal(array, expected[name])
    np.testing.assert_array_equal(expected["lm_head"], tensors["lm_head.weight"].astype(np.float32))


def test_an_embedding_that_repeats_the_targets_is_shared(target, tmp_path):
    embed = np.asarray(target.model.embed[...]).astype(np.float16).astype(np.float32)
    folder = write(tmp_path / "head", config(), eagle_tensors(embed=embed))
    drafter = load_drafter(folder, target)
    assert drafter.module.head.embed is None
    assert any("repeats" in str(setting) for setting in drafter.settings)


@pytest.mark.parametrize("name", ["eagle", "eagle3", "eagle3.1", "qkv bias", "norm before fc"])
def test_each_missing_or_extra_or_misshapen_tensor_is_refused(target, tmp_path, name):
    fields, tensors, *_ = CASES[name]
    folder = tmp_path / "head"
    for key, array in tensors.items():
        rest = {n: a for n, a in tensors.items() if n != key}
        write(folder, fields, rest)
        if key == "t2d":  # says nothing that d2t does not, and some trainers leave it out
            load_drafter(str(folder), target)
        else:
            with pytest.raises(FormatError):
                load_drafter(str(folder), target)
        longer = np.concatenate([array, array[:1]])
        write(folder, fields, {**rest, key: longer})
        with pytest.raises(InputError):
            load_drafter(str(folder), target)
        if array.dtype.kind == "f":
            broken = array.copy()
            broken.flat[3] = np.nan
            for bad in (broken, array.astype(np.int32)):
                write(folder, fields, {**rest, key: bad})
                with pytest.raises(FormatError, match=key.rpartition(".")[0][-12:]):
                    load_drafter(str(folder), target)
    write(folder, fields, {**tensors, "layers.1.mlp.up_proj.weight": tensors["fc.weight"]})
    with pytest.raises(FormatError, match="layers.1"):
        load_drafter(str(folder), target)


IDS = np.flatnonzero(eagle3_tensors()["t2d"])


def offsets(ids):
    return np.asarray(ids, np.int64) - np.arange(len(ids))


BAD_VOCABULARIES = {
    "falls": {"d2t": offsets(IDS[::-1])},
    "repeats": {"d2t": offsets([IDS[0], *IDS[:-1]])},
    "beyond": {"d2t": offsets([*IDS[:-1], VOCAB])},
    "negative": {"d2t": offsets([-1, *IDS[1:]])},
    "ids instead of offsets": {"d2t": IDS},
    "short": {"d2t": offsets(IDS)[:-1]},
    "floats": {"d2t": offsets(IDS).astype(np.float32)},
    "other t2d": {"t2d": np.roll(np.isin(np.arange(VOCAB), IDS), 1)},
    "t2d of ints": {"t2d": np.isin(np.arange(VOCAB), IDS).astype(np.int64)},
    "short t2d": {"t2d": np.isin(np.arange(VOCAB - 1), IDS)},
}


@pytest.mark.parametrize("name", BAD_VOCABULARIES)
def test_a_draft_vocabulary_must_be_consistent(target, tmp_path, name):
    tensors = {**eagle3_tensors(), **BAD_VOCABULARIES[name]}
    folder = write(tmp_path / "head", config(**EAGLE3), tensors)
    with pytest.raises(FormatError, match="d2t|t2d"):
        load_drafter(folder, target)


BAD_CONFIGS = [
    ({"hidden_size": 64}, "hidden_size=64"),
    ({"intermediate_size": INNER + 1}, "intermediate_size"),
    ({"num_attention_heads": 3}, "heads of one size"),
    ({"num_attention_heads": 0}, "heads of one size"),
    ({"num_attention_heads": "4"}, "type int"),
    ({"num_attention_heads": True}, "type int"),
    ({"num_key_value_heads": 4}, "num_key_value_heads=4"),
    ({"head_dim": 16}, "head_dim=16"),
    ({"draft_vocab_size": 31}, "draft_vocab_size=31"),
    ({"vocab_size": 20}, "draft_vocab_size"),
    ({"vocab_size": "absent"}, "lacks the field 'vocab_size'"),
    ({"rms_norm_eps": "absent"}, "rms_norm_eps"),
    ({"rms_norm_eps": [1]}, "type float"),
    ({"rope_theta": -1.0}, "rope_theta"),
    ({"rope_theta": "1e4"}, "rope_theta"),
    ({"rope_parameters": {"rope_theta": "x"}}, "rope_theta"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "--drafter-rope-theta"),
    ({"target_hidden_size": 16}, "target_hidden_size=16"),
    ({"hidden_act": "gelu"}, "gelu"),
    ({"fc_norm": True}, "fc_norm"),
    ({"eagle_config": {"use_aux_hidden_state": False}}, "fuses no layers"),
    ({"eagle_config": [1]}, "eagle_config"),
    ({"eagle_aux_hidden_state_layer_ids": [1, "2", 3]}, "layer numbers"),
    ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, "reads the layers"),
    ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, "needs its own embedding"),
    ({"layer_types": ["sliding_attention"]}, "sliding"),
    ({"speculators_model_type": "peagle"}, "'peagle'"),
    ({"medusa_num_heads": 3}, "Medusa"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_CONFIGS, ids=lambda x: str(x)[:40])
def test_a_configuration_must_agree_with_the_tensors(target, tmp_path, changes, message):
    folder = write(tmp_path / "head", config(**{**EAGLE3, **changes}), eagle3_tensors())
    with pytest.raises(InputError, match=message):
        load_drafter(folder, target)


def test_other_methods_and_other_targets_are_refused(target, tmp_path):
    medusa = {"0.0.linear.weight": OWN, "0.0.linear.bias": OWN[0], "0.1.weight": OWN}
    with pytest.raises(InputError, match="Medusa"):
        load_drafter(write(tmp_path / "a", config(), medusa), target)
    with pytest.raises(FormatError, match="no EAGLE head"):
        load_drafter(write(tmp_path / "b", config(), {"x": OWN}), target)
    twice = eagle3_tensors() | eagle3_tensors(layer="layers.0.")
    with pytest.raises(FormatError, match="twice"):
        load_drafter(write(tmp_path / "c", config(**EAGLE3), twice), target)
    folder = write(tmp_path / "d", config(**EAGLE3), eagle3_tensors())
    for change, message in (
        ({"vocab_size": 64}, "vocab_size=61"),
        ({"hidden_size": 16}, "hidden_size=32"),
    ):
        other = tiny_target(config=ModelConfig(**{**TINY.__dict__, "num_layers": 8, **change}))
        with pytest.raises(InputError, match=message):
            load_drafter(folder, other)
    with pytest.raises(InputError, match="no layers"):
        eagle = write(tmp_path / "e", config(), eagle_tensors())
        load_drafter(eagle, target, layers=[1, 2, 3])


def test_a_scaled_head_loads_once_a_base_is_chosen(target, tmp_path):
    scaled = config(**EAGLE3, rope_scaling={"rope_type": "llama3", "factor": 8.0})
    folder = write(tmp_path / "head", scaled, eagle3_tensors())
    drafter = load_drafter(folder, target, rope_theta=5e5)
    assert drafter.module.head.config.rope_theta == 5e5


@pytest.mark.parity
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_files_of_torch_save(target, tmp_path, dtype):
    import torch

    tensors = cast(eagle3_tensors(), {"float16": "f16", "bfloat16": "bf16"}.get(dtype, "f32"))
    expected = load_drafter(write(tmp_path / "head", config(**EAGLE3), tensors), target)
    saved = {
        name: torch.tensor(a.astype(np.float32)).to(getattr(torch, dtype))
        if a.dtype.kind not in "ib"
        else torch.tensor(a)
        for name, a in tensors.items()
    }
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config(**EAGLE3)))
    torch.save(saved, folder / "pytorch_model.bin")
    drafter = load_drafter(str(folder), target)
    ours = parameters(drafter.module.head)
    for name, array in parameters(expected.module.head).items():
        np.testing.assert_array_equal(ours[name], array)
    np.testing.assert_array_equal(drafter.module.draft_ids[...], expected.module.draft_ids[...])
