"""Writes tests/fixtures: tiny models of transformers with their logits. Needs torch.

Run once by hand: python tests/make_fixtures.py [CASE ...]
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from families import make

FOLDER = Path(__file__).parent / "fixtures"
CASES = {
    "llama-tied": {"tie_word_embeddings": True, "num_key_value_heads": 2, "rope_theta": 10000.0},
    "llama-separate": {"tie_word_embeddings": False, "num_key_value_heads": 4, "rope_theta": 5e5},
}

# A case of families.py for each family, with all switches between them, and the type that they are
# stored in.
FAMILIES = {
    "llama3": "float32",
    "mistral": "bfloat16",
    "qwen2-window": "float16",
    "qwen3": "bfloat16",
    "qwen3-moe": "float16",
    "mixtral": "float16",
    "gemma2": "bfloat16",
    "gemma3": "float16",
    "phi3": "float16",
    "smollm3-window": "float16",
    "olmo2": "bfloat16",
}
FIXTURES = [*CASES, *FAMILIES]


def reference(name: str, folder: Path):
    """Saves a tiny random model into `folder`; returns (model, token ids `[2, 20]`).

    The model computes in float32, with the values that were saved.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    ids = np.random.default_rng(0).integers(0, 61, (2, 20))
    if name in FAMILIES:
        return make(name, folder, dtype=FAMILIES[name]), ids
    torch.manual_seed(len(name))
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        initializer_range=0.3,
        **CASES[name],
    )
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():  # norms other than one, so that they are tested
        parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return model, ids


if __name__ == "__main__":
    import torch

    for case in sys.argv[1:] or FIXTURES:
        model, ids = reference(case, FOLDER / case)
        with torch.no_grad():
            out = model(torch.tensor(ids), output_hidden_states=True)
        np.savez(
            FOLDER / case / "expected.npz",
            ids=ids,
            logits=out.logits.numpy(),
            stream_1=out.hidden_states[1].numpy(),
        )
