"""Do answers begin where the chat template says? Training on a shifted span looks well and drafts
badly, so it is refused."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.text import Text

from eagle_jax.errors import InputError
from eagle_jax.text import Tokenizer
from train.data import Sample

_MARK = "\u2603 the user's words \u2603"
NEAR = 4  # tokens by which a span may be off before it counts as not templated at all


def around_user(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Token ids that the chat template writes before and after the words of a first user turn.

    Raises:
      InputError: there is no chat template, or one that does not keep the user's words whole.
    """
    before, mark, after = tokenizer.render_chat(_MARK).partition(_MARK)
    if not mark:
        raise InputError("the chat template changes the user's words")
    encode = tokenizer.backend.encode
    return tuple(encode(part, add_special_tokens=False).ids for part in (before, after))


def check_spans(tokenizer: Tokenizer | None, samples: Sequence[Sample]) -> int:
    """Counts the samples whose prompt ends as the chat template lets it end; 0 without a template.

    Raises:
      InputError: an answer is empty, or begins a few tokens beside the template's header.
    """
    for number, sample in enumerate(samples, 1):
        if not 0 < sample.answer_start < len(sample.tokens):
            raise InputError(
                f"conversation {number} of {len(samples)} has an empty "
                f"{'answer' if sample.answer_start else 'prompt'}; `prompt` and `out` must both "
                "hold token ids"
            )
    if tokenizer is None or not tokenizer.has_chat_template:
        return 0
    header = np.array(around_user(tokenizer)[1])
    templated = 0
    for number, sample in enumerate(samples, 1):
        tokens, start = sample.tokens, sample.answer_start
        if _ends_with(tokens[:start], header):
            templated += 1
            continue
        for off in sorted(range(-NEAR, NEAR + 1), key=abs):
            if _ends_with(tokens[: max(0, start + off)], header):
                written = tokenizer.backend.decode(header.tolist(), skip_special_tokens=False)
                side = "before" if off > 0 else "after"
                raise InputError(
                    f"conversation {number} of {len(samples)}: the answer begins {abs(off)} "
                    f"token(s) {side} the end of the chat template's header {written!r}; `prompt` "
                    "must end with that header and `out` must begin right after it"
                )
    return templated


def _ends_with(tokens: np.ndarray, tail: np.ndarray) -> bool:
    return len(tokens) >= len(tail) > 0 and np.array_equal(tokens[len(tokens) - len(tail) :], tail)


def marked(tokenizer: Tokenizer, sample: Sample) -> Text:
    """A conversation with its special tokens; the supervised span stands between >>> and <<<."""

    def text(ids: np.ndarray) -> str:
        return tokenizer.backend.decode(ids.tolist(), skip_special_tokens=False)

    prompt, answer = sample.tokens[: sample.answer_start], sample.tokens[sample.answer_start :]
    shown = Text(text(prompt), style="dim")
    return shown.append(">>>" + text(answer) + "<<<", style="bold green")
