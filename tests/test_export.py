"""Heads out: the contract of the loaders that others use, and an exact way back."""

from __future__ import annotations

import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from make_fixtures import FOLDER
from released import cast, config, deep_target, eagle3_tensors, eagle_tensors, write
from safetensors.numpy import load_file
from tokenizers import Tokenizer, models

from eagle_jax import InputError, TreeShape, load_drafter, load_target
from eagle_jax.cli import main
from eagle_jax.drafters.formats.write import export_head
from eagle_jax.drafters.load import save_head
from eagle_jax.nn.modules import parameters
from eagle_jax.sampling import Sampler
from eagle_jax.tiny import tiny_drafter

ATTENTION = [f"self_attn.{part}_proj.weight" for part in "qkvo"]
MLP = [f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
LAYER = [*ATTENTION, *MLP, "post_attention_layernorm.weight"]
LAYER3 = [*LAYER, "hidden_norm.weight", "input_layernorm.weight"]
OUTER = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
KEYS = {
    "eagle": {"embed_tokens.weight", "fc.weight", *(f"layers.0.{name}" for name in LAYER)},
    "eagle3": {*OUTER, *(f"midlayer.{name}" for name in LAYER3)},
    "speculators": {*OUTER, *(f"layers.0.{name}" for name in LAYER3)},
}


@pytest.fixture(scope="module")
def target():
    return deep_target()


@pytest.fixture
def ours(target, tmp_path):
    """An EAGLE-3 head in our format that scores with rows of the target's LM head."""
    module = tiny_drafter(target, draft_vocab_size=30, method="eagle3").module
    head = module.head
    head.config = type(head.config)(
        **{**head.config.__dict__, "own_lm_head": False, "fc_bias": False}
    )
    head.lm_head, head.fc.bias = None, None
    for index, norm in enumerate((head.embed_norm, head.hidden_norm, head.mlp_norm, head.norm)):
        weight = norm.weight
        weight[...] = weight[...] + 0.3 * jax.random.normal(jax.random.key(index), weight.shape)
    save_head(tmp_path / "ours", head, np.asarray(module.draft_ids[...]), {})
    return load_drafter(str(tmp_path / "ours"), target)


def same(target, *drafters):
    """Whether drafters grow the same trees from the same rows."""
    rng = np.random.default_rng(2)
    tokens, trees = jnp.asarray(rng.integers(0, 61, (2, 7)), jnp.int32), []
    width = 32 * max(1, len(drafters[0].module.taps))
    features = jnp.asarray(rng.normal(size=(2, 7, width)), jnp.float32)
    sampler = Sampler(
        key=jnp.zeros((2, 2), jnp.uint32),
        temperature=jnp.zeros(2),
        top_k=jnp.zeros(2, jnp.int32),
        top_p=jnp.ones(2),
        sampled=False,
        filtered=False,
    )
    length = jnp.full(2, 7)
    for drafter in drafters:

        def grow(module):
            state = module.init(2, 16)
            state = module.observe(state, tokens, features, jnp.zeros(2, jnp.int32), length)
            draw = sampler.draw(length + 1, 3, 61)
            tree = module.propose(state, tokens[:, 0], length, draw, TreeShape(6, 2, 3))
            return tree.tokens, tree.parents, state.logits

        trees.append(jax.tree.map(np.asarray, jax.jit(functools.partial(grow, drafter.module))()))
    return all(np.array_equal(x, y) for x, y in zip(*trees, strict=True))


@pytest.mark.parametrize("name", ["eagle3", "speculators"])
def test_a_head_of_ours_goes_out_and_comes_back(target, ours, tmp_path, name):
    folder = tmp_path / "out"
    export_head(ours.module, target, name, folder, verifier="org/model")
    tensors = load_file(folder / "model.safetensors")
    assert tensors.keys() == KEYS[name]
    layer = "midlayer." if name == "eagle3" else "layers.0."
    ids = np.asarray(ours.module.draft_ids[...])
    assert tensors["d2t"].dtype == np.int64 and tensors["t2d"].dtype == np.bool_
    np.testing.assert_array_equal(tensors["d2t"] + np.arange(30), ids)
    np.testing.assert_array_equal(np.flatnonzero(tensors["t2d"]), ids)
    shapes = {n: a.shape for n, a in tensors.items()}
    assert shapes["fc.weight"] == (32, 96) and shapes["lm_head.weight"] == (30, 32)
    assert shapes[f"{layer}self_attn.q_proj.weight"] == (32, 64)
    assert shapes[f"{layer}self_attn.k_proj.weight"] == (16, 64)
    assert shapes[f"{layer}mlp.down_proj.weight"] == (32, 48)
    rows = np.asarray(target.model.head_weight)[ids]
    np.testing.assert_array_equal(tensors["lm_head.weight"].astype(np.float32), rows)
    floats = {a.dtype for n, a in tensors.items() if n not in ("d2t", "t2d")}
    assert floats == {np.dtype(np.float32)}  # the target's rows need it
    fields = json.loads((folder / "config.json").read_text())
    layer_fields = fields if name == "eagle3" else fields["transformer_layer_config"]
    assert layer_fields["model_type"] == "llama" and layer_fields["num_hidden_layers"] == 1
    assert layer_fields["vocab_size"] == 61 and layer_fields["max_position_embeddings"] == 96
    assert layer_fields["torch_dtype"] == "float32" and fields["draft_vocab_size"] == 30
    assert fields["tie_word_embeddings"] is False and fields["norm_before_residual"] is False
    assert None not in fields.values() and None not in layer_fields.values()
    if name == "eagle3":
        assert fields["architectures"] == ["LlamaForCausalLMEagle3"]
        assert fields["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    else:
        assert fields["speculators_model_type"] == "eagle3"
        given = fields["speculators_config"]
        assert given["proposal_methods"][0]["speculative_tokens"] >= 1
        assert given["verifier"] == {
            "name_or_path": "org/model",
            "architectures": ["LlamaForCausalLM"],
        }
    back = load_drafter(str(folder), target)
    before, after = parameters(ours.module.head), parameters(back.module.head)
    np.testing.assert_array_equal(after.pop("lm_head"), rows)
    assert before.keys() == after.keys()
    for key, array in before.items():
        np.testing.assert_array_equal(after[key], array)
    assert same(target, ours, back)


CASES = {
    "eagle": ("eagle", config(bias=False), eagle_tensors(bias=False)),
    "eagle with biases": ("eagle", config(qkv_bias=True), eagle_tensors(qkv_bias=True)),
    "plain": ("eagle3", config(), eagle3_tensors()),
    "full vocabulary": ("eagle3", config(), eagle3_tensors(drafts=61)),
    "switches": (
        "eagle3",
        config(fc_norm=True, norm_output=True, norm_before_residual=True, attention_bias=True),
        eagle3_tensors(extra=("fc_norm", "bias")),
    ),
    "norm before fc": (
        "speculators", config(norm_before_fc=True), eagle3_tensors(extra=("input_norm",)),
    ),
    "own width": (
        "speculators",
        config(hidden_size=48, target_hidden_size=32, rope_theta=77.0),
        eagle3_tensors(width=48, embed=np.random.default_rng(3).normal(size=(61, 48)).astype("f4")),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_released_head_goes_out_and_comes_back(target, tmp_path, name):
    format, fields, tensors = CASES[name]
    tensors = cast(tensors, "bf16")
    first = load_drafter(write(tmp_path / "in", fields, tensors), target)
    export_head(first.module, target, format, tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    if format == "eagle":  # the target's embedding, which is no bfloat16, is added
        assert written.pop("embed_tokens.weight").shape == (61, 32)
        assert {a.dtype.name for a in written.values()} == {"float32"}
    else:
        kinds = {a.dtype.name for n, a in written.items() if n not in ("d2t", "t2d")}
        assert kinds == {"bfloat16"}
    short = {
        n.replace("midlayer.", "layers.0."): np.asarray(a, np.float32) for n, a in written.items()
    }
    for key, array in tensors.items():
        expected = array.astype(np.float32)
        np.testing.assert_array_equal(short[key.replace("midlayer.", "layers.0.")], expected)
    second = load_drafter(str(tmp_path / "out"), target)
    assert second.module.head.config == first.module.head.config
    assert same(target, first, second)


def test_what_a_format_cannot_say_is_refused(target, ours, tmp_path):
    eagle = tiny_drafter(target, draft_vocab_size=30).module
    biased = tiny_drafter(target, method="eagle3").module
    for module, format, message in (
        (eagle, "eagle", "whole vocabulary"),
        (eagle, "eagle3", "method 'eagle'"),
        (ours.module, "eagle", "method 'eagle3'"),
        (biased, "eagle3", "no bias"),
        (ours.module, "medusa", "expected a format"),
    ):
        with pytest.raises(InputError, match=message):
            export_head(module, target, format, tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_the_command(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE_JAX_CACHE", str(tmp_path / "cache"))
    model = tmp_path / "model"
    shutil.copytree(FOLDER / "llama-separate", model)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(61)}, unk_token="w0"))
    words.save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text("{}")
    target = load_target(str(model))
    module = tiny_drafter(target, draft_vocab_size=30, method="eagle3").module
    module.head.fc.bias[...] = jnp.zeros(32)
    head = tmp_path / "head"
    save_head(head, module.head, np.asarray(module.draft_ids[...]), {})
    options = ["--target", str(model), "--format", "speculators", "--out", str(tmp_path / "out")]
    assert main(["export", str(head), *options]) == 2
    assert "bias" in capsys.readouterr().err and not (tmp_path / "out").exists()
    plain = write(tmp_path / "plain", config(), eagle3_tensors())
    assert main(["export", plain, *options, "--drafter-layers", "0,1,2"]) == 0
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    assert fields["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    assert fields["speculators_config"]["verifier"]["name_or_path"] == str(model)
    assert main(["export", plain, *options[:-1], plain]) == 2
    assert "itself" in capsys.readouterr().err


@pytest.mark.parity
def test_torch_reads_what_is_written(target, ours, tmp_path):
    import torch
    from safetensors.torch import load_file as load_torch

    export_head(ours.module, target, "eagle3", tmp_path / "out")
    found = load_torch(tmp_path / "out" / "model.safetensors")
    expected = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        np.testing.assert_array_equal(tensor.numpy(), expected[name])
    assert found["d2t"].dtype == torch.int64 and found["t2d"].dtype == torch.bool
