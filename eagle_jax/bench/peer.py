"""The comparison with transformers' `generate`, where torch is installed."""

from __future__ import annotations

import time
from collections.abc import Sequence

from eagle_jax import hub
from eagle_jax.decode.generate import encode
from eagle_jax.errors import InputError
from eagle_jax.target.load import Target


def transformers_tokens_per_s(target: Target, prompts: Sequence[str], max_new_tokens: int) -> float:
    """Tokens per second of greedy decoding in float32, prefill excluded, over all prompts.

    Prefill is taken out as the time that one new token takes.
    """
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise InputError(
            "--transformers needs torch; install it or leave the option out"
        ) from error
    folder = hub.resolve(target.name)
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()
    seconds = tokens = 0
    for number, prompt in enumerate(prompts):
        ids = torch.tensor([encode(target, prompt, chat=True)])
        mask = torch.ones_like(ids)

        def run(budget, ids=ids, mask=mask):
            begin = time.perf_counter()
            with torch.inference_mode():
                out = model.generate(
                    ids,
                    attention_mask=mask,
                    do_sample=False,
                    max_new_tokens=budget,
                    pad_token_id=target.eos[0] if target.eos else 0,
                )
            return time.perf_counter() - begin, out.shape[1] - ids.shape[1]

        if not number:
            run(8)
        first, _ = run(1)
        whole, written = run(max_new_tokens)
        seconds += whole - first
        tokens += written - 1
    return tokens / seconds
