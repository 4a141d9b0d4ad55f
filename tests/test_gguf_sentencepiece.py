"""SentencePiece tokenizers of GGUF files, against the rule that defines them."""

from __future__ import annotations

import numpy as np
import pytest

from eagle_jax.errors import FormatError
from eagle_jax.target.gguf_tokenizer import sentencepiece_bpe

SPACE = "▁"
BYTES = [f"<0x{value:02X}>" for value in range(256)]
LETTERS = [SPACE, *"abcd\n"]


def vocabulary(seed=0):
    """Random pieces, each of which two shorter ones make up, with falling scores."""
    rng, pieces = np.random.default_rng(seed), list(LETTERS)
    while len(pieces) < 40:
        new = "".join(rng.choice(pieces, 2))
        if new not in pieces and len(new) < 7:
            pieces.append(new)
    tokens = ["<unk>", "<bos>", "<turn>", *BYTES, *pieces, "\n\n"]
    types = [2, 3, 4] + [6] * 256 + [1] * len(pieces) + [4]
    scores = [0.0] * 259 + [-float(rank) for rank in rng.permutation(len(pieces))] + [0.0]
    return tokens, scores, types


def by_the_rule(text, tokens, scores, types):
    """Joins the best-scored pair of neighbours, the leftmost among equals, until none is left."""
    score = {
        token: value for token, value, kind in zip(tokens, scores, types, strict=True) if kind == 1
    }
    parts = list(text)
    while True:
        unions = ["".join(parts[at : at + 2]) for at in range(len(parts) - 1)]
        joined = [(score[union], -at) for at, union in enumerate(unions) if union in score]
        if not joined:
            return parts
        at = -max(joined)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@pytest.mark.parametrize("prefix", [False, True])
def test_pieces_join_by_score(prefix):
    tokens, scores, types = vocabulary()
    tokenizer, rng = (
        sentencepiece_bpe(tokens, scores, types, prefix=prefix),
        np.random.default_rng(1),
    )
    lengths = []
    for _ in range(60):
        text = "".join(rng.choice(list("abcd   "), 24)).strip()
        whole = (SPACE if prefix else "") + text.replace(" ", SPACE)
        ids = tokenizer.encode(text).ids
        assert [tokens[index] for index in ids] == by_the_rule(whole, tokens, scores, types)
        assert tokenizer.decode(ids) == text
        lengths.append(len(ids))
    assert np.mean(lengths) < 18


def test_what_is_no_piece_becomes_bytes_and_what_the_user_defined_is_found_first():
    tokens, scores, types = vocabulary()
    tokenizer = sentencepiece_bpe(tokens, scores, types, prefix=False)
    ids = tokenizer.encode("aé<turn>\n\nb").ids
    expected = ["a", "<0xC3>", "<0xA9>", "<turn>", "\n\n", "b"]
    assert [tokens[index] for index in ids] == expected
    assert tokenizer.decode(ids) == "aé<turn>\n\nb"
    assert tokenizer.decode(tokenizer.encode("<bos>a").ids) == "a", "control tokens are not text"


def test_scores_must_be_as_many_as_tokens():
    tokens, scores, types = vocabulary()
    with pytest.raises(FormatError, match="scores"):
        sentencepiece_bpe(tokens, scores[:-1], types, prefix=False)
