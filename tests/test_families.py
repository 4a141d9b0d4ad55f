"""Configurations of every family: both spellings, defaults, and what is refused."""

from __future__ import annotations

import warnings

import pytest
from make_fixtures import FOLDER

from eagle_jax import FormatError, InputError
from eagle_jax.config import ExpertsConfig, LayerSwitches, RopeScaling
from eagle_jax.target.families import FAMILIES, model_config
from eagle_jax.target.load import read_json

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def read(family, **fields):
    raw = {**SIZES, "model_type": family, **fields}
    if "moe" not in family and family != "mixtral":
        raw = {name: value for name, value in raw.items() if "expert" not in name}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return model_config({"text_config": raw, **raw} if family == "gemma3" else raw)


def windows(config):
    return [config.layer(index).window for index in range(config.num_layers)]


@pytest.mark.parametrize(
    ("family", "four", "five"),
    [
        (
            "llama",
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3,
                                                 "original_max_position_embeddings": 64}},
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3,
                                 "original_max_position_embeddings": 64}},
        ),
        (
            "llama",
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2}},
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000}},
        ),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3,
             "rope_theta": 1e6},
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3,
             "layer_types": ["full_attention"] * 3 + ["sliding_attention"],
             "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        ),
        (
            "gemma3_text",
            {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 2,
             "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window": 8},
            {"rope_parameters": {
                "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
                "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"}},
             "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8},
        ),
        (
            "smollm3",
            {"no_rope_layer_interval": 4, "rope_theta": 2e6},
            {"no_rope_layers": [1, 1, 1, 0], "layer_types": ["full_attention"] * 4,
             "rope_parameters": {"rope_theta": 2e6, "rope_type": "default"}},
        ),
    ],
)  # fmt: skip
def test_both_spellings_are_one_model(family, four, five):
    assert read(family, **four) == read(family, **five)


def test_what_each_family_sets():
    llama = read("llama", rope_scaling={"rope_type": "llama3", **LLAMA3})
    assert llama.layers == ()
    assert llama.rope(0) == (10_000.0, RopeScaling(8.0, (1.0, 4.0, 4096)))
    assert windows(read("mistral", sliding_window=None)) == [None] * 4
    assert windows(read("mistral", sliding_window=16)) == [16] * 4
    assert windows(read("qwen2", sliding_window=16)) == [None] * 4
    assert read("qwen2").layer(0) == LayerSwitches(qkv_bias=True)
    assert read("qwen3").layer(0) == LayerSwitches(qk_norm="head")
    assert read("olmo2").layer(3) == LayerSwitches(norms="after", qk_norm="whole")
    assert [read("smollm3").layer(index).rope for index in range(4)] == [True] * 3 + [False]
    assert read("smollm3").rope(3) is None
    gemma2 = read("gemma2", sliding_window=16)
    assert windows(gemma2) == [16, None, 16, None]
    assert (gemma2.logit_cap, gemma2.layer(0).score_cap) == (30.0, 50.0)
    assert gemma2.tied and gemma2.scaled_embedding
    gemma3 = read("gemma3_text", num_hidden_layers=7, sliding_window=16)
    assert windows(gemma3) == [16] * 5 + [None, 16]
    assert (gemma3.rope(0), gemma3.rope(5)) == ((1e4, None), (1e6, None))
    assert read("mixtral").layer(0).experts == ExpertsConfig(4, 2, 48)
    assert read("mixtral").rope_theta == 1e6
    moe = read("qwen3_moe", moe_intermediate_size=24, mlp_only_layers=[1], norm_topk_prob=True)
    experts = [moe.layer(index).experts for index in range(4)]
    assert experts == [ExpertsConfig(4, 2, 24), None, *[ExpertsConfig(4, 2, 24)] * 2]


def test_the_text_part_of_a_model_that_sees_images_has_defaults():
    config = model_config(
        {
            "model_type": "gemma3",
            "vision_config": {"hidden_size": 8},
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
        }
    )
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert (config.vocab_size, config.context, config.tied) == (262_208, 131_072, True)
    assert config.rope(5) == (1e6, RopeScaling(8.0)) and config.rope(0) == (1e4, None)


REFUSED = [
    ("mamba", {}, "mamba"),
    ("llama", {"mlp_bias": True}, "mlp_bias"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
    ("llama", {"rope_interleaved": True}, "rope_interleaved"),
    ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "dynamic"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1}}}, "full_attention"),
    ("phi3", {"rope_scaling": {"type": "longrope", "long_factor": [1.0]}}, "longrope"),
    ("mistral", {"layer_types": ["full_attention"] * 4, "sliding_window": 8}, "layer_types"),
    ("qwen2", {"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
    ("qwen3", {"layer_types": ["full_attention"]}, "layer_types"),
    ("qwen3", {"layer_types": ["sliding_attention"] * 4}, "use_sliding_window"),
    ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("gemma3_text", {"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters"),
    ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers"),
    ("mixtral", {"num_experts_per_tok": 9}, "experts"),
    ("mistral", {"sliding_window": 0}, "window"),
]


@pytest.mark.parametrize(("family", "fields", "message"), REFUSED)
def test_switches_without_an_implementation_are_refused_by_name(family, fields, message):
    with pytest.raises(InputError, match=message):
        read(family, **fields)


def test_missing_and_wrong_fields_are_named():
    raw = {"model_type": "llama", **SIZES}
    del raw["hidden_size"]
    with pytest.raises(FormatError, match="hidden_size"):
        model_config(raw)
    with pytest.raises(FormatError, match="vocab_size.*'97'"):
        read("llama", vocab_size="97")
    with pytest.raises(FormatError, match="low_freq_factor"):
        read("llama", rope_scaling={"rope_type": "llama3", "factor": 8.0})
    with pytest.raises(FormatError, match="text_config"):
        model_config({"model_type": "gemma3"})


def test_unknown_fields_are_said():
    raw = {**read_json(FOLDER / "llama-tied" / "config.json"), "residual_gain": 2.0, "odd": None}
    with pytest.warns(UserWarning, match=r"\['residual_gain'\]"):
        model_config(raw)


def test_every_family_refuses_a_quantised_checkpoint():
    for family in FAMILIES:
        with pytest.raises(InputError, match="quantization_config"):
            read(family, quantization_config={"quant_method": "gptq"})
