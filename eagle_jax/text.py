"""Text to token ids and back: tokenizers, chat templates, and decoding token by token.

Works on `tokenizers` and Jinja directly. Importing a tokenizer class of transformers takes one to
four seconds, these two take a tenth of a second; `tests/test_text.py` compares the results.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle_jax.errors import FormatError, InputError

_REPLACEMENT = "\ufffd"  # what decoders write for bytes that form no character (yet)


class Tokenizer:
    """The tokenizer of a model folder; `load_tokenizer` makes it.

    Attributes:
      backend: the `tokenizers.Tokenizer`.
      special: texts of the special tokens by role, e.g. `{"eos_token": "<|im_end|>"}`.
      template: the chat template, or None.
    """

    def __init__(self, backend: Any, special: Mapping[str, str], template: str | None):
        self.backend = backend
        self.special = dict(special)
        self.template = template

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` can be used."""
        return self.template is not None

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain text, with the special tokens that the tokenizer adds by default."""
        return self.backend.encode(text).ids

    def encode_chat(self, messages: str | Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation up to where the answer begins.

        Args:
          messages: dictionaries with `role` and `content`, or the text of one user message.

        Raises:
          InputError: the tokenizer has no chat template, a message is malformed, or the template
            refuses the conversation (some want user and assistant to alternate).
        """
        # The template writes the special tokens itself.
        return self.backend.encode(self.render_chat(messages), add_special_tokens=False).ids

    def render_chat(self, messages: str | Sequence[Mapping[str, str]]) -> str:
        """The text that `encode_chat` encodes; same arguments and errors."""
        if not self.has_chat_template:
            raise InputError(
                "this model's tokenizer has no chat template; pass a plain prompt instead of a "
                "conversation, or use an instruction-tuned model"
            )
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        for message in messages:
            fields = message if isinstance(message, Mapping) else {}
            if not all(isinstance(fields.get(key), str) for key in ("role", "content")):
                raise InputError(
                    f"a message needs the strings 'role' and 'content', found {message!r:.200}"
                )
        import jinja2

        try:
            return _compile_template(self.template).render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self.special,
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise InputError(f"the chat template does not take these messages: {error}") from error

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids, without special tokens."""
        return self.backend.decode([int(index) for index in ids], skip_special_tokens=True)

    def stream_decoder(self) -> StreamDecoder:
        """A decoder for the tokens of one answer, one by one."""
        return StreamDecoder(self)


class StreamDecoder:
    """Decodes the tokens of one answer as they come.

    The pieces from `push`, followed by `flush`, are the text that `decode` gives for all ids at
    once. (One exception: tokenizers with byte fallback decode an invalid run of byte tokens as a
    whole, and may disown a character at its start that has already been shown.)
    """

    def __init__(self, tokenizer: Tokenizer):
        self._decode = tokenizer.decode
        # The ids since the last but one point where the text ended in a whole character. The
        # tokens before the last such point serve as context: some decoders drop a leading space.
        self._ids: list[int] = []
        self._context = 0  # of these ids, how many lie before the last such point
        self._shown = 0  # characters of their text that were returned

    def push(self, token_id: int) -> str:
        """The text that this token completes; "" inside a character, or for a special token."""
        self._ids.append(int(token_id))
        text = self._decode(self._ids)
        # A replacement at the end may turn into a character; one further left no longer can.
        whole = text.rstrip(_REPLACEMENT)
        piece = whole[self._shown :]
        self._shown = max(self._shown, len(whole))
        if len(whole) == len(text):
            rest = self._ids[self._context :]
            shown = len(self._decode(rest))
            if shown:  # else these tokens alone give no context
                self._ids, self._shown = rest, shown
                self._context = len(rest)
        return piece

    def flush(self) -> str:
        """What is left at the end, e.g. a replacement for an incomplete character; then empty."""
        text = self._decode(self._ids)
        piece = text[self._shown :]
        self._ids, self._context, self._shown = [], 0, 0
        return piece


def load_tokenizer(folder: Path) -> Tokenizer:
    """Loads `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja` of a folder.

    Raises:
      FormatError: `tokenizer.json` is missing or corrupt, or another file is no JSON.
    """
    from tokenizers import AddedToken

    folder = Path(folder)
    backend = _load_backend(folder)
    # A file may carry limits of its training; a prompt is never cut in silence.
    backend.no_truncation()
    backend.no_padding()

    config = read_optional_json(folder / "tokenizer_config.json")
    named = read_optional_json(folder / "special_tokens_map.json") | config
    special = {}
    for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"):
        value = named.get(f"{role}_token")
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            special[f"{role}_token"] = value
    # Decoding skips what is marked as special, and not every tokenizer.json marks these.
    marked = {t.content for t in backend.get_added_tokens_decoder().values() if t.special}
    for token in dict.fromkeys(special.values()):
        if token not in marked and backend.token_to_id(token) is not None:
            backend.add_special_tokens([AddedToken(token, special=True, normalized=False)])

    template = config.get("chat_template")
    if isinstance(template, list):  # several by name
        template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
    if (file := folder / "chat_template.jinja").is_file():
        template = file.read_text(encoding="utf-8")
    return Tokenizer(backend, special, template)


def eos_token_ids(folder: Path) -> tuple[int, ...]:
    """The ids that end an answer: `generation_config.json`'s, else `config.json`'s, else the
    tokenizer's; () when none of them names any."""
    folder = Path(folder)
    for file in ("generation_config.json", "config.json"):
        value = read_optional_json(folder / file).get("eos_token_id")
        if value is not None:
            values = value if isinstance(value, list) else [value]
            if not all(isinstance(index, int) for index in values):
                raise FormatError(f"{folder / file}: eos_token_id should be ids, found {value!r}")
            return tuple(values)
    if (folder / "tokenizer.json").is_file():
        tokenizer = load_tokenizer(folder)
        index = tokenizer.backend.token_to_id(tokenizer.special.get("eos_token", ""))
        return () if index is None else (index,)
    return ()


def _load_backend(folder: Path) -> Any:
    from tokenizers import Tokenizer as Backend

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise FormatError(
            f"{folder} has no tokenizer.json; transformers writes it: "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    try:
        return Backend.from_file(str(path))
    except Exception as error:  # the library raises no narrower class
        raise FormatError(f"{path} is no tokenizer that can be read: {error}") from error


def read_optional_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file that may be absent."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise FormatError(f"{path} is not valid JSON: {error}") from error
    return content if isinstance(content, dict) else {}


@functools.lru_cache(maxsize=8)
def _compile_template(source: str) -> Any:
    """Compiles a chat template in the dialect of transformers.

    Templates come with the weights, so they run in Jinja's sandbox, and see plain data only.
    """
    from jinja2 import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks the assistant's words for training; rendering ignores it."""

        tags = {"generation"}

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message):
        raise TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(source)
