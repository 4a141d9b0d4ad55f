"""What generation_config.json suggests is kept, and said where a run differs."""

from __future__ import annotations

import json

import pytest

from eagle_jax import FormatError, Sampling
from eagle_jax.target.generation import differences, generation_defaults

FILE = {
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "do_sample": True,
    "temperature": 0.7,
    "top_k": 20,
    "top_p": 0.8,
    "repetition_penalty": 1.05,
    "num_beams": 1,
    "typical_p": None,
    "transformers_version": "4.51.0",
}


def write(folder, content):
    (folder / "generation_config.json").write_text(json.dumps(content))
    return folder


def test_how_tokens_are_drawn_is_kept(tmp_path):
    assert generation_defaults(tmp_path) == {}
    assert generation_defaults(write(tmp_path, FILE)) == {
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
        "repetition_penalty": 1.05,
        "num_beams": 1,
    }


def test_a_wrong_type_is_refused(tmp_path):
    with pytest.raises(FormatError, match="top_p"):
        generation_defaults(write(tmp_path, {"top_p": "0.9"}))


def test_what_differs_is_said():
    drawn = {name: value for name, value in FILE.items() if not name.endswith(("_id", "_version"))}
    said = differences(drawn, Sampling())
    assert "suggests temperature=0.7, top_k=20, top_p=0.8" in said
    assert "uses temperature=0.0, top_k=0, top_p=1.0" in said
    assert "repetition_penalty=1.05 is not supported" in said and "num_beams" not in said


@pytest.mark.parametrize(
    ("defaults", "sampling"),
    [
        ({}, Sampling(0.5)),
        ({"temperature": 0.6, "top_p": 0.9}, Sampling()),  # greedy without do_sample
        ({"do_sample": True, "temperature": 0.6}, Sampling(0.6, top_k=5)),
        ({"do_sample": False, "repetition_penalty": 1.0, "min_p": 0.0}, Sampling(1.0)),
    ],
)
def test_nothing_to_say(defaults, sampling):
    assert differences(defaults, sampling) is None


def test_sampling_without_a_temperature_means_one():
    assert "suggests temperature=1.0" in differences({"do_sample": True}, Sampling())
    assert differences({"do_sample": True}, Sampling(1.0)) is None
