"""The tokenizer inside a GGUF file, rebuilt with the `tokenizers` library.

transformers has a converter of its own, which ignores `tokenizer.ggml.pre`, the name of the way
text is cut into words. SmolLM2 then gets "\\n", "\\n", "5" where "\\n\\n", "5" is right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle_jax.errors import FormatError

# How text is cut into words before byte pairs are merged, by the name that llama.cpp gives it.
_PRE_TOKENIZERS = {
    "gpt-2": "gpt2",
    "smollm": "digits",
    "starcoder": "digits",
    "llama-bpe": "llama3",
    "llama3": "llama3",
    "llama-v3": "llama3",
    "qwen2": "qwen2",
    "deepseek-r1-qwen": "qwen2",
}
_WORD = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # llama.cpp's types of tokens
_SPACE = "\u2581"


def build_tokenizer(
    path: Path, get: Callable[..., Any], model_config: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Builds the `tokenizers.Tokenizer` and the content of `tokenizer_config.json`.

    Args:
      path: the GGUF file, for messages.
      get: `get(key)` and `get(key, default)` give metadata; the first raises FormatError.
      model_config: the content of `config.json`.

    Raises:
      FormatError: the kind of tokenizer is not supported, or its parts do not fit together.
    """
    model, pre = get("tokenizer.ggml.model"), get("tokenizer.ggml.pre", None)
    if model not in ("gpt2", "llama"):
        raise FormatError(
            f"{path}: expected a byte-level BPE ('gpt2') or SentencePiece ('llama') tokenizer, "
            f"found {model!r}; pass the model's folder in Hugging Face layout instead"
        )
    tokens, vocab_size = get("tokenizer.ggml.tokens"), model_config["vocab_size"]
    if len(tokens) > vocab_size:
        raise FormatError(f"{path}: {len(tokens)} tokens, but only {vocab_size} embedding rows")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": model_config["max_position_embeddings"],
    }
    for role, name in {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}.items():
        index = get(f"tokenizer.ggml.{name}_token_id", None)
        if index is not None:
            if not 0 <= index < len(tokens):
                raise FormatError(f"{path}: {name}_token_id {index} lies outside the vocabulary")
            config[f"{role}_token"] = tokens[index]
    if template := get("tokenizer.chat_template", None):
        config["chat_template"] = template

    # llama.cpp lets the metadata decide; where they are silent, it adds BOS for SentencePiece and
    # Llama 3.
    usual = model == "llama" or pre in ("llama-bpe", "llama3", "llama-v3")
    wanted = {"before": ("bos", usual), "after": ("eos", False)}
    ends = {
        side: config.get(f"{role}_token")
        for side, (role, default) in wanted.items()
        if get(f"tokenizer.ggml.add_{role}_token", default)
    }
    types = get("tokenizer.ggml.token_type")
    if len(types) != len(tokens):
        raise FormatError(f"{path}: {len(tokens)} tokens, but types for {len(types)}")
    try:
        if model == "llama":
            scores, prefix = (
                get("tokenizer.ggml.scores"),
                get("tokenizer.ggml.add_space_prefix", True),
            )
            tokenizer = sentencepiece_bpe(tokens, scores, types, prefix=prefix)
        else:
            tokenizer = byte_level_bpe(tokens, get("tokenizer.ggml.merges"), types, pre)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from error
    _add_ends(tokenizer, **ends)
    return tokenizer, config


def byte_level_bpe(
    tokens: Sequence[str], merges: Sequence[str], types: Sequence[int], pre: str | None
) -> Any:
    """Builds a byte-level BPE tokenizer from what a GGUF file stores.

    Args:
      tokens: texts of the vocabulary, in the byte-level alphabet, by id.
      merges: pairs `left right`, the first to be merged first.
      types: llama.cpp's type of each token.
      pre: llama.cpp's name for the way text is cut into words.

    Returns:
      A `tokenizers.Tokenizer`.

    Raises:
      FormatError: `pre` is unknown, or merges name pieces that the vocabulary lacks.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    if pre not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise FormatError(f"unknown pre-tokenizer {pre!r}; known are {known}")
    kind = _PRE_TOKENIZERS[pre]
    vocab = {token: index for index, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    try:
        # Llama 3 takes a whole word from the vocabulary even where no merges lead to it.
        model = models.BPE(vocab=vocab, merges=pairs, ignore_merges=kind == "llama3")
    except Exception as error:  # the library raises no narrower class
        raise FormatError(f"vocabulary and merges do not fit: {error}") from error
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = _pre_tokenizer(kind)
    tokenizer.decoder = decoders.ByteLevel()
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    _add_special(tokenizer, tokens, types, normalized=False)
    return tokenizer


def sentencepiece_bpe(
    tokens: Sequence[str], scores: Sequence[float], types: Sequence[int], *, prefix: bool
) -> Any:
    """Builds a SentencePiece tokenizer of the BPE kind, as Gemma's and Llama 2's are.

    SentencePiece joins the two neighbours whose union has the highest score, again and again. That
    is BPE with a merge for every way to cut a piece in two, ordered by the piece's score.

    Args:
      tokens: pieces by id; `\u2581` stands for a space.
      scores: of each piece.
      types: llama.cpp's type of each piece.
      prefix: text is read as if a space came before it.

    Raises:
      FormatError: the numbers of tokens and scores differ.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    if len(scores) != len(tokens):
        raise FormatError(f"{len(tokens)} tokens, but scores for {len(scores)}")
    vocab = {token: index for index, token in enumerate(tokens)}
    pieces = {token for token, kind in zip(tokens, types, strict=True) if kind == _NORMAL}
    merges = [
        (-scores[vocab[piece]], piece[:cut], piece[cut:])
        for piece in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    unknown = next((t for t, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[(left, right) for _, left, right in sorted(merges)],
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    space = [normalizers.Replace(" ", _SPACE)]
    before = [normalizers.Prepend(_SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*before, *space])
    undo = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(undo + [decoders.Strip(" ", 1, 0)] * prefix)
    _add_special(tokenizer, tokens, types, normalized=True)
    return tokenizer


def _add_special(
    tokenizer: Any, tokens: Sequence[str], types: Sequence[int], normalized: bool
) -> None:
    """Tokens that text is searched for first; `normalized`: user-defined ones may hold spaces."""
    from tokenizers import AddedToken

    tokenizer.add_tokens(
        [
            AddedToken(
                token,
                special=kind == _CONTROL,
                normalized=normalized and kind == _USER_DEFINED,
            )
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )


def _add_ends(tokenizer: Any, before: str | None = None, after: str | None = None) -> None:
    """Makes `encode` put a token in front and another behind."""
    from tokenizers import processors

    if before or after:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[part for part in (before, "$A", after) if part],
            special_tokens=[
                (token, tokenizer.token_to_id(token)) for token in {before, after} if token
            ],
        )


def _pre_tokenizer(kind: str) -> Any:
    from tokenizers import Regex
    from tokenizers import pre_tokenizers as cut

    if kind == "gpt2":
        return cut.ByteLevel(add_prefix_space=False, use_regex=True)
    if kind == "digits":  # every digit is a word
        digits = cut.Digits(individual_digits=True)
        return cut.Sequence([digits, cut.ByteLevel(add_prefix_space=False, use_regex=True)])
    word = Regex(_WORD % ("{1,3}" if kind == "llama3" else ""))
    bytes_ = cut.ByteLevel(add_prefix_space=False, use_regex=False)
    return cut.Sequence([cut.Split(word, behavior="isolated"), bytes_])
