"""Tiny configurations of every family, for transformers' classes: their switches are all on."""

from __future__ import annotations

from typing import Any

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
GEMMA = {
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": 5,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
SLIDING = {"use_sliding_window": True, "sliding_window": 5}
EXPERTS = {"num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 24}

# name -> (class of transformers, what differs from SIZES)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-bias": ("Llama", {"attention_bias": True, "head_dim": 16}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    "mistral": ("Mistral", {"sliding_window": 5, "head_dim": 16}),
    "mistral-whole": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", {**SLIDING, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-window": ("Qwen3", {"head_dim": 16, **SLIDING, "max_window_layers": 2}),
    "gemma2": (
        "Gemma2",
        {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": ("Gemma3", {**GEMMA, "rope_parameters": GEMMA3_ROPE}),
    "mixtral": ("Mixtral", {"num_experts_per_tok": 2, "num_local_experts": 4}),
    "qwen3-moe": (
        "Qwen3Moe",
        {**EXPERTS, "head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [1]},
    ),
    "qwen3-moe-window": ("Qwen3Moe", {**EXPERTS, **SLIDING, "decoder_sparse_step": 2}),
    "phi3": ("Phi3", {"sliding_window": 6}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "smollm3-window": ("SmolLM3", {"no_rope_layer_interval": 2, **SLIDING}),
    "olmo2": ("Olmo2", {}),
}


def make(name: str, folder, dtype: str = "float32") -> Any:
    """Saves a tiny random model of a case into `folder`, in a type of torch; needs torch.

    Returns:
      The model with the values that were saved, in float32.
    """
    import torch
    import transformers

    kind, switches = CASES[name]
    torch.manual_seed(len(name))
    config_class = "Gemma3TextConfig" if kind == "Gemma3" else f"{kind}Config"
    config = getattr(transformers, config_class)(**{**SIZES, **switches})
    model_class = getattr(transformers, f"{kind}ForCausalLM")
    model = model_class(config)
    for parameter in model.parameters():  # norms and biases other than their neutral values
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    # Casting back would leave the rotary frequencies with the error of the narrow type.
    return model_class.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
